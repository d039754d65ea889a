"""Tells evaluations from training: slime says so to the hooks that it calls on each sample, but not to the judge it calls next."""

from contextvars import ContextVar
from typing import Any

from rl_accel.integrations.slime.reward_timeout import JUDGE
from rl_accel.integrations.slime.reward_timeout.arguments import flags_of

EVALUATION: ContextVar[bool] = ContextVar("evaluation", default=False)
"""Whether the running task, which slime judges in as well, belongs to an evaluation."""


def mark(args: Any, sample: Any, evaluation: bool = False, rollout_id: int | None = None) -> None:
    """slime's ``--rollout-sample-hook-path``.

    The samples of an evaluation name a grader of their own, which slime takes from ``--custom-rm-path`` before it reads our file.
    If that is the one under ``grader``, it is left to us, as in training.
    """
    EVALUATION.set(evaluation)
    if sample.custom_rm_path is not None and sample.custom_rm_path in (JUDGE, flags_of(args).grader):
        sample.custom_rm_path = None
