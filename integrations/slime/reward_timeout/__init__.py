"""Checks of slime's interfaces and arguments for adaptive time limits of reward executions (feature ``reward_timeout``)."""

from typing import Any

from rl_accel.errors import ConfigError
from rl_accel.features import RewardTimeoutFlags
from rl_accel.integrations.slime import interfaces
from rl_accel.integrations.slime.rollout_log import LOG_INTERFACES
from rl_accel.patches.seams import SeamCheck

RM_HOOK = "rl_accel.integrations.slime.reward_timeout.rm_hook.grade"
SAMPLE_HOOK = "rl_accel.integrations.slime.reward_timeout.rm_hook.mark_evaluation"

_DISTILLATION = "slime.rollout.on_policy_distillation."

SWITCHES = (
    SeamCheck(
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
    """Refuses settings that ``reward_timeout`` does not support.

    Raises:
        ConfigError: a setting is not supported. The message names slime's argument, the wanted and the found value.
    """
    if not flags.enable:
        raise ConfigError(
            "rl_accel.reward_timeout wants --custom-rm-path = another function (rl_accel.reward_timeout.enable is not set),"
            f" found {RM_HOOK}"
        )
    hooks = getattr(args, "rollout_sample_hook_path", None) or []
    if SAMPLE_HOOK not in hooks:
        raise ConfigError(
            f"rl_accel.reward_timeout wants rollout_sample_hook_path to hold {SAMPLE_HOOK}, found {hooks}"
        )
    if str(flags.grader).startswith(_DISTILLATION):
        raise ConfigError(
            "rl_accel.reward_timeout.grader wants a grader that returns scores, found slime's on-policy distillation, whose answers"
            " are those of a teacher: a stopped one has no stand-in. Leave reward_timeout off"
        )
    if flags.grader == RM_HOOK:
        raise ConfigError(
            "rl_accel.reward_timeout.grader wants the grader that --custom-rm-path named before, found our own"
        )
