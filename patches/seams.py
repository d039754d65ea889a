"""Checks that a framework has the functions that rl-accel uses, and switches that add entries to a framework's registries.

An interface is a Protocol class that declares the members of a framework class (or module) that rl-accel uses. It serves as a type,
so that mypy rejects the use of undeclared members. :func:`require_members` compares its methods with the installed framework.
"""

import inspect
import pkgutil
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
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

_targets: dict[Any, str] = {}  # interface -> location of the framework class or module that it describes
_remote: set[Any] = set()
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def interface_of(target: str) -> Callable[[C], C]:
    """Declares that the decorated Protocol describes a framework class (``"pkg.mod:Class"``) or a module (``"pkg.mod"``).

    Its methods, also inherited ones, name the parameters that rl-accel passes; ``**kwargs`` stands for further ones.
    """

    def mark(interface: C) -> C:
        _targets[interface] = target
        return interface

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


def require_members(name: str, interfaces: Iterable[Any]) -> None:
    """Checks that the framework has all functions that ``interfaces`` declare, and that they take the declared parameters.

    Raises PatchRefused, whose message begins with ``name`` (of a feature or switch) and names each function that is absent or
    different.
    """
    problems = [problem for interface in interfaces for problem in _differences(interface)]
    if problems:
        raise PatchRefused(f"{name} wants {'; '.join(dict.fromkeys(problems))}")


def _differences(interface: Any) -> Iterator[str]:
    target = _targets[interface]
    is_class = ":" in target
    try:
        owner = _without_ray(pkgutil.resolve_name(target if is_class else f"{target}:"))
    except Exception as error:  # verl's modules for vLLM raise ValueError where there is no vLLM
        yield f"{target}, which is not there ({error})"
        return
    for name, declared in _methods(interface).items():
        where = f"{target}{'.' if is_class else ':'}{name}"
        member = getattr(owner, name, None)
        if not callable(member):
            yield f"{where}, which is not there"
            continue
        is_method = is_class and isinstance(inspect.getattr_static(owner, name), FunctionType)
        wanted = _signature(declared, is_method=True)
        found = _signature(member, is_method)
        if not _takes(found, wanted):
            yield f"{where}{wanted}, found {found}"
        is_async = inspect.iscoroutinefunction(declared)
        if declared not in _remote and inspect.iscoroutinefunction(member) is not is_async:
            yield f"{where} to be {'async' if is_async else 'a plain function'}, which it is not"


def _methods(interface: Any) -> dict[str, Any]:
    """Returns the methods that ``interface`` and the interfaces that it inherits from declare, by name."""
    methods: dict[str, Any] = {}
    for base in reversed(interface.__mro__):
        if base in _targets:
            own = {name: member for name, member in vars(base).items() if inspect.isfunction(member)}
            methods |= {name: member for name, member in own.items() if member.__module__ == base.__module__}
    return methods


def _without_ray(item: Any) -> Any:
    """Returns the original class if ``item`` is a class wrapped by ``@ray.remote``, else ``item`` itself."""
    metadata = None if isinstance(item, type | ModuleType) else getattr(item, "__ray_metadata__", None)
    return item if metadata is None else metadata.modified_class.__ray_actor_class__


def _signature(function: Any, is_method: bool) -> Signature:
    """Returns the signature of ``function`` without annotations, the ``self`` of a method, and the parameter that Ray adds."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "_ray_trace_ctx"]
    if is_method:
        parameters = parameters[1:]
    return Signature([parameter.replace(annotation=Parameter.empty) for parameter in parameters])


def _takes(found: Signature, wanted: Signature) -> bool:
    """Returns whether a call with the parameters of ``wanted``, by name or in their order, fits the signature ``found``."""
    names = [parameter.name for parameter in wanted.parameters.values() if parameter.kind not in _VARIADIC]
    open_ends = {parameter.kind for parameter in wanted.parameters.values()}.intersection(_VARIADIC)
    if len(open_ends) == 1 and not open_ends <= {parameter.kind for parameter in found.parameters.values()}:
        return False  # with both, *args and **kwargs, rl-accel passes on what it gets
    bind = found.bind_partial if open_ends else found.bind
    try:
        bound = bind(**dict.fromkeys(names)).arguments
    except TypeError:
        return False
    return [name for name in bound if name in names] == [name for name in names if name in bound]


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


def member_check(name: str, target: str, interfaces: Iterable[Any]) -> Registration:
    """Returns a switch that changes nothing. It is refused if the framework lacks functions that ``interfaces`` declare.

    For ``name`` and ``target`` see :class:`~rl_accel.switch.Switch`.
    """
    passed: list[Any] = []

    def check(_settings: Any) -> None:
        require_members(name, interfaces)
        passed.append(check)

    return Registration(
        name=name,
        target=target,
        register=check,
        unregister=passed.clear,
        find=lambda: passed[0] if passed else None,
        owner=__name__,
    )
