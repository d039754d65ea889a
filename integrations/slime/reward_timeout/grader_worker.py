"""Runs a grader of slime in a separate process.

slime's process packs the samples for that process. There, :func:`make` returns a function for
:class:`rl_accel.reward.graders.Graders`. This function calls the grader, and returns what the grader has changed in the samples.
"""

import asyncio
import contextlib
import functools
import inspect
import itertools
import pickle
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from slime.rollout import rm_hub
from slime.utils.misc import load_function
from slime.utils.types import Sample

from rl_accel.reward.grader_process import ask, dumps

MAKE = f"{__name__}:make"
_CLASS = "__class__"
_NEEDED_FIELDS = ("prompt", "response", "label", "metadata", "status")
"""Names of the sample fields that slime's own graders read, or that every ``Sample`` must have."""

Packed = dict[str, bytes]
"""Attributes of an object by name, each pickled separately, see :func:`pack`."""
Graded = tuple[Any, list[dict[str, Any]], list[int]]
"""Result of a call of a grader: its return value; for each sample, the fields that the grader has changed, with their new values;
and the indices of the samples in the order in which the grader left the list, which it may sort in place."""


class NotSent:
    """Placeholder for a value that cannot be pickled. Any use of the placeholder raises a RuntimeError that names the value."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *_args: Any) -> Any:
        raise RuntimeError(
            f"{self._name} cannot be sent to the process in which rl_accel.reward_timeout runs the grader, found an object that"
            " cannot be pickled; a grader that awaits something runs without another process"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pickle asks for special methods
            raise AttributeError(name)
        self._refuse()

    __bool__ = __call__ = __contains__ = __eq__ = __float__ = __getitem__ = _refuse
    __hash__ = __int__ = __iter__ = __len__ = __str__ = _refuse


def pack(values: dict[str, Any], owner: str) -> Packed:
    """Pickles each of ``values``, the attributes of an object that is called ``owner`` in messages.

    :class:`NotSent` replaces a value that cannot be pickled. In a dict, it replaces only the items that cannot be pickled.
    """
    packed = {}
    for name, value in values.items():
        try:
            packed[name] = dumps(value)
        except Exception:  # a __reduce__ may raise anything
            packed[name] = dumps(_sendable(value, f"{owner}.{name}"))
    return packed


def _sendable(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: _sendable(item, f"{name}[{key!r}]") for key, item in value.items()}
    try:
        dumps(value)
    except Exception:
        return NotSent(name)
    return value


def unsent_restored(changed: Any, original: Any) -> Any:
    """Returns ``changed``, a value from a grader process, with each :class:`NotSent` replaced by the value in ``original``."""
    if isinstance(changed, NotSent):
        return original
    if isinstance(changed, dict) and isinstance(original, dict):
        return {key: unsent_restored(item, original.get(key)) for key, item in changed.items()}
    return changed


class Provider:
    """Answers a grader's process that reads one of slime's arguments (:class:`LazyArguments`), in slime's process.

    An argument that no grader reads is never pickled, and one that has not changed is pickled once. A change inside a value is
    noticed only if the value is a dict or a list.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, bytes, int]] = {}
        self._versions = itertools.count(1)

    def provide(self, args: Any, name: str, version: int) -> tuple[int, bytes | None]:
        """Answers :func:`rl_accel.reward.grader_process.ask`. Without a name, the answer is the list of all names."""
        values = vars(args)
        if not name:
            return 0, dumps(list(values))
        if name not in values:
            return -1, None
        value = values[name]
        known, packed, newest = self._known.get(name, (None, b"", 0))
        if not newest or value is not known or isinstance(value, dict | list):
            packed_now = pack({name: value}, "args")[name]
            if packed_now != packed:
                newest = next(self._versions)
            self._known[name] = value, packed_now, newest
        return newest, None if newest == version else self._known[name][1]


class LazyArguments(Namespace):
    """slime's arguments in a grader's process, which reads each of them from slime's process when the grader uses it.

    What the grader sets stays in this process.
    """

    __slots__ = ("_read", "_versions")

    def __init__(self) -> None:
        object.__setattr__(self, "_read", set())
        object.__setattr__(self, "_versions", {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known, value = self._versions.get(name, (0, None))
        version, packed = ask(name, known)
        if version < 0:
            raise AttributeError(f"slime's arguments have no {name}")
        if packed is not None:
            value = _unpack({name: packed}, "args")[name]
            self._versions[name] = version, value
        self._read.add(name)
        _own_values(self)[name] = value
        return value

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """All arguments, for ``vars(args)`` and copies."""
        for name in pickle.loads(ask("", 0)[1] or dumps([])):
            getattr(self, name)
        return _own_values(self)

    def forget(self) -> None:
        """Has the next call of the grader read the arguments again, which may have changed."""
        for name in self._read:
            _own_values(self).pop(name, None)
        self._read.clear()


def _own_values(arguments: Namespace) -> dict[str, Any]:
    """Returns the attributes that ``arguments`` has now, without the property of :class:`LazyArguments`."""
    (descriptor,) = (vars(base)["__dict__"] for base in Namespace.__mro__ if "__dict__" in vars(base))
    values: dict[str, Any] = descriptor.__get__(arguments)
    return values


def pack_sample(sample: Any, whole: bool) -> Packed:
    """Returns the fields of a sample, packed by :func:`pack`.

    ``whole``: True for all fields and the class, False for :data:`_NEEDED_FIELDS` only.
    """
    fields = sample.to_dict()
    if not whole:
        return pack({name: fields[name] for name in _NEEDED_FIELDS}, "sample")
    own_class = {} if type(sample) is Sample else {_CLASS: type(sample)}
    return pack({**fields, **own_class}, "sample")


def make(grader: str | None, rm_type: str | None) -> Callable[..., Any]:
    """Returns a function ``grade(samples, single, kwargs)``, which calls a grader in this process.

    ``grade`` returns :data:`Graded` and takes these arguments:
        samples: samples, each packed by :func:`pack_sample`.
        single: True if the grader takes a sample, not a list of samples.
        kwargs: further keyword arguments of the grader.

    Args:
        grader: dotted path of the user's grader; None: slime's own grader for the sample's ``rm_type``.
        rm_type: slime's argument, to prepare slime's own grader.
    """
    arguments = LazyArguments()
    arguments.custom_rm_path = grader
    if grader is None:
        _warm_up(rm_type)
    function = rm_hub.async_rm if grader is None else load_function(grader)
    # One event loop for all calls, because a grader may keep a session that belongs to the loop.
    runner = asyncio.Runner()

    def call(samples: list[Any], single: bool, kwargs: dict[str, Any]) -> Any:
        runner.get_loop()  # from now on the event loop of futures that a plain function makes
        start = functools.partial(function, arguments, samples[0] if single else samples, **kwargs)
        try:
            value = start()
        except RuntimeError as error:
            if str(error) != "no running event loop":
                raise
            value = runner.run(_await(start))  # a plain function that starts tasks
        return runner.run(_await(lambda: value)) if inspect.isawaitable(value) else value

    def grade(samples: tuple[Packed, ...], single: bool, kwargs: dict[str, Any]) -> Graded:
        unpacked = [_unpack_sample(packed) for packed in samples]
        before = [(sample, pack(vars(sample), "sample")) for sample in unpacked]
        positions = {id(sample): place for place, sample in enumerate(unpacked)}
        try:
            value = call(unpacked, single, kwargs)
        finally:
            arguments.forget()
        order = [positions[id(sample)] for sample in unpacked if id(sample) in positions]
        return value, [_changes(*pair) for pair in before], order

    return grade


def _warm_up(rm_type: str | None) -> None:
    """Grades a made-up sample, so that slime's own grader does its lazy imports before this process is forked for calls."""
    metadata: dict[str, Any] = {"instruction_id_list": [], "kwargs": []}
    sample = Sample(prompt="", response="</think>\\boxed{\\frac{1}{2}}", label="0.51", metadata=metadata)
    if rm_type and not rm_type.endswith("remote_rm"):
        with contextlib.suppress(Exception):
            asyncio.run(rm_hub.async_rm(Namespace(rm_type=rm_type, custom_rm_path=None), sample))


async def _await(call: Callable[[], Any]) -> Any:
    value = call()
    return await value if inspect.isawaitable(value) else value


def _unpack_sample(packed: Packed) -> Any:
    values = _unpack(packed, "sample")
    own_class = values.pop(_CLASS, Sample)
    sample = Sample.from_dict(values)
    if isinstance(own_class, type):  # else this process cannot import the class
        sample.__class__ = own_class
    return sample


def _unpack(packed: Packed, owner: str) -> dict[str, Any]:
    values = {}
    for name, data in packed.items():
        try:
            values[name] = pickle.loads(data)
        except Exception:  # this process may not be able to import the class
            values[name] = NotSent(f"{owner}.{name}")
    return values


def _changes(sample: Any, before: Packed) -> dict[str, Any]:
    after = pack(vars(sample), "sample")
    return {name: getattr(sample, name) for name, data in after.items() if before.get(name) != data}
