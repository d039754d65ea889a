"""Runs a grader of slime in a separate process.

slime's process packs slime's arguments and samples for that process. There, :func:`make` returns a function for
:class:`rl_accel.reward.sandbox.Graders`. This function calls the grader, and returns what the grader has changed in the samples.
"""

import asyncio
import contextlib
import functools
import inspect
import pickle
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from slime.rollout import rm_hub
from slime.utils.misc import load_function
from slime.utils.types import Sample

from rl_accel.reward.worker import dumps

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


class Arguments:
    """Copy of slime's arguments, packed by :func:`pack`, that each grader process gets at its start.

    Each call of the grader also sends the :meth:`changes` since this copy was made.
    """

    def __init__(self, args: Any) -> None:
        self._known = dict(vars(args))
        self.packed = pack(self._known, "args")

    def changes(self, args: Any) -> Packed:
        """Returns the arguments in ``args`` that have changed since this object was created, packed by :func:`pack`.

        A change inside a value is noticed only if the value is a dict or a list.
        """
        known = self._known
        items = vars(args).items()
        new = {
            name: item for name, item in items if item is not known.get(name, known) or isinstance(item, dict | list)
        }
        return {name: data for name, data in pack(new, "args").items() if data != self.packed.get(name)}


def pack_sample(sample: Any, whole: bool) -> Packed:
    """Returns the fields of a sample, packed by :func:`pack`.

    ``whole``: True for all fields and the class, False for :data:`_NEEDED_FIELDS` only.
    """
    fields = sample.to_dict()
    if not whole:
        return pack({name: fields[name] for name in _NEEDED_FIELDS}, "sample")
    own_class = {} if type(sample) is Sample else {_CLASS: type(sample)}
    return pack({**fields, **own_class}, "sample")


def make(args: Packed, grader: str | None) -> Callable[..., Any]:
    """Returns a function ``grade(samples, single, kwargs, args)``, which calls a grader in this process.

    ``grade`` returns :data:`Graded` and takes these arguments:
        samples: samples, each packed by :func:`pack_sample`.
        single: True if the grader takes a sample, not a list of samples.
        kwargs: further keyword arguments of the grader.
        args: those of slime's arguments that have changed since :func:`make` was called, packed.

    Args:
        args: all of slime's arguments, packed by :func:`pack`.
        grader: dotted path of the user's grader; None: slime's own grader for the sample's ``rm_type``.
    """
    arguments = Namespace(**_unpack(args, "args"))
    arguments.custom_rm_path = grader
    if grader is None:
        _warm_up(arguments)
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

    def grade(samples: tuple[Packed, ...], single: bool, kwargs: dict[str, Any], args: Packed) -> Graded:
        unpacked = [_unpack_sample(packed) for packed in samples]
        known = [(sample, pack(vars(sample), "sample")) for sample in unpacked]
        positions = {id(sample): place for place, sample in enumerate(unpacked)}
        own = vars(arguments)
        before = {name: own[name] for name in args if name in own}
        own |= _unpack(args, "args")
        try:
            value = call(unpacked, single, kwargs)
        finally:
            for name in args:
                own.pop(name, None)
            own |= before
        order = [positions[id(sample)] for sample in unpacked if id(sample) in positions]
        return value, [_changes(*pair) for pair in known], order

    return grade


def _warm_up(arguments: Any) -> None:
    """Grades a made-up sample, so that slime's own grader does its lazy imports before this process is forked for calls."""
    metadata: dict[str, Any] = {"instruction_id_list": [], "kwargs": []}
    sample = Sample(prompt="", response="</think>\\boxed{\\frac{1}{2}}", label="0.51", metadata=metadata)
    if arguments.rm_type and not arguments.rm_type.endswith("remote_rm"):
        with contextlib.suppress(Exception):
            asyncio.run(rm_hub.async_rm(arguments, sample))


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
