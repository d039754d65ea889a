"""Checks of slime's interfaces and arguments for adaptive time limits of reward executions (feature ``reward_timeout``)."""

from typing import Any

from rl_accel.errors import refuse
from rl_accel.features import RewardTimeoutFlags
from rl_accel.integrations.slime import interfaces
from rl_accel.integrations.slime.rollout_log import LOG_INTERFACES
from rl_accel.patches.seams import member_check

RM_HOOK = "rl_accel.integrations.slime.reward_timeout.rm_hook.grade"
SAMPLE_HOOK = "rl_accel.integrations.slime.reward_timeout.rm_hook.mark_evaluation"

_FLAG = "rl_accel.reward_timeout"
_DISTILLATION = "slime.rollout.on_policy_distillation."

SWITCHES = (
    member_check(
        name="slime.reward_timeout",
        target="slime.rollout.sglang_rollout:generate_and_rm",
        interfaces=(
            interfaces.RmHub,
            interfaces.SglangRollout,
            interfaces.SampleHooks,
            interfaces.Misc,
            interfaces.Sample,
            *LOG_INTERFACES,
        ),
    ),
)


def check(args: Any, flags: RewardTimeoutFlags) -> None:
    """Raises ConfigError if one of slime's arguments or a flag cannot be used together with ``reward_timeout``."""
    if not flags.enable:
        refuse(_FLAG, "--custom-rm-path", "another function", RM_HOOK, f"{_FLAG}.enable is not set")
    hooks = getattr(args, "rollout_sample_hook_path", None) or []
    if SAMPLE_HOOK not in hooks:
        refuse(_FLAG, "rollout_sample_hook_path", f"a list with {SAMPLE_HOOK}", hooks)
    if str(flags.grader).startswith(_DISTILLATION):
        reason = "answers of a teacher have no stand-in: leave reward_timeout off"
        refuse(_FLAG, "grader", "a grader that returns scores", "slime's on-policy distillation", reason)
    if flags.grader == RM_HOOK:
        refuse(_FLAG, "grader", "the one that --custom-rm-path named before", RM_HOOK)
