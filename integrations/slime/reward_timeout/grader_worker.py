"""Runs a grader in a separate process: packs slime's arguments and samples, and returns the grader's changes to the samples.

:func:`make` runs in a worker of :class:`rl_accel.reward.sandbox.Graders`; the ``grade`` functions run in forks of that worker.
"""

import asyncio
import contextlib
import inspect
import pickle
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from slime.rollout import rm_hub
from slime.utils.misc import load_function
from slime.utils.types import Sample

MAKE = f"{__name__}:make"
_HEAVY = (
    "multimodal_train_inputs",
    "rollout_log_probs",
    "rollout_routed_experts",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
    "teacher_log_probs",
    "trace",
)
"""Sample fields that are too large to pass to graders."""
_STOCK = ("prompt", "response", "label", "metadata", "status")
"""Sample fields that slime's own graders read, and fields that every ``Sample`` must have."""

Packed = dict[str, bytes]
Changes = dict[str, Any]


def pack(values: dict[str, Any]) -> Packed:
    """Returns the entries of ``values`` that can be pickled, each pickled separately."""
    packed = {}
    for name, value in values.items():
        with contextlib.suppress(Exception):  # a __reduce__ may raise anything
            packed[name] = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return packed


def pack_sample(sample: Any, whole: bool) -> Packed:
    """Returns a packed sample for a grader: without large fields if ``whole``, else only the fields for slime's own graders."""
    fields = sample.to_dict()
    names = [name for name in fields if name not in _HEAVY] if whole else _STOCK
    return pack({name: fields[name] for name in names})


def make(args: Packed, grader: str | None) -> Callable[..., Any]:
    """Returns ``grade(samples, single)``, which returns the grader's value and the changed fields of each sample.

    Args:
        args: slime's arguments, packed.
        grader: dotted path of the grader; None for slime's own grader of the sample's ``rm_type``.
    """
    arguments = Namespace(**_unpack(args))
    if grader is None:
        arguments.custom_rm_path = None
        _warm_up(arguments)
    function = rm_hub.async_rm if grader is None else load_function(grader)

    def grade(samples: list[Packed], single: bool) -> tuple[Any, list[Changes]]:
        unpacked = [Sample.from_dict(_unpack(packed)) for packed in samples]
        before = [pack(vars(sample)) for sample in unpacked]
        value = function(arguments, unpacked[0] if single else unpacked)
        if inspect.isawaitable(value):
            value = asyncio.run(_finish(value))
        return value, [_changes(*pair) for pair in zip(unpacked, before, strict=True)]

    return grade


def _warm_up(arguments: Any) -> None:
    """Triggers the lazy imports of slime's grader in the worker, so that the forks need not repeat the imports."""
    metadata: dict[str, Any] = {"instruction_id_list": [], "kwargs": []}
    sample = Sample(prompt="", response="</think>\\boxed{\\frac{1}{2}}", label="0.51", metadata=metadata)
    if arguments.rm_type and not arguments.rm_type.endswith("remote_rm"):
        with contextlib.suppress(Exception):
            asyncio.run(rm_hub.async_rm(arguments, sample))


async def _finish(value: Any) -> Any:
    return await value


def _unpack(packed: Packed) -> dict[str, Any]:
    values = {}
    for name, data in packed.items():
        with contextlib.suppress(Exception):  # this process may not be able to import the class
            values[name] = pickle.loads(data)
    return values


def _changes(sample: Any, before: Packed) -> Changes:
    after = pack(vars(sample))
    return {name: getattr(sample, name) for name, data in after.items() if before.get(name) != data}
