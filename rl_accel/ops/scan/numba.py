"""The CPU scan: sequences in parallel over threads, eight at a time in each, in the operation order of the loop.

Results in float32 and float64 are bit-identical to :mod:`rl_accel.ops.scan.naive` as long as no sequence is cut in time, that is
unless there are fewer sequences than threads and they are long. A cut sequence agrees to rounding: a chunk maps its state
on entry to its state on exit by an affine function, so the functions of all chunks are found in parallel first, then
composed, and then every chunk runs from its true state. Apart from the outputs no memory that grows with the tokens is
taken, unless an argument has to be copied first: half precision, or a last dimension that is not dense.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_accel.ops.inputs import OUTSIDE, Inputs
from rl_accel.ops.scan.numba_kernels import LANES, SCRATCH, scan_lanes, transfer
from rl_accel.ops.workers import WORKERS, default_threads

STREAM_BYTES = 32 << 20
"""Outputs above this bypass the caches: they would not fit, and streaming saves reading each line before it is written."""
SMALL_TOKENS = 1 << 18
"""Below this one thread is faster than waking others: measured on two cores, equal at about 300,000."""

REWARD_START, VALUE_START, MASK_START, OUT_START, LENGTH = range(5)
"""Columns of a table: where a sequence begins in each flat array, and how many tokens it has."""
LEAST_CHUNK = 8192
"""Tokens a piece of a cut sequence has at least; below, finding the piece's entry state costs more than waiting."""
ALIGN = 16
SHARES_PER_THREAD = 4

Array = npt.NDArray[Any]


def gae(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns in the dtype of the rewards; half precision is computed in float32."""
    scan = _Scan(inputs, inputs.gamma, inputs.gamma * inputs.lam)
    scan.run()
    assert scan.second is not None
    return scan.result(scan.first), scan.result(scan.second)


def discounted_returns(inputs: Inputs) -> torch.Tensor:
    """Return discounted returns in the dtype of the rewards; half precision is computed in float32."""
    scan = _Scan(inputs, 0.0, inputs.gamma)
    scan.run()
    return scan.result(scan.first)


@dataclass(frozen=True)
class Share:
    """What one thread takes at a time: groups of sequences that run side by side.

    Attributes:
        table: [G, lanes, 5] int64; a lane of length 0 is idle.
        states: [G, lanes, 2], next value and running result on entry; the kernel leaves those on exit.
        members: [G, lanes] int64, the row of the caller's table that each lane works on; -1 when idle.
    """

    table: Array
    states: Array
    members: Array


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

    def run(self) -> None:
        threads = self._inputs.num_threads or (1 if len(self.first) < SMALL_TOKENS else default_threads())
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


def deal(table: Array, states: Array, threads: int, lanes: int) -> list[Share]:
    """Deal the rows of ``table`` [S, 5], with entry ``states`` [S, 2], into shares of about equal work, longest first.

    Sequences of similar length run side by side, and no thread stays idle as long as there is a sequence for it. There are a
    few shares for each thread, to even out what lengths and a busy machine make uneven.
    """
    rows = np.flatnonzero(table[:, LENGTH])
    if not len(rows):
        return []
    rows = rows[np.argsort(-table[rows, LENGTH], kind="stable")]
    rounds = -(-len(rows) // (threads * lanes))
    groups = np.array_split(rows, min(rounds * threads, len(rows)))
    piles: list[list[Array]] = [[] for _ in range(min(threads * SHARES_PER_THREAD, len(groups)))]
    for index, group in enumerate(groups):
        piles[index % len(piles)].append(group)
    return [_share(pile, table, states, lanes) for pile in piles]


def collect(shares: list[Share], count: int) -> Array:
    """Return the states on exit, [count, 2] in float64, in the order of the table that was dealt."""
    states = np.zeros((count, 2))
    for share in shares:
        used = share.members >= 0
        states[share.members[used]] = share.states[used]
    return states


def too_long(table: Array, threads: int) -> Array:
    """Return the rows of ``table`` to cut in time: with fewer sequences than threads, those long enough to gain."""
    busy = int(np.count_nonzero(table[:, LENGTH]))
    if busy >= threads:
        return np.zeros(0, np.int64)
    return np.flatnonzero(table[:, LENGTH] >= 2 * LEAST_CHUNK)


def cut(table: Array, threads: int, lanes: int) -> tuple[Array, Array]:
    """Cut every row of ``table`` into pieces, enough to fill all lanes of all threads.

    Returns:
        The table of the pieces, those of a row together and the latest in time first, and the row that each belongs to.
    """
    wanted = -(-threads * lanes // len(table))
    pieces, owners = [], []
    for owner, row in enumerate(table):
        length = int(row[LENGTH])
        count = min(wanted, length // LEAST_CHUNK)
        size = -(-length // (count * ALIGN)) * ALIGN
        for first in reversed(range(0, length, size)):
            piece = row + first
            piece[LENGTH] = min(size, length - first)
            pieces.append(piece)
            owners.append(owner)
    return np.stack(pieces), np.array(owners)


def compose(owners: Array, exits: Array, maps: Array) -> Array:
    """Return each piece's entry state, [K, 2], from its exit state on a zero entry and its linear map.

    ``maps`` [K, 3] holds what becomes of the entry: next value = p * next value, running result = c * running result +
    d * next value, as columns p, d, c.
    """
    entries = np.zeros_like(exits)
    for piece in range(1, len(owners)):
        if owners[piece] != owners[piece - 1]:
            continue
        next_value, running = entries[piece - 1]
        p, d, c = maps[piece - 1]
        entries[piece, 0] = exits[piece - 1, 0] + p * next_value
        entries[piece, 1] = exits[piece - 1, 1] + c * running + d * next_value
    return entries


def _share(groups: list[Array], table: Array, states: Array, lanes: int) -> Share:
    members = np.full((len(groups), lanes), -1, np.int64)
    for index, group in enumerate(groups):
        members[index, : len(group)] = group
    used = members >= 0
    lane_table = np.zeros((*members.shape, table.shape[1]), np.int64)
    lane_table[used] = table[members[used]]
    lane_states = np.zeros((*members.shape, 2), states.dtype)
    lane_states[used] = states[members[used]]
    return Share(lane_table, lane_states, members)
