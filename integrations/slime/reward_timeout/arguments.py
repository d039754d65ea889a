"""Our flags among slime's arguments, and which of slime's have to be set with them."""

from typing import Any

from rl_accel.errors import ConfigError
from rl_accel.features.reward_timeout import REWARD_TIMEOUT, RewardTimeoutFlags
from rl_accel.integrations.slime import hooks
from rl_accel.integrations.slime.reward_timeout import JUDGE, MARK
from rl_accel.reward.adaptive_timeout import TimeoutSettings

_FLAG = "rl_accel.reward_timeout"


def flags_of(args: Any) -> RewardTimeoutFlags:
    """Return this feature's flags under ``args.rl_accel``; see :func:`rl_accel.integrations.slime.hooks.flags_of`."""
    return hooks.flags_of(args)[REWARD_TIMEOUT]


def settings_of(flags: RewardTimeoutFlags) -> TimeoutSettings:
    """Return the policy's parameters.

    Raises:
        ConfigError: they do not go together.
    """
    try:
        return TimeoutSettings(
            scale=flags.scale,
            slack=flags.slack,
            minimum=flags.minimum,
            maximum=flags.maximum,
            min_correct=flags.min_correct,
            probe_share=flags.probe_share,
        )
    except ValueError as error:
        raise ConfigError(f"{_FLAG}: {error}") from error


def check(args: Any, flags: RewardTimeoutFlags) -> None:
    """Refuse to judge where evaluations could not be told from training, or by ourselves.

    Raises:
        ConfigError: names slime's flag, what is wanted and what was found.
    """
    if not flags.enable:
        raise ConfigError(f"{_FLAG} wants --custom-rm-path to be another, found {JUDGE} ({_FLAG}.enable is not set)")
    hooks = getattr(args, "rollout_sample_hook_path", None) or []
    if MARK not in hooks:
        raise ConfigError(f"{_FLAG} wants rollout_sample_hook_path to hold {MARK}, found {list(hooks)}")
    if flags.grader == JUDGE:
        raise ConfigError(f"{_FLAG}.grader wants the grader that --custom-rm-path named before, found our own")
