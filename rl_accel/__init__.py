"""rl-accel: faster synchronous RL post-training on verl and slime, without a fork.

``enable()`` turns features on, and ``disable()`` turns all features off. ``with enabled(...)`` turns features on for a block.
``status()`` returns the state of all features in this process.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "disable", "enable", "enabled", "status"]

if TYPE_CHECKING:
    from rl_accel.runtime import disable, enable, enabled, status


def __getattr__(name: str) -> Any:  # lazy, because verl imports rl_accel in every process
    if name in __all__:
        from rl_accel import runtime

        return getattr(runtime, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
