# mypy: allow-untyped-decorators
"""The CPU scan: sequences in parallel over threads, eight at a time in each, in the operation order of the loop.

Results in float32 and float64 are bit-identical to :mod:`rl_accel.ops.naive` as long as no sequence is cut in time, that is
unless there are fewer sequences than threads and they are long. A cut sequence agrees to rounding: a chunk maps its state
on entry to its state on exit by an affine function, so the functions of all chunks are found in parallel first, then
composed, and then every chunk runs from its true state. Apart from the outputs no memory that grows with the tokens is
taken, unless an argument has to be copied first: half precision, or a last dimension that is not dense.
"""

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import types
from numba.extending import overload

from rl_accel.ops.compile_numba import compiled
from rl_accel.ops.inputs import OUTSIDE, Inputs
from rl_accel.ops.plan import LENGTH, MASK_START, OUT_START, Share, collect, compose, cut, deal, too_long
from rl_accel.ops.tile_numba import (
    BLOCK,
    LANES,
    MASK,
    OUT,
    PITCH,
    REWARD,
    SCRATCH,
    STATE,
    VALUE,
    fence,
    gae_tile,
    prefetch,
    returns_tile,
    stream,
)
from rl_accel.ops.workers import WORKERS, default_threads

STREAM_BYTES = 32 << 20
"""Outputs above this bypass the caches: they would not fit, and streaming saves reading each line before it is written."""
SMALL_TOKENS = 1 << 18
"""Below this one thread is faster than waking others: measured on two cores, equal at about 300,000."""

Array = npt.NDArray[Any]


def gae(inputs: Inputs, gamma: float, lam: float, num_threads: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns in the dtype of the rewards; half precision is computed in float32."""
    scan = _Scan(inputs, gamma, gamma * lam)
    scan.run(num_threads)
    assert scan.second is not None
    return scan.result(scan.first), scan.result(scan.second)


def discounted_returns(inputs: Inputs, gamma: float, num_threads: int | None) -> torch.Tensor:
    """Return discounted returns in the dtype of the rewards; half precision is computed in float32."""
    scan = _Scan(inputs, 0.0, gamma)
    scan.run(num_threads)
    return scan.result(scan.first)


class _Scan:
    """One call: flat views of the arguments, fresh outputs, and where each sequence begins in each of them."""

    def __init__(self, inputs: Inputs, gamma: float, decay: float) -> None:
        self._inputs = inputs
        self._rewards, reward_starts = _flat(_computable(inputs.rewards), inputs)
        self._values, value_starts = None, reward_starts
        if inputs.values is not None:
            self._values, value_starts = _flat(_computable(inputs.values), inputs)
        self._mask, mask_starts = None, reward_starts
        if inputs.mask is not None:
            self._mask, mask_starts = _flat(_readable_mask(inputs.mask), inputs)
        dtype = self._rewards.dtype
        tokens = inputs.rewards.numel()
        self.first = _aligned(tokens, dtype)
        self.second = None if inputs.values is None else _aligned(tokens, dtype)
        self._gamma, self._decay = dtype.type(gamma), dtype.type(decay)
        segments = np.array(inputs.segments(), dtype=np.int64).reshape(-1, 2)
        self._table = np.column_stack([reward_starts, value_starts, mask_starts, segments])
        self._stream = tokens * dtype.itemsize * (1 if self.second is None else 2) > STREAM_BYTES

    def run(self, num_threads: int | None) -> None:
        threads = num_threads or (1 if len(self.first) < SMALL_TOKENS else default_threads())
        long = too_long(self._table, threads)
        whole = np.setdiff1d(np.arange(len(self._table)), long)
        if len(long):
            self._run_cut(self._table[long], threads)
            # composing the maps of pieces turns inf into NaN in other places than the loop does
            odd = long[~np.isfinite(self.first[self._table[long, OUT_START]])]
            whole = np.concatenate([whole, odd])
        self._run_whole(self._table[whole], threads)

    def result(self, flat: Array) -> torch.Tensor:
        return torch.from_numpy(flat).view(self._inputs.rewards.shape).to(self._inputs.rewards.dtype)

    def _run_whole(self, table: Array, threads: int) -> None:
        self._scan(deal(table, np.zeros((len(table), 2), self._rewards.dtype), threads, LANES), threads, write=True)

    def _run_cut(self, table: Array, threads: int) -> None:
        pieces, owners = cut(table, threads, LANES)
        shares = deal(pieces, np.zeros((len(pieces), 2), self._rewards.dtype), threads, LANES)
        self._scan(shares, threads, write=False)
        maps = np.zeros((len(pieces), 3))

        def work(piece: int) -> None:
            where = pieces[piece, MASK_START], pieces[piece, LENGTH]
            maps[piece] = transfer(self._mask, *where, float(self._gamma), float(self._decay))

        WORKERS.run([partial(work, piece) for piece in range(len(pieces))], threads)
        entries = compose(owners, collect(shares, len(pieces)), maps).astype(self._rewards.dtype)
        self._scan(deal(pieces, entries, threads, LANES), threads, write=True)

    def _scan(self, shares: list[Share], threads: int, *, write: bool) -> None:
        odd_masks: list[bool] = []

        def work(share: Share) -> None:
            arrays = (self._rewards, self._values, self._mask, self.first, self.second)
            scratch = np.zeros(SCRATCH, self._rewards.dtype)
            options = (self._gamma, self._decay, write, self._stream)
            odd_masks.append(scan_lanes(*arrays, share.table, share.states, scratch, *options))

        WORKERS.run([partial(work, share) for share in shares], threads)
        if any(odd_masks):
            raise ValueError(OUTSIDE)


def _computable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _readable_mask(mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype is torch.bool:
        return mask.view(torch.uint8)
    return mask.float() if mask.dtype in (torch.float16, torch.bfloat16) else mask


def _flat(tensor: torch.Tensor, inputs: Inputs) -> tuple[Array, Array]:
    """Return the memory under ``tensor`` as one dense array, and where each sequence begins in it, without a copy."""
    if tensor.stride(-1) != 1:
        tensor = tensor.contiguous()
    if inputs.offsets is not None:
        return tensor.numpy(), np.array(inputs.offsets[:-1], np.int64)
    batch, tokens = tensor.shape
    if tensor.numel() == 0:
        return np.empty(0, tensor.numpy().dtype), np.zeros(batch, np.int64)
    pitch = tensor.stride(0)
    reach = (batch - 1) * pitch + tokens
    return tensor.as_strided((reach,), (1,)).numpy(), np.arange(batch, dtype=np.int64) * pitch


def _aligned(tokens: int, dtype: Any) -> Array:
    """Fresh memory on a 64-byte boundary, which streamed stores need.

    numpy asks the kernel for huge pages and torch does not; for outputs of hundreds of megabytes the page faults would cost
    more than the whole scan.
    """
    spare = 64 // dtype.itemsize
    memory = np.empty(tokens + spare, dtype)
    skip = -memory.ctypes.data % 64 // dtype.itemsize
    return memory[skip : skip + tokens]


def _take_mask(target: Any, to: Any, mask: Any, at: Any, count: Any) -> Any:
    """Write mask[at:at+count] to target as floats (ones if there is no mask); tell whether one is outside [0, 1]."""
    raise NotImplementedError("compiled code only")


@overload(_take_mask, jit_options={"nogil": True})
def _take_mask_for(target: Any, to: Any, mask: Any, at: Any, count: Any) -> Any:
    def no_mask(target: Any, to: Any, mask: Any, at: Any, count: Any) -> Any:
        targets = target[to : to + count]
        for i in range(count):
            targets[i] = 1
        return False

    def whole_numbers(target: Any, to: Any, mask: Any, at: Any, count: Any) -> Any:
        targets, sources = target[to : to + count], mask[at : at + count]
        bits = 0
        for i in range(count):
            bits |= sources[i]
            # through int32, which processors can convert many at a time; a value this cuts short is refused anyway
            targets[i] = np.int32(sources[i])
        return (bits & ~1) != 0

    def fractions(target: Any, to: Any, mask: Any, at: Any, count: Any) -> Any:
        targets, sources = target[to : to + count], mask[at : at + count]
        odd = 0
        for i in range(count):
            odd += not (sources[i] >= 0 and sources[i] <= 1)
            targets[i] = sources[i]
        return odd != 0

    if isinstance(mask, types.NoneType):
        return no_mask
    return whole_numbers if isinstance(mask.dtype, types.Integer) else fractions


@compiled
def copy(target: Array, to: int, source: Array, at: int, count: int) -> None:
    """target[to:to+count] = source[at:at+count]."""
    # numba makes vector code of loops over slices only: any other index might be negative and count from the end
    targets, sources = target[to : to + count], source[at : at + count]
    for i in range(count):
        targets[i] = sources[i]


@compiled
def clear(target: Array, to: int, count: int) -> None:
    """target[to:to+count] = 0."""
    targets = target[to : to + count]
    for i in range(count):
        targets[i] = 0


@compiled
def accumulate(target: Array, to: int, at: int, count: int) -> None:
    """target[to:to+count] += target[at:at+count]."""
    targets, sources = target[to : to + count], target[at : at + count]
    for i in range(count):
        targets[i] += sources[i]


@compiled
def put(target: Array, to: int, source: Array, at: int, count: int, streamed: bool) -> None:
    """target[to:to+count] = source[at:at+count], past the caches if ``streamed``."""
    done = 0
    if streamed:
        head = min(-to & 7, count)
        copy(target, to, source, at, head)
        done = head + (count - head) // 8 * 8
        for i in range(head, done, 8):
            stream(target, to + i, source, at + i)
    copy(target, to + done, source, at + done, count - done)


@compiled
def scan_lanes(
    rewards: Array,
    values: Array | None,
    mask: Array | None,
    first_out: Array,
    second_out: Array | None,
    table: Array,
    states: Array,
    scratch: Array,
    gamma: float,
    decay: float,
    write: bool,
    streamed: bool,
) -> bool:
    """Scan the groups of a :class:`rl_accel.ops.plan.Share`; tell whether the mask holds a value outside [0, 1].

    With values it computes GAE (advantages, then returns); without, discounted returns at rate ``decay``. The lanes of a
    group walk back in step from the last token of each sequence; those that end early go on with empty tokens.
    ``scratch`` is memory of SCRATCH zeros that no other thread uses.
    """
    odd_mask = False
    for group in range(table.shape[0]):
        longest = table[group, 0, 4]
        for lane in range(LANES):
            scratch[STATE + lane] = states[group, lane, 0]
            scratch[STATE + LANES + lane] = states[group, lane, 1]
        for done in range(0, longest, BLOCK):
            width = min(BLOCK, (longest - done + 15) // 16 * 16)
            for lane in range(LANES):
                left = max(table[group, lane, 4] - done, 0)
                count = min(left, BLOCK)
                to = lane * PITCH + BLOCK - count
                empty = lane * PITCH + BLOCK - width
                clear(scratch, REWARD + empty, width - count)
                clear(scratch, MASK + empty, width - count)
                copy(scratch, REWARD + to, rewards, table[group, lane, 0] + left - count, count)
                if values is not None:
                    clear(scratch, VALUE + empty, width - count)
                    copy(scratch, VALUE + to, values, table[group, lane, 1] + left - count, count)
                odd_mask |= _take_mask(scratch, MASK + to, mask, table[group, lane, 2] + left - count, count)
            for token in range(BLOCK - 16, BLOCK - width - 1, -16):
                for lane in range(LANES):
                    # the same place in the block that comes next
                    ahead = table[group, lane, 4] - done - 2 * BLOCK + token
                    if ahead >= 0:
                        prefetch(rewards, table[group, lane, 0] + ahead)
                        if values is not None:
                            prefetch(values, table[group, lane, 1] + ahead)
                        if mask is not None:
                            prefetch(mask, table[group, lane, 2] + ahead)
                            prefetch(mask, table[group, lane, 2] + ahead + 8)
                for tile in range(token + 8, token - 1, -8):
                    if values is not None:
                        gae_tile(scratch, tile, gamma, decay)
                    else:
                        returns_tile(scratch, tile, decay)
            if not write:
                continue
            for lane in range(LANES):
                left = max(table[group, lane, 4] - done, 0)
                count = min(left, BLOCK)
                at = lane * PITCH + BLOCK - count
                to = table[group, lane, 3] + left - count
                put(first_out, to, scratch, OUT + at, count, streamed)
                if second_out is not None:
                    accumulate(scratch, OUT + at, VALUE + at, count)
                    put(second_out, to, scratch, OUT + at, count, streamed)
        for lane in range(LANES):
            states[group, lane, 0] = scratch[STATE + lane]
            states[group, lane, 1] = scratch[STATE + LANES + lane]
    fence()
    return odd_mask


@compiled
def transfer(mask: Array | None, first: int, length: int, gamma: float, decay: float) -> tuple[float, float, float]:
    """Return (p, d, c) of :func:`rl_accel.ops.plan.compose` for the ``length`` tokens from ``first`` on."""
    p, d, c = 1.0, 0.0, 1.0
    for t in range(first + length - 1, first - 1, -1):
        m = 1.0
        if mask is not None:
            m = float(mask[t])
        keep = 1.0 - m
        step = decay * m + keep
        d = step * d + gamma * m * p
        c *= step
        p *= keep
        if p == 0 and d == 0 and c == 0:
            break
    return p, d, c
