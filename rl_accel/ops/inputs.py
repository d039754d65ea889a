"""Argument checks of all advantage kernels, the checked arguments of the scans (GAE and discounted returns), and thread counts.

The cost of a check does not grow with the number of tokens, with two exceptions: :func:`check_mask_values` and :func:`is_binary`
read the whole mask.
"""

import math
import numbers
import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *FLOATS)
BINARY_MASKS = (torch.bool, torch.int32, torch.int64, torch.float32)
OUTSIDE = (
    "mask wants values between 0 and 1, found at least one outside (or not a number); "
    "1 marks a token that counts, 0 one that is skipped, and a fraction blends the two"
)


@dataclass(frozen=True)
class Inputs:
    """Checked arguments of a scan (GAE or discounted returns).

    Attributes:
        rewards: [B, T] (batch, tokens), or [N]: the tokens of all sequences one after the other (packed).
        values: the critic's values, in the shape of ``rewards``; None for discounted returns.
        mask: in the shape of ``rewards``, 1 for a token that counts, 0 for a token that is skipped; None: every token counts.
        offsets: S + 1 boundaries of the S packed sequences; None for [B, T] tensors.
        gamma, lam: discount per token and lambda of GAE.
        chunk_size, num_threads: tokens per chunk and number of threads; None for the backend's default.
    """

    rewards: torch.Tensor
    values: torch.Tensor | None
    mask: torch.Tensor | None
    offsets: tuple[int, ...] | None
    gamma: float
    lam: float
    chunk_size: int | None
    num_threads: int | None

    def segments(self) -> list[tuple[int, int]]:
        """Returns ``(first, count)`` of each sequence: first token's index in the flattened tensor, and number of tokens."""
        if self.offsets is not None:
            return [(a, b - a) for a, b in pairwise(self.offsets)]
        batch, tokens = self.rewards.shape
        return [(row * tokens, tokens) for row in range(batch)]


def check_scan(
    rewards: Any,
    values: Any,
    mask: Any,
    gamma: Any,
    lam: Any,
    cu_seqlens: Any,
    chunk_size: Any,
    num_threads: Any,
    *,
    needs_values: bool,
) -> Inputs:
    """Checks the arguments of a scan (GAE or discounted returns) and returns them, with tensors detached from autograd.

    Raises TypeError or ValueError with the name of the wrong argument, and the value wanted and found.
    """
    rewards = check_tensor("rewards", rewards, FLOATS).detach()
    dimensions, layout = (2, "[B, T]") if cu_seqlens is None else (1, "[N], packed, with cu_seqlens")
    if rewards.dim() != dimensions:
        raise ValueError(f"rewards wants shape {layout}, found {list(rewards.shape)}")
    if needs_values:
        values = check_tensor("values", values, FLOATS, like=rewards).detach()
        if values.dtype != rewards.dtype:
            raise ValueError(f"values wants the dtype of rewards, {rewards.dtype}, found {values.dtype}")
    if mask is not None:
        mask = check_tensor("mask", mask, MASKS, like=rewards).detach()
    offsets = None if cu_seqlens is None else _offsets(cu_seqlens, rewards.shape[0])
    rates = _rate("gamma", gamma), _rate("lam", lam)
    counts = _count("chunk_size", chunk_size), _count("num_threads", num_threads)
    return Inputs(rewards, values, mask, offsets, *rates, *counts)


def check_tensor(
    name: str,
    value: Any,
    dtypes: Iterable[torch.dtype],
    *,
    like: torch.Tensor | None = None,
    of: str = "rewards",
    gradient: bool = True,
) -> torch.Tensor:
    """Returns ``value`` if it is a dense tensor of one of ``dtypes``, with the shape and device of ``like`` if that is given.

    ``name`` and ``of`` are the names of ``value`` and ``like`` in error messages.

    Raises:
        TypeError: ``value`` is not a tensor, not dense or of another dtype.
        ValueError: ``value`` has another shape or device, or requires a gradient although ``gradient`` is False.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} wants a torch.Tensor, found {type(value).__name__}")
    if value.dtype not in dtypes:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} wants one of the dtypes {known}, found {str(value.dtype).removeprefix('torch.')}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} wants a dense tensor, found layout {value.layout}")
    if like is not None and value.shape != like.shape:
        raise ValueError(f"{name} wants the shape of {of}, {list(like.shape)}, found {list(value.shape)}")
    if like is not None and value.device != like.device:
        raise ValueError(f"{name} wants the device of {of}, {like.device}, found {value.device}")
    if value.requires_grad and not gradient:
        raise ValueError(f"{name} wants a tensor without gradient, found one that requires it")
    return value


def usable_cores() -> int:
    """Returns the number of processor cores that this process may use."""
    # torch.get_num_threads() is 1 in a Ray actor, where Ray sets OMP_NUM_THREADS=1
    return len(os.sched_getaffinity(0))


def default_threads() -> int:
    """Returns the default number of threads of a kernel: one per usable core, at most 16, which use all of the memory bandwidth."""
    return min(usable_cores(), 16)


def is_binary(mask: torch.Tensor) -> bool:
    """Returns whether ``mask`` holds only 0 and 1. Its dtype must be one of ``BINARY_MASKS``."""
    if mask.dtype == torch.bool or mask.numel() == 0:
        return True
    low, high = torch.aminmax(mask)
    return bool(low >= 0) and bool(high <= 1) and (mask.dtype != torch.float32 or torch.equal(mask, mask.round()))


def check_mask_values(mask: torch.Tensor | None) -> None:
    """Raises ValueError if a mask holds NaN or a value outside [0, 1]. Does nothing on an accelerator, whose queue would stall."""
    if mask is None or mask.device.type != "cpu" or mask.dtype is torch.bool or mask.numel() == 0:
        return
    low, high = torch.aminmax(mask)
    if not (low >= 0 and high <= 1):
        raise ValueError(OUTSIDE)


def _number(name: str, value: Any, kind: Any, wanted: str, low: float, high: float) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} wants {wanted}, found {value!r} ({type(value).__name__})")
    if not low <= value <= high:
        raise ValueError(f"{name} wants {wanted}, found {value!r}")
    return value


def _rate(name: str, value: Any) -> float:
    return float(_number(name, value, numbers.Real, wanted="a number between 0 and 1", low=0, high=1))


def _count(name: str, value: Any) -> int | None:
    wanted = "a whole number of at least 1 or None"
    return None if value is None else int(_number(name, value, numbers.Integral, wanted=wanted, low=1, high=math.inf))


def _offsets(cu_seqlens: Any, tokens: int) -> tuple[int, ...]:
    cu_seqlens = check_tensor("cu_seqlens", cu_seqlens, (torch.int32, torch.int64))
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens wants shape [S + 1], found {list(cu_seqlens.shape)}")
    offsets = tuple(cu_seqlens.tolist())
    if offsets[0] != 0 or offsets[-1] != tokens:
        ends = f"{offsets[0]} to {offsets[-1]}"
        raise ValueError(f"cu_seqlens wants to run from 0 to {tokens} (the tokens), found {ends}")
    for index, (before, after) in enumerate(pairwise(offsets), 1):
        if after < before:
            raise ValueError(
                f"cu_seqlens wants values that never fall, found {before} before {after} at position {index}"
            )
    return offsets
