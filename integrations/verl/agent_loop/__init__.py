"""The one stack of agent-loop workers that every feature of ours shares, behind verl's own seam for agent loops.

A worker is verl's with what each feature adds on top; a part whose feature is not wired does nothing. Tail batching, whose workers
also cancel, extends the same worker.
"""

from typing import Any

from omegaconf import OmegaConf, open_dict

from rl_accel.errors import ConfigError
from rl_accel.integrations.verl import tail_batching

MANAGER = "rl_accel.integrations.verl.agent_loop.workers.SharedAgentLoopManager"
LEGACY_MANAGER = "rl_accel.integrations.verl.agent_loop.workers.LegacySharedAgentLoopManager"
KEY = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
"""Our values of verl's key for the manager, on the V1 trainer and on the legacy one, and that key."""

_OURS = (MANAGER, LEGACY_MANAGER, tail_batching.MANAGER)


def check(config: Any, flag: str, reason: str) -> None:
    """Refuse a manager of the user's.

    Args:
        config: verl's.
        flag: the feature's, for the message.
        reason: why the feature needs ours, for the message.

    Raises:
        ConfigError: names the key, what is wanted and what was found.
    """
    found = OmegaConf.select(config, KEY, default=None)
    if found not in (None, "", *_OURS):
        raise ConfigError(f"{flag} wants {KEY} = None, found {found} ({reason})")


def choose(config: Any) -> None:
    """Set our manager in ``config`` (verl's, changed in place) unless one of ours is there already."""
    if OmegaConf.select(config, KEY, default=None) not in _OURS:
        is_v1 = OmegaConf.select(config, "trainer.use_v1", default=False)
        with open_dict(config):
            OmegaConf.update(config, KEY, MANAGER if is_v1 else LEGACY_MANAGER)
