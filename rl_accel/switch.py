"""What goes on and off with a feature: a patch, an entry in a registry, a check of what a framework must have."""

import enum
from typing import Any, Protocol


class SwitchState(enum.Enum):
    """What the live objects say. FOREIGN: it was on, then someone wrapped or replaced ours."""

    PENDING = "pending"
    APPLIED = "applied"
    FOREIGN = "foreign"


class Switch(Protocol):
    """One thing that a feature changes in a framework, listed in a module's ``SWITCHES``."""

    @property
    def name(self) -> str:
        """Unique: ``"verl.gae"``."""

    @property
    def target(self) -> str:
        """``"pkg.mod:what"``; it can be applied once ``pkg.mod`` has been imported."""

    def state(self) -> SwitchState:
        """Return the state as the live objects show it. Imports nothing."""

    def apply(self, settings: Any) -> None:
        """Switch on, or raise PatchRefused and leave everything as it was. Idempotent. ``settings``: the feature's flags."""

    def revert(self) -> None:
        """Put back the very objects that were there. Raises PatchRefused if someone has wrapped ours since."""
