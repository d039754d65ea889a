"""What stands on a framework's own extension points: checks that they are there, and entries in its registries of plug-ins.

Nothing of the framework is replaced. One that has changed is refused by name.
"""

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_accel.errors import PatchRefused
from rl_accel.switch import SwitchState

Seams = Mapping[str, tuple[str, ...] | None]
"""By ``"pkg.mod:function"`` or ``"pkg.mod:Class.attribute"``: parameter names in order, without ``*args`` and ``**kwargs``;
None: whatever they are."""


def require(name: str, seams: Seams) -> None:
    """Import the modules of ``seams`` and check what is in them.

    Raises:
        PatchRefused: names the first thing that is absent or different, what is wanted and what was found.
    """
    for where, wanted in seams.items():
        try:
            item = _resolve(where)
        except (ImportError, AttributeError) as error:
            raise PatchRefused(f"{name} wants {where}, which is not there ({error})") from error
        if wanted is not None and (present := _parameters(item)) != wanted:
            raise PatchRefused(f"{name} wants {where}({', '.join(wanted)}), found ({', '.join(present)})")


def require_modules(name: str, seams: Seams) -> None:
    """Check that the modules of ``seams`` exist, without importing them; their top-level package must be imported.

    Raises:
        PatchRefused: names the first one that is absent.
    """
    for where in seams:
        package, *rest = where.partition(":")[0].split(".")
        home = importlib.util.find_spec(package)
        folders = home.submodule_search_locations if home is not None else None
        files = [Path(folder, *rest) for folder in folders or ()]
        if not any(file.with_suffix(".py").is_file() or (file / "__init__.py").is_file() for file in files):
            raise PatchRefused(f"{name} wants {where}, which is not in the {package} installed here")


_passed: set[str] = set()


@dataclass(frozen=True)
class SeamCheck:
    """A switch that changes nothing: "applied" means that the framework has what a feature needs of it.

    Attributes:
        name: unique, ``"slime.reward_timeout"``.
        target: ``"pkg.mod:what"``; the check is made once ``pkg.mod`` is imported.
        seams: what is needed.
        attributes: by ``"pkg.mod:Class"``, the names that the class or its dataclass fields must have.
    """

    name: str
    target: str
    seams: Seams
    attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def state(self) -> SwitchState:
        """Return APPLIED if the last check found everything."""
        return SwitchState.APPLIED if self.name in _passed else SwitchState.PENDING

    def apply(self, _settings: Any) -> None:
        """Look whether everything is there.

        Raises:
            PatchRefused: names what is wanted and what was found.
        """
        require(self.name, self.seams)
        for where, wanted in self.attributes.items():
            owner = _resolve(where)
            present = {*dir(owner), *getattr(owner, "__dataclass_fields__", ())}
            if missing := [name for name in wanted if name not in present]:
                raise PatchRefused(f"{self.name} wants {where} to have {', '.join(missing)}")
        _passed.add(self.name)

    def revert(self) -> None:
        """Forget the check; there is nothing to undo."""
        _passed.discard(self.name)


@dataclass(frozen=True)
class Registration:
    """A switch that enters something of ours into a registry that a framework keeps for plug-ins.

    Attributes:
        name: unique, ``"verl.trainer_mode.tail_batching"``.
        target: ``"pkg.mod:entry"``, the module whose import makes the registry available and, in words, the entry.
        register: ``register(settings)`` makes the entry. It may raise PatchRefused if this framework lacks something.
        unregister: removes it.
        find: returns what the registry holds under our name, or None. Called by any thread, with the lock of the runtime held,
            from the moment at which the import of the module has begun; so it must not import.
        owner: the module that defines what we register.
    """

    name: str
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


def _resolve(where: str) -> Any:
    module, _, path = where.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


def _parameters(function: Any) -> tuple[str, ...]:
    """Names of the parameters, without ``*args``, ``**kwargs`` and the one that Ray adds to methods of its actors."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    return tuple(
        parameter.name
        for parameter in parameters
        if parameter.kind not in variable and parameter.name != "_ray_trace_ctx"
    )
