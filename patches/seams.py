"""Checks that a framework has all members that rl-accel uses, and switches that add entries to a framework's registries.

An interface is a Protocol class that declares the members of a framework class (or module) that rl-accel uses. Interfaces serve as
types, so that mypy rejects the use of undeclared members. :func:`require_members` compares interfaces with the installed framework,
and rl-accel's subclasses with the framework classes that they extend.
"""

import dis
import importlib
import inspect
import pkgutil
import sys
import typing
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature
from types import FunctionType, ModuleType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from rl_accel.errors import PatchRefused
from rl_accel.switch import Switch, SwitchState
from rl_accel.telemetry import metrics

C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_targets: dict[Any, tuple[str, ...]] = {}  # interface -> locations of the classes or modules that it describes
_extended: dict[Any, Any] = {}  # class of rl-accel -> interface of the framework class that it extends
_remote: set[Any] = set()


def interface_of(*targets: str) -> Callable[[C], C]:
    """Declares that the decorated Protocol describes framework classes (``"pkg.mod:Class"``) or a module (``"pkg.mod"``).

    Methods of the Protocol name the parameters that rl-accel passes; ``(*args, **kwargs)`` stands for any parameters. The first of
    ``targets`` must exist. Others may be absent together with their module.
    """

    def mark(interface: C) -> C:
        _targets[interface] = targets
        return interface

    return mark


def extends(interface: Any) -> Callable[[C], C]:
    """Declares that the decorated class is a subclass of the framework class described by ``interface``, or a mixin for it.

    The interface declares the members that rl-accel uses. :func:`require_members` then checks the overrides.
    """

    def mark(cls: C) -> C:
        _extended[cls] = interface
        return cls

    return mark


class RemoteMethod(Protocol[P, R_co]):
    """Type of a Ray actor's method, which callers reach through the actor handle."""

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R_co]:
        """Calls the method in the actor's process and returns an awaitable of the result."""


def remote(method: Callable[Concatenate[Any, P], R]) -> RemoteMethod[P, R]:
    """Marks a method of an interface (description of a framework class) as called through a Ray actor handle.

    The call is async even if the framework's method is not.
    """
    _remote.add(method)
    return method  # type: ignore[return-value]


def modules_of(home: str) -> list[ModuleType]:
    """Imports the module ``home`` and its direct submodules. Returns them and all modules of the same package that they import.

    The package is the one that contains ``home``, such as ``rl_accel.integrations.verl``. Raises PatchRefused if a module cannot be
    imported.
    """
    try:
        modules = [importlib.import_module(home)]
        inner = pkgutil.iter_modules(getattr(modules[0], "__path__", ()), f"{home}.")
        modules += [importlib.import_module(module.name) for module in inner]
    except Exception as error:  # verl's modules for vLLM raise ValueError where there is no vLLM
        raise PatchRefused(f"{home.rpartition('.')[2]} cannot be imported: {error}") from error
    adapters = home.rpartition(".")[0] + "."
    for module in modules:  # the list grows inside the loop
        values = [value for value in vars(module).values() if isinstance(value, ModuleType)]
        modules += [value for value in values if value.__name__.startswith(adapters) and value not in modules]
    return modules


def interfaces_of(modules: Iterable[ModuleType]) -> dict[Any, list[Any]]:
    """Returns a mapping from each interface that ``modules`` use to the classes in ``modules`` that extend it (:func:`extends`).

    An interface declares the members of a framework class that rl-accel uses. Includes interfaces that are used only as the type of
    a member or parameter of another interface.
    """
    users: dict[Any, list[Any]] = {}

    def add(interface: Any, *classes: Any) -> None:
        for base in filter(_targets.__contains__, interface.__mro__):
            if base not in users:
                users[base] = []
                for item in (base, *filter(None, _members(base).values())):
                    for hint in typing.get_type_hints(item).values():
                        for part in _interfaces_in(hint):
                            add(part)
            users[base] += classes

    for module in modules:
        for candidate in map(_plain, vars(module).values()):
            for base in getattr(candidate, "__mro__", ()):
                if base in _targets:
                    add(base)
                elif base in _extended:
                    add(_extended[base], candidate)
    return users


def require_members(name: str, interfaces: Mapping[Any, Iterable[Any]]) -> None:
    """Checks that the framework has all members that ``interfaces`` declare, with suitable signatures.

    An interface declares the members of one framework class that rl-accel uses. ``interfaces`` maps each to rl-accel's subclasses
    of this framework class, whose overrides are checked, too. Raises PatchRefused if members are absent or different. The message
    begins with ``name`` (of a feature or check) and names each such member, with the wanted and the found signature.
    """
    problems = [problem for interface, classes in interfaces.items() for problem in _differences(interface, classes)]
    if problems:
        raise PatchRefused(f"{name} wants {'; '.join(dict.fromkeys(problems))}")


def _differences(interface: Any, classes: Iterable[Any]) -> Iterator[str]:
    for number, target in enumerate(_targets[interface]):
        is_class = ":" in target
        try:
            framework_object = _plain(pkgutil.resolve_name(target if is_class else f"{target}:"))
        except Exception as error:
            if not (number and isinstance(error, ModuleNotFoundError)):
                yield f"{target}, which is not there ({error})"
            continue
        present = _attributes(framework_object)
        for name, wanted in _members(interface).items():
            where = f"{target}{'.' if is_class else ':'}{name}"
            member = getattr(framework_object, name, None)
            if name not in present:
                yield f"{where}, which is not there"
            elif inspect.isroutine(member) if wanted is None else not callable(member):
                yield f"{where} to be {'a function' if wanted else 'an attribute'}, which it is not"
            elif wanted:
                overrides = {f" as {cls.__qualname__} has it": vars(cls)[name] for cls in classes if name in vars(cls)}
                is_method = is_class and isinstance(inspect.getattr_static(framework_object, name), FunctionType)
                expected = _signature(member, is_method)
                for note, function in {"": wanted, **overrides}.items():
                    takes = _signature(function, True)
                    if note:  # the override must accept the calls of the framework
                        fits = name == "__init__" or _accepts(takes, expected)
                    else:  # the method of the framework must accept rl-accel's calls
                        fits = _accepts(expected, takes)
                    if not fits:
                        yield f"{where}{takes}{note}, found {expected}"
                    is_async = inspect.iscoroutinefunction(function)
                    if wanted not in _remote and inspect.iscoroutinefunction(member) is not is_async:
                        yield f"{where} to be {'async' if is_async else 'a plain function'}, which it is not"


def _members(interface: Any) -> dict[str, Any]:
    """Returns the members that an interface (description of a framework class) declares, without inherited ones.

    Maps each name to the method, or to None for an attribute.
    """
    own = {n: v for n, v in vars(interface).items() if getattr(v, "__module__", "") == interface.__module__}
    return {**dict.fromkeys(inspect.get_annotations(interface)), **{n: v for n, v in own.items() if callable(v)}}


def _attributes(owner: Any) -> set[str]:
    """Returns the member names of ``owner``, a module or class, including the instance attributes that methods assign."""
    names = {*dir(owner)}
    for base in getattr(owner, "__mro__", ()):
        names.update(inspect.get_annotations(base))
        for member in vars(base).values():
            code = getattr(inspect.unwrap(getattr(member, "__func__", member)), "__code__", None)
            steps = dis.get_instructions(code) if code else ()
            names.update(step.argval for step in steps if step.opname == "STORE_ATTR")
    return names


def _interfaces_in(hint: Any) -> Iterator[Any]:
    if isinstance(hint, type) and hint in _targets:
        yield hint
    for part in typing.get_args(hint):
        yield from _interfaces_in(part)


def _plain(item: Any) -> Any:
    """Returns the original class if ``item`` is a class wrapped by ``@ray.remote``, else ``item`` itself."""
    metadata = None if isinstance(item, type | ModuleType) else getattr(item, "__ray_metadata__", None)
    return item if metadata is None else metadata.modified_class.__ray_actor_class__


def _signature(function: Any, is_method: bool) -> Signature:
    """Returns the signature of ``function`` without annotations, the ``self`` of a method, and the parameter that Ray adds."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "_ray_trace_ctx"]
    return Signature([p.replace(annotation=Parameter.empty) for p in parameters[is_method:]])


def _accepts(function: Signature, caller: Signature) -> bool:
    """Returns whether every call that fits the signature ``caller`` also fits the signature ``function``."""
    kinds = {parameter.kind for parameter in function.parameters.values()}
    passed = [p for p in caller.parameters.values() if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)]
    more = {p.kind for p in caller.parameters.values()} - {p.kind for p in passed}
    if len(more) == 2:
        return True
    bind = function.bind_partial if more else function.bind  # required parameters may be among the caller's **kwargs
    named = {p.name: p for p in passed}
    positions = [p for p in passed if p.kind is not Parameter.KEYWORD_ONLY]
    try:
        bind(**{p.name: p for p in passed if p.default is Parameter.empty})
        by_name = bind(**named).arguments
        by_position = bind(*positions, **{p.name: p for p in passed if p not in positions}).arguments
    except TypeError:
        return False
    return more <= kinds and (Parameter.VAR_POSITIONAL in kinds or by_name == by_position)


_passed: set[str] = set()


@dataclass(frozen=True)
class SeamCheck(Switch):
    """Check that the framework has all members that ``interfaces`` declare. Changes nothing.

    An interface lists the members of a framework class that rl-accel uses. The check has the form of a switch (reversible change to
    a framework). It therefore runs when the framework is imported, and its result is part of the feature's status.
    """

    interfaces: tuple[Any, ...]

    def state(self) -> SwitchState:
        """Returns APPLIED if the check has passed since the last :meth:`revert`, else WAITING."""
        return SwitchState.APPLIED if self.name in _passed else SwitchState.WAITING

    def apply(self, _settings: Any) -> None:
        require_members(self.name, dict.fromkeys(self.interfaces, ()))
        _passed.add(self.name)

    def revert(self) -> None:
        _passed.discard(self.name)


@dataclass(frozen=True)
class Registration(Switch):
    """Switch (reversible change to a framework) that adds an entry to a plug-in registry of the framework.

    Attributes:
        register: function ``register(settings)`` that adds the entry. ``settings`` are the feature's flags. May raise PatchRefused.
        unregister: function without arguments that removes the entry.
        find: function without arguments that returns the object now registered under the entry's name, or None. Must not import any
            module: it is called under the runtime's lock, and an import could deadlock.
        owner: name of the module that defines the object which ``register`` adds.
    """

    register: Callable[[Any], None]
    unregister: Callable[[], Any]
    find: Callable[[], Any]
    owner: str

    def state(self) -> SwitchState:
        entry = self.find() if self.module in sys.modules else None
        if entry is None:
            return SwitchState.WAITING
        return SwitchState.APPLIED if getattr(entry, "__module__", None) == self.owner else SwitchState.FOREIGN

    def apply(self, settings: Any) -> None:
        state = self.state()
        if state is SwitchState.FOREIGN:
            raise PatchRefused(f"{self.name}: {self.target} is registered already, by {self.find()!r}")
        if state is SwitchState.WAITING:
            try:
                self.register(settings)
            except (ImportError, AttributeError) as error:
                raise PatchRefused(f"{self.name}: {type(error).__name__}: {error}") from error

    def revert(self) -> None:
        """Removes this switch's entry from the framework's plug-in registry, unless other code has replaced the entry."""
        if self.state() is SwitchState.APPLIED:
            self.unregister()


def step_observer(
    feature: str, make: Callable[[Any], metrics.Observer], target: str = "verl.utils.tracking:Tracking"
) -> Registration:
    """Returns a switch (reversible change to verl) that passes the metrics of each training step to an observer of ``feature``.

    ``make(flags)`` returns the observer: a function that gets the metrics and returns more of them. ``make`` and the observer must
    be defined in the same module, by which the switch recognises the observer. For ``target`` see :class:`~rl_accel.switch.Switch`.
    """
    return Registration(
        name=f"verl.{feature}.observer",
        target=target,
        register=lambda flags: metrics.set_observer(feature, make(flags)),
        unregister=lambda: metrics.set_observer(feature, None),
        find=lambda: metrics.observer_of(feature),
        owner=make.__module__,
    )
