"""Whitening, the largest part of an advantage stage once the scan is fast, in half of its passes over memory.

GAE, GDPO and both REINFORCE++ estimators call it through the module, so this one place serves them all.
"""

import functools
from typing import Any

import torch

from rl_accel.ops import whiten
from rl_accel.patches.parity import require_agreement
from rl_accel.patches.patch import Patch
from rl_accel.patches.verl._advantage import left_to_verl


def _make(original: Any, _settings: Any) -> Any:
    @functools.wraps(original)
    def masked_whiten(values: Any, mask: Any, shift_mean: Any = True) -> Any:
        error = whiten.unsupported(values, mask)
        if error is not None:
            left_to_verl("masked_whiten", str(error))
            return original(values, mask, shift_mean)
        return whiten.masked_whiten(values, mask, bool(shift_mean))

    return masked_whiten


def _probe(original: Any, replacement: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(13, 37, generator=generator)
    mask = (torch.rand(13, 37, generator=generator) < 0.6).long()
    values[mask == 0] *= 1e6
    for shift_mean in (True, False):
        require_agreement(original, replacement, {"values": values, "mask": mask, "shift_mean": shift_mean})


SWITCHES = (
    Patch(
        name="verl.masked_whiten",
        feature="advantages",
        target="verl.utils.torch_functional:masked_whiten",
        supports="verl>=0.9",
        params=("values", "mask", "shift_mean"),
        make=_make,
        fingerprints=("ed90007825688c5bed7cbf25d02293eeedd7bc7785da816e2f4fa3b75c6ed6e0",),
        probe=_probe,
        no_seam="a utility function: verl has no switch or registry for it",
    ),
)
