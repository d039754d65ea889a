"""The one place where the arguments of the advantage kernels are checked.

Every check here costs nothing that grows with the number of tokens. Mask *values* are the exception, see
:func:`check_mask_values`.
"""

import math
import numbers
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *FLOATS)
OUTSIDE = (
    "mask wants values between 0 and 1, found at least one outside (or not a number); "
    "1 marks a token that counts, 0 one that is skipped, and a fraction blends the two"
)


@dataclass(frozen=True)
class Inputs:
    """Checked arguments. ``offsets`` is None for [B, T] tensors, else the S+1 segment boundaries of packed [N] tensors."""

    rewards: torch.Tensor
    values: torch.Tensor | None
    mask: torch.Tensor | None
    offsets: tuple[int, ...] | None

    def segments(self) -> list[tuple[int, int]]:
        """Return ``(first token, length)`` of every sequence, counted in a contiguous layout."""
        if self.offsets is not None:
            return [(a, b - a) for a, b in pairwise(self.offsets)]
        batch, tokens = self.rewards.shape
        return [(row * tokens, tokens) for row in range(batch)]


def check(rewards: Any, values: Any, mask: Any, cu_seqlens: Any, *, needs_values: bool) -> Inputs:
    """Check tensors and return them detached from autograd.

    Raises:
        TypeError: an argument is no dense tensor, or has a dtype that is not taken.
        ValueError: shapes, dtypes or devices do not fit together, or ``cu_seqlens`` does not cover the tokens.
    """
    rewards = _tensor("rewards", rewards, FLOATS)
    wanted = 2 if cu_seqlens is None else 1
    if rewards.dim() != wanted:
        layout = "[B, T]" if cu_seqlens is None else "[N], packed, with cu_seqlens"
        raise ValueError(f"rewards wants shape {layout}, found {list(rewards.shape)}")
    if needs_values:
        values = _tensor("values", values, FLOATS)
        _alike("values", values, rewards)
        if values.dtype != rewards.dtype:
            raise ValueError(f"values wants the dtype of rewards, {rewards.dtype}, found {values.dtype}")
    if mask is not None:
        mask = _tensor("mask", mask, MASKS)
        _alike("mask", mask, rewards)
    offsets = None if cu_seqlens is None else _offsets(cu_seqlens, rewards.shape[0])
    return Inputs(rewards, values if needs_values else None, mask, offsets)


def check_rate(name: str, value: Any) -> float:
    """Return ``value`` as a float in [0, 1].

    Raises:
        TypeError: it is not a real number.
        ValueError: it is outside [0, 1] or not a number (NaN).
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} wants a number between 0 and 1, found {value!r} ({type(value).__name__})")
    rate = float(value)
    if math.isnan(rate) or not 0.0 <= rate <= 1.0:
        raise ValueError(f"{name} wants a number between 0 and 1, found {value!r}")
    return rate


def check_count(name: str, value: Any) -> int | None:
    """Return ``value`` if it is None or a whole number of at least 1; TypeError or ValueError otherwise."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} wants a whole number of at least 1 or None, found {value!r} ({type(value).__name__})")
    if value < 1:
        raise ValueError(f"{name} wants a whole number of at least 1 or None, found {value!r}")
    return int(value)


def check_mask_values(mask: torch.Tensor | None) -> None:
    """Raise ValueError when a mask on the CPU holds a value outside [0, 1] or NaN.

    It reads the mask once; the numba kernel does the same test on the fly, at no extra pass. A mask on an accelerator is
    not tested, because the answer would stall the device's queue: there, odd values give what the loop's arithmetic gives.
    """
    if mask is None or mask.device.type != "cpu" or mask.dtype is torch.bool or mask.numel() == 0:
        return
    low, high = torch.aminmax(mask)
    if not (low >= 0 and high <= 1):
        raise ValueError(OUTSIDE)


def _tensor(name: str, value: Any, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} wants a torch.Tensor, found {type(value).__name__}")
    if value.dtype not in dtypes:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} wants one of the dtypes {known}, found {str(value.dtype).removeprefix('torch.')}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} wants a dense tensor, found layout {value.layout}")
    return value.detach()


def _alike(name: str, value: torch.Tensor, rewards: torch.Tensor) -> None:
    if value.shape != rewards.shape:
        raise ValueError(f"{name} wants the shape of rewards, {list(rewards.shape)}, found {list(value.shape)}")
    if value.device != rewards.device:
        raise ValueError(f"{name} wants the device of rewards, {rewards.device}, found {value.device}")


def _offsets(cu_seqlens: Any, tokens: int) -> tuple[int, ...]:
    cu_seqlens = _tensor("cu_seqlens", cu_seqlens, (torch.int32, torch.int64))
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens wants shape [S + 1], found {list(cu_seqlens.shape)}")
    offsets = tuple(cu_seqlens.tolist())
    if offsets[0] != 0 or offsets[-1] != tokens:
        raise ValueError(
            f"cu_seqlens wants to run from 0 to {tokens} (the tokens), found {offsets[0]} to {offsets[-1]}"
        )
    for index in range(1, len(offsets)):
        if offsets[index] < offsets[index - 1]:
            found = f"{offsets[index - 1]} before {offsets[index]} at position {index}"
            raise ValueError(f"cu_seqlens wants values that never fall, found {found}")
    return offsets
