"""Which sizes slime's arguments allow, and what this feature cannot work with."""

from typing import Any

from rl_accel.errors import ConfigError
from rl_accel.features.tp_replan import TpReplanFlags
from rl_accel.integrations.slime.tp_replan.layout import Layout, layout_of, setting
from rl_accel.parallel.model_memory import read_configuration
from rl_accel.parallel.tp_bounds import TpBounds
from rl_accel.parallel.tp_settings import TpSettings

_FLAG = "rl_accel.tp_replan"
_USUAL_SHARE = 0.9


def check_flags(flags: TpReplanFlags) -> None:
    """Refuse flags that cannot be right whatever slime's arguments are.

    Raises:
        ConfigError: an action that slime has no seam for, or settings that contradict each other.
    """
    if flags.action != "advise":
        raise ConfigError(
            f"{_FLAG}.action={flags.action} is not available on slime, which starts its engines once in a run; use action=advise"
        )
    settings_of(flags)


def check(args: Any, flags: TpReplanFlags) -> None:
    """Refuse, before anything is generated, what this feature cannot work with.

    Raises:
        ConfigError: as :func:`check_flags`, :func:`~.layout.layout_of` and :func:`bounds_of`.
    """
    check_flags(flags)
    if generates(args):
        bounds_of(args, flags, layout_of(args))


def generates(args: Any) -> bool:
    """Whether this run has engines at all: two of slime's modes for finding mistakes have none."""
    return not (getattr(args, "debug_train_only", False) or getattr(args, "load_debug_rollout_data", None))


def settings_of(flags: TpReplanFlags, memory_share: float = _USUAL_SHARE) -> TpSettings:
    """Return the planner's settings.

    Raises:
        ConfigError: they do not go together.
    """
    try:
        return TpSettings.of(flags, memory_share)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{_FLAG}: {error}") from error


def bounds_of(args: Any, flags: TpReplanFlags, layout: Layout) -> TpBounds:
    """Return the possible sizes.

    Raises:
        ConfigError: there is none, or the present one is not among them.
    """

    def said(name: str, default: Any = None) -> Any:
        return setting(args, layout.overrides, name, default)

    model = read_configuration(str(layout.overrides["model_path"]))
    if model is not None and said("quantization"):
        model = {**model, "quantization_config": True}
    try:
        bounds = TpBounds(
            settings_of(flags, float(said("mem_fraction_static", _USUAL_SHARE))),
            layout.gpus // layout.pipeline,
            args.num_gpus_per_node,
            model=model,
            max_tokens=_longest(args),
            bytes_per_value=4 if said("dtype") in ("float32", "float") else 2,
            multiple_of=int(said("ep_size", 1)),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{_FLAG}: {error}") from error
    if layout.tp not in bounds.sizes:
        raise ConfigError(
            f"{_FLAG} wants engines of TP {' or '.join(map(str, bounds.sizes))}, found {layout.tp}"
            f" (--rollout-num-gpus-per-engine {layout.gpus_per_engine}): {bounds.why_not(layout.tp)}"
        )
    return bounds


def _longest(args: Any) -> int | None:
    """Tokens of the longest sequence, prompt and response; None: unknown."""
    prompt, response = (getattr(args, f"rollout_max_{which}_len", None) for which in ("prompt", "response"))
    together = prompt + response if prompt and response else None
    return getattr(args, "rollout_max_context_len", None) or together
