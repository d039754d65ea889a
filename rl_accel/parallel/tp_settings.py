"""What a user may choose about changes of the tensor-parallel size, checked once."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any


@dataclass(frozen=True)
class TpSettings:
    """The parameters of :class:`~rl_accel.parallel.tp_planner.TpPlanner` and :class:`~rl_accel.parallel.tp_bounds.TpBounds`.

    Args:
        threshold: preemptions over their reference from which on TP doubles.
        calm_steps: steps in a row without a preemption after which TP halves.
        cooldown: steps after a change, or after one that was not carried out, in which none is asked for.
        min_tp, max_tp: bounds; ``max_tp=None`` is a node.
        memory_gb: of one GPU, in GiB; ``None``: unknown, and memory bounds nothing.
        memory_share: of it that the rollout engine may use for weights and cache.
        min_sequences: sequences of the greatest length that the cache of a server must hold.
        gpus_per_node: ``None``: what the framework says.
        max_changes: changes carried out in a run, one of which is kept for rolling back; below 2 nothing ever changes.
        reference_steps: steps that the reference of a round kind remembers, exponentially fading.
        confirm_steps: latest steps of a round kind, the least of which is held against the reference.
        least_reference: fewer preemptions than this count as this when a rise is looked for: a handful is none.
        kv_limit: TP is halved only if the cache would be no fuller than this afterwards.
        check_steps: steps of each round kind after a change before it is judged.
        check_limit: steps after which it is judged by the round kinds that came.
        slower: share by which rollout seconds per token must have risen for a change to be rolled back.
        retry_steps: steps until the same change may be tried again; doubles each time.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
    """

    _: KW_ONLY
    threshold: float = 1.05
    calm_steps: int = 4
    cooldown: int = 4
    min_tp: int = 1
    max_tp: int | None = None
    memory_gb: float | None = None
    memory_share: float = 0.9
    min_sequences: int = 4
    gpus_per_node: int | None = None
    max_changes: int = 6
    reference_steps: int = 10
    confirm_steps: int = 2
    least_reference: float = 10.0
    kv_limit: float = 0.9
    check_steps: int = 3
    check_limit: int = 20
    slower: float = 0.03
    retry_steps: int = 25

    def __post_init__(self) -> None:
        for name, least in (
            *(("calm_steps", 1), ("cooldown", 0), ("min_tp", 1), ("min_sequences", 1), ("max_changes", 0)),
            *(("reference_steps", 1), ("confirm_steps", 1), ("check_steps", 2), ("check_limit", 1), ("retry_steps", 1)),
        ):
            check_whole(name, getattr(self, name), least)
        for name in ("max_tp", "gpus_per_node"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        check_number("threshold", self.threshold, 1.0)
        check_number("least_reference", self.least_reference, 1.0)
        check_number("slower", self.slower, 0.0)
        check_number("kv_limit", self.kv_limit, 0.0, 1.0)
        check_number("memory_share", self.memory_share, 0.01, 1.0)
        if self.memory_gb is not None:
            check_number("memory_gb", self.memory_gb, 0.1)
        if self.max_tp is not None and self.max_tp < self.min_tp:
            raise ValueError(f"max_tp must be at least min_tp = {self.min_tp}, found {self.max_tp}")
        if self.check_limit < self.check_steps:
            raise ValueError(f"check_limit must be at least check_steps = {self.check_steps}, found {self.check_limit}")

    @classmethod
    def of(cls, flags: Any, memory_share: float = 0.9) -> "TpSettings":
        """Return the settings that ``flags`` (:class:`~rl_accel.features.tp_replan.TpReplanFlags`) say.

        Args:
            flags: of the user.
            memory_share: the framework's own, for when they do not name one.

        Raises:
            TypeError, ValueError: as for the class.
        """
        found = {name: getattr(flags, name) for name in cls.__dataclass_fields__ if name != "_"}
        if found["memory_share"] is None:
            found["memory_share"] = memory_share
        return cls(**found)


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise unless ``value`` is a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, found {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, found {value}")


def check_number(name: str, value: Any, least: float, most: float = math.inf) -> None:
    """Raise unless ``value`` is a finite number between ``least`` and ``most``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, found {value!r}")
    if not (least <= value <= most and math.isfinite(value)):
        bounds = f"at least {least:g} and finite" if most == math.inf else f"between {least:g} and {most:g}"
        raise ValueError(f"{name} must be {bounds}, found {value!r}")
