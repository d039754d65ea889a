"""Runs a grader of slime in a separate process.

Packs slime's arguments and samples for this process, and returns the changes that the grader makes to the samples.
:func:`make` runs in a worker process of :class:`rl_accel.reward.sandbox.Graders`. The function ``grade`` that :func:`make` returns
runs in forks of this worker process.
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
"""Names of sample fields that are too large to pass to a grader process."""
_STOCK = ("prompt", "response", "label", "metadata", "status")
"""Names of the sample fields that slime's own graders read, or that every ``Sample`` must have."""

Packed = dict[str, bytes]
Changes = dict[str, Any]


def pack(values: dict[str, Any]) -> Packed:
    """Pickles each entry of ``values`` separately. Leaves out entries that cannot be pickled."""
    packed = {}
    for name, value in values.items():
        with contextlib.suppress(Exception):  # a __reduce__ may raise anything
            packed[name] = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return packed


def pack_sample(sample: Any, whole: bool) -> Packed:
    """Returns a sample for a grader process, packed by :func:`pack`.

    With ``whole``, packs all fields except the large ones. Otherwise, packs only the fields that slime's own graders need.
    """
    fields = sample.to_dict()
    names = [name for name in fields if name not in _HEAVY] if whole else _STOCK
    return pack({name: fields[name] for name in names})


def make(args: Packed, grader: str | None) -> Callable[..., Any]:
    """Returns a function ``grade(samples, single)``, which calls a grader in this process.

    ``grade`` returns the return value of the grader, and for each sample the fields that the grader has changed. With ``single``,
    the grader gets the only sample instead of a list of samples.

    Args:
        args: slime's arguments, packed by :func:`pack`.
        grader: dotted path of the user's grader; None: slime's own grader for the sample's ``rm_type``.
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
    """Grades a made-up sample, so that slime's own grader does its lazy imports before the worker process is forked."""
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
