"""What a user may choose about tail batching, checked once."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, Literal

DEFAULT_RATIO = 1.25


@dataclass(frozen=True)
class TailSettings:
    """The parameters of :class:`~rl_accel.rollout.tail_batching.TailBatching`.

    Args:
        prompts_per_step: P0, prompts in a batch.
        responses_per_prompt: R0, responses of each.
        prompt_ratio: prompts launched over P0 in short rounds, at least 1; "auto" starts at 1.25 and then takes the
            ratio with the least expected seconds per trained prompt (see
            :class:`~rl_accel.rollout.tail_ratio.CompletionTimes`).
        response_ratio: responses launched over R0 in short rounds, at least 1. Above 1 the shorter responses of a
            prompt are preferred; 1 is the unbiased setting.
        queue_threshold: deferred prompts that make a long round; default P0. Below P0, new prompts fill the round.
        max_deferrals: a prompt cut off this often waits for a long round; until then the next short one tries again.
        max_retries: how often a failed response is started again. A replacement inherits the count of the one it
            replaces, so a server that dies with many responses costs each of them one retry. A prompt fails when a
            response has no retry left and fewer than R0 others remain.
        filter_groups: ask for a verdict on each complete group (dynamic sampling as in DAPO).
        domain_quotas: prompts of each domain in a batch; must add up to P0. Final rounds, and a round in which one
            domain runs out after the data is exhausted, give its places to others rather than lose prompts.
        auto_limit: the largest ratio that "auto" may take.
        data_id: anything that names the data and its order; a saved state with another one is refused.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
    """

    prompts_per_step: int
    responses_per_prompt: int
    _: KW_ONLY
    prompt_ratio: float | Literal["auto"] = DEFAULT_RATIO
    response_ratio: float = DEFAULT_RATIO
    queue_threshold: int | None = None
    max_deferrals: int = 1
    max_retries: int = 2
    filter_groups: bool = False
    domain_quotas: Mapping[str, int] = field(default_factory=dict)
    auto_limit: float = 2.0
    data_id: str = ""

    def __post_init__(self) -> None:
        _check_whole("prompts_per_step", self.prompts_per_step, 1)
        _check_whole("responses_per_prompt", self.responses_per_prompt, 1)
        if self.prompt_ratio != "auto":
            _check_ratio("prompt_ratio", self.prompt_ratio, ' or "auto"')
        _check_ratio("response_ratio", self.response_ratio)
        _check_ratio("auto_limit", self.auto_limit)
        if self.queue_threshold is not None:
            _check_whole("queue_threshold", self.queue_threshold, 1)
        _check_whole("max_deferrals", self.max_deferrals, 1)
        _check_whole("max_retries", self.max_retries, 0)
        if not isinstance(self.filter_groups, bool):
            raise TypeError(f"filter_groups must be a bool, found {self.filter_groups!r}")
        if not isinstance(self.data_id, str):
            raise TypeError(f"data_id must be a string, found {self.data_id!r}")
        if not isinstance(self.domain_quotas, Mapping):
            raise TypeError(f"domain_quotas must map domains to prompts in a batch, found {self.domain_quotas!r}")
        for domain, quota in self.domain_quotas.items():
            if not isinstance(domain, str):
                raise TypeError(f"domain_quotas must have strings as keys, found {domain!r}")
            _check_whole(f"domain_quotas[{domain!r}]", quota, 1)
        placed = sum(self.domain_quotas.values())
        if self.domain_quotas and placed != self.prompts_per_step:
            raise ValueError(f"domain_quotas must add up to prompts_per_step = {self.prompts_per_step}, found {placed}")
        object.__setattr__(self, "domain_quotas", MappingProxyType(dict(self.domain_quotas)))

    @property
    def threshold(self) -> int:
        """Deferred prompts that make a long round."""
        return self.prompts_per_step if self.queue_threshold is None else self.queue_threshold

    @property
    def surplus_responses(self) -> int:
        """Responses of each prompt that a short round launches."""
        return scaled(self.responses_per_prompt, self.response_ratio)


def scaled(count: int, ratio: float) -> int:
    """Return ``ceil(count * ratio)``, not one more where the product is whole but for rounding (10 * 1.1)."""
    return math.ceil(count * ratio - 1e-9)


def _check_whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, found {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, found {value}")


def _check_ratio(name: str, value: Any, alternative: str = "") -> None:
    if isinstance(value, bool | str) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number{alternative}, found {value!r}")
    if not 1 <= value < math.inf:
        raise ValueError(f"{name} must be at least 1 and finite{alternative}, found {value!r}")
