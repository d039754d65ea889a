"""Rounds that end with the first prompts to complete. Changes which samples are trained on, so it is never automatic."""

import math
from dataclasses import dataclass

from rl_accel.feature import ENABLE, Feature, SlimeHooks, flag


@dataclass
class TailBatchingFlags:
    """Flags of ``rl_accel.tail_batching``."""

    enable: bool | None = flag(None, ENABLE)
    prompt_ratio: float | str = flag(
        1.25, "prompts launched in short rounds over those trained, or auto", minimum=1.0, words=("auto",)
    )
    response_ratio: float = flag(
        1.25, "responses launched in short rounds over those trained; 1 is unbiased", minimum=1.0
    )
    queue_threshold: int | None = flag(None, "deferred prompts that make a long round; null: a whole batch", minimum=1)
    max_deferrals: int = flag(1, "a prompt cut off this often waits for a long round", minimum=1)
    max_retries: int = flag(2, "how often a failed response is generated again", minimum=0)
    auto_limit: float = flag(2.0, "the largest ratio that prompt_ratio=auto may take", minimum=1.0)
    domain_quotas: dict[str, int] | None = flag(  # noqa: RUF009 (a field, and null is no dict)
        None, "prompts of each domain in a batch; null: as the data comes"
    )
    domain_key: str = flag("data_source", "the column of the data set that names a row's domain")

    def validate(self) -> None:
        """Raise ValueError for a ratio without end or a quota of nothing."""
        for name in ("prompt_ratio", "response_ratio", "auto_limit"):
            if getattr(self, name) == math.inf:
                raise ValueError(f"{name} must be finite, found inf")
        for domain, quota in (self.domain_quotas or {}).items():
            if quota < 1:
                raise ValueError(f"domain_quotas[{domain!r}] must be at least 1, found {quota}")


TAIL_BATCHING = Feature(
    name="tail_batching",
    summary="short rounds that do not wait for the longest responses, and lose no prompt",
    flags=TailBatchingFlags,
    lossless=False,
    switches={
        "verl": ("rl_accel.integrations.verl.tail_batching.wiring",),
        "slime": ("rl_accel.integrations.slime.tail_batching.seams", "rl_accel.patches.slime.requests"),
    },
    verl="rl_accel.integrations.verl.tail_batching.wiring",
    slime=SlimeHooks(
        {
            "rollout_function_path": "rl_accel.integrations.slime.tail_batching.rollout.generate_rollout",
            "data_source_path": "rl_accel.integrations.slime.tail_batching.data_source.TailDataSource",
            # slime has derived it from --rollout-function-path before it reads this file.
            "eval_function_path": "slime.rollout.sglang_rollout.generate_rollout",
        }
    ),
)
