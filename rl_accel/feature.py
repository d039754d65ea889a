"""What a feature is: its flags, what it may change, and by name (never by import) the modules that carry it out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

F = TypeVar("F")

ENABLE = "True: on, and an error if it cannot be; False or null: off"
ENABLE_AUTOMATIC = (
    "True: on, and an error if it cannot be; False: off; null: on only where lossless features are automatic"
)


def flag(default: Any, help: str, **limits: Any) -> Any:
    """Return the dataclass field of one flag.

    Args:
        default: its value when no source names it.
        help: one line for ``rl-accel flags`` and the pages of the documentation.
        limits: ``minimum``, ``maximum`` (inclusive), ``choices`` (of words), or ``words`` that stand beside numbers.
    """
    return field(default=default, metadata={"help": help, **limits})


@dataclass(frozen=True)
class SlimeHooks:
    """What a feature needs of slime, all by dotted name.

    Attributes:
        arguments: slime's arguments and the path that each must hold; a list: the paths it must hold among others.
        check: ``check(args, flags)``, called before slime's actors begin; raises ConfigError.
        metrics: ``numbers_of(rollout)``, called when slime logs a rollout; returns metrics by name.
        after_evaluation: ``after_evaluation(args)``, called when slime logs an evaluation.
        values: by flag, the values that work on slime, where not all do.
    """

    arguments: Mapping[str, str | list[str]]
    check: str = ""
    metrics: str = ""
    after_evaluation: str = ""
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Feature(Generic[F]):
    """A feature of the pack.

    Attributes:
        name: of the feature and of its section of the flags.
        summary: one line.
        flags: dataclass of its flags, the only schema they have. It begins with ``enable``; a method ``validate()``, if
            there is one, raises ValueError for flags that are right one by one and wrong together.
        lossless: it cannot change training results.
        automatic: a bare ``rl_accel.enable()`` turns it on.
        switches: modules with a tuple ``SWITCHES`` of :class:`~rl_accel.switch.Switch`, by framework. They are
            imported only when the feature is on.
        verl: module with ``wire(config, flags)``, ``refuse_unwired(config)`` and ``SEAMS``, if the feature stands on
            verl's official extension points; see :mod:`rl_accel.patches.verl.config_intake`.
        slime: the hooks of slime that it needs.
    """

    name: str
    summary: str
    flags: type[F]
    lossless: bool
    automatic: bool = False
    switches: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    verl: str = ""
    slime: SlimeHooks | None = None
