"""Compares an upstream function with its replacement on real tensors before the first is swapped for the second."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rl_accel.errors import PatchRefused


def require_agreement(
    original: Callable[..., Any],
    replacement: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """Call both functions with copies of ``arguments`` and refuse unless their outputs are the same.

    Outputs are a tensor or a tuple of tensors. With ``rtol`` and ``atol`` both 0 every element must be equal (NaN equals
    NaN); dtypes, shapes and devices must always match.

    Raises:
        PatchRefused: an output differs; says which, where and by how much.
    """
    wanted, found = _call(original, arguments), _call(replacement, arguments)
    if len(wanted) != len(found):
        raise PatchRefused(f"wanted {len(wanted)} outputs, found {len(found)}")
    for i, (want, got) in enumerate(zip(wanted, found, strict=True)):
        if (want.shape, want.dtype, want.device) != (got.shape, got.dtype, got.device):
            raise PatchRefused(
                f"output {i}: wanted {tuple(want.shape)} {want.dtype} on {want.device}, "
                f"found {tuple(got.shape)} {got.dtype} on {got.device}"
            )
        if not torch.allclose(got, want, rtol=rtol, atol=atol, equal_nan=True):
            apart = (got.double() - want.double()).abs().nan_to_num(torch.inf)
            apart[(got == want) | (got.isnan() & want.isnan())] = 0
            at = tuple(int(n) for n in torch.unravel_index(apart.argmax(), apart.shape))
            raise PatchRefused(f"output {i} differs by {float(apart[at]):.3g} at {at}")


def _call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    copies = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    output = function(**copies)
    return tuple(output) if isinstance(output, tuple | list) else (output,)
