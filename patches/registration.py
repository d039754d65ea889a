"""An entry of ours in a registry that a framework keeps for plug-ins: nothing of the framework is replaced."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rl_accel.errors import PatchRefused
from rl_accel.switch import SwitchState


@dataclass(frozen=True)
class Registration:
    """Stands beside :class:`~rl_accel.patches.patch.Patch` in a module's ``SWITCHES`` and goes on and off like one.

    Attributes:
        name: unique, ``"verl.trainer_mode.tail_batching"``.
        feature: the feature (section of the flags) it belongs to.
        target: ``"pkg.mod:entry"``, the module whose import makes the registry available and, in words, the entry.
        register: ``register(settings)`` makes the entry. It may raise PatchRefused if this framework lacks something.
        unregister: removes it.
        find: returns what the registry holds under our name, or None. Called by any thread, with the lock of the runtime held,
            from the moment at which the import of the module has begun; so it must not import.
        owner: the module that defines what we register.
    """

    name: str
    feature: str
    target: str
    register: Callable[[Any], None]
    unregister: Callable[[], Any]
    find: Callable[[], Any]
    owner: str

    def state(self) -> SwitchState:
        """Return what the registry itself says."""
        if self.target.partition(":")[0] not in sys.modules:
            return SwitchState.PENDING
        found = self.find()
        if found is None:
            return SwitchState.PENDING
        return SwitchState.APPLIED if getattr(found, "__module__", None) == self.owner else SwitchState.FOREIGN

    def apply(self, settings: Any) -> None:
        """Make the entry. Idempotent.

        Raises:
            PatchRefused: the name is taken, or the framework lacks something.
        """
        state = self.state()
        if state is SwitchState.FOREIGN:
            raise PatchRefused(f"{self.name}: {self.target} is registered already, by {self.find()!r}")
        if state is SwitchState.PENDING:
            try:
                self.register(settings)
            except (ImportError, AttributeError) as error:
                raise PatchRefused(f"{self.name}: {type(error).__name__}: {error}") from error

    def revert(self) -> None:
        """Remove the entry, if it is ours."""
        if self.state() is SwitchState.APPLIED:
            self.unregister()
