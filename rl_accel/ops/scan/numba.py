# mypy: allow-untyped-decorators
"""GAE and discounted returns on the CPU. Each thread processes eight sequences at a time, in the operation order of the naive loop.

Results in float32 and float64 are bit-identical to :mod:`rl_accel.ops.scan.naive` for any number of threads, because no sequence is
cut into pieces. Memory beyond the outputs does not grow with the number of tokens, unless an argument must be copied first (half
precision, or a last dimension that is not dense).

A plain loop waits some 20 cycles per token, because each step needs the previous result. Eight sequences, one per lane of a vector,
share this wait. Tensors hold one sequence after the other. A tile of 8 sequences x 8 tokens is therefore transposed in registers,
walked from the last token to the first, and transposed again. numba offers neither this transposition nor stores that bypass the
caches; a few lines of LLVM do both. Float operations are neither fused nor reordered: each lane does the same operations in the
same order as the loop.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic, overload

from rl_accel.ops.cpu import compiled, run
from rl_accel.ops.inputs import OUTSIDE, Inputs, default_threads

Array = npt.NDArray[Any]

REWARD_START, VALUE_START, MASK_START, OUT_START, LENGTH = range(5)
"""Columns of a table with one row per sequence: index of the sequence's first token in the flat arrays of rewards, values, mask and
outputs, and number of tokens of the sequence."""
STREAM_BYTES = 32 << 20
"""Total size of the results in bytes above which stores bypass the processor's caches, where the results would not fit."""
SMALL_TOKENS = 1 << 18
"""Number of tokens below which one thread does all the work. On two cores, one thread was faster up to about 300,000 tokens."""
SHARES_PER_THREAD = 4
"""Number of shares into which the work is cut, for each thread. A fast thread can then process more shares. Chosen by hand."""

LANES = 8
BLOCK = 2048
"""Number of tokens of each sequence that are in scratch memory at a time. Scratch memory of this size fits into a level-2 cache."""
PITCH = BLOCK + 16
"""Number of elements in scratch memory from the start of one lane (sequence) to the start of the next. If this were a power of two,
the lanes would compete for the same few places in the cache."""
PLANE = LANES * PITCH
REWARD, VALUE, MASK = 0, PLANE, 2 * PLANE
OUT = REWARD
"""Index of the first result in scratch memory. Results overwrite the rewards, which are no longer needed."""
STATE = 3 * PLANE
"""Index of the scan's state in scratch memory: 8 next values and 8 running advantages (or returns), one per lane (sequence)."""
SCRATCH = STATE + 2 * LANES


def scan(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Computes GAE, or discounted returns if ``inputs`` has no values. Half-precision inputs are computed in float32."""
    rewards, reward_starts = _flat(inputs.rewards, inputs)
    values, value_starts = (None, reward_starts) if inputs.values is None else _flat(inputs.values, inputs)
    mask, mask_starts = (None, reward_starts) if inputs.mask is None else _flat(inputs.mask, inputs)
    dtype, tokens = rewards.dtype, inputs.rewards.numel()
    outputs = [_aligned(tokens, dtype) for _ in range(1 if values is None else 2)]
    arrays = (rewards, values, mask, outputs[0], None if values is None else outputs[1])
    # discounted returns have no next value, so gamma is 0 and the discount is in decay
    gamma, decay = dtype.type(0 if values is None else inputs.gamma), dtype.type(inputs.gamma * inputs.lam)
    streamed = tokens * dtype.itemsize * len(outputs) > STREAM_BYTES
    threads = inputs.num_threads or (1 if tokens < SMALL_TOKENS else default_threads())
    segments = np.array(inputs.segments(), dtype=np.int64).reshape(-1, 2)
    table = np.column_stack([reward_starts, value_starts, mask_starts, segments])
    odd_masks: list[bool] = []

    def work(groups: Array) -> None:
        scratch = np.zeros(SCRATCH, dtype)
        odd_masks.append(scan_lanes(*arrays, table, groups, scratch, gamma, decay, streamed))

    run([partial(work, groups) for groups in deal(table[:, LENGTH], threads)], threads)
    if any(odd_masks):
        raise ValueError(OUTSIDE)
    shape, wanted = inputs.rewards.shape, inputs.rewards.dtype
    return tuple(torch.from_numpy(out).view(shape).to(wanted) for out in outputs)


def _flat(tensor: torch.Tensor, inputs: Inputs) -> tuple[Array, Array]:
    """Returns the memory of ``tensor`` as a flat array, and the index of each sequence's first token in this array.

    Copies only half-precision tensors and tensors whose last dimension is not dense.
    """
    if tensor.dtype is torch.bool:
        tensor = tensor.view(torch.uint8)
    elif tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
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
    """Returns an uninitialised array that starts on a 64-byte boundary, as required by stores that bypass the caches."""
    # numpy requests huge pages from the operating system, torch does not. Without them, the page faults of large outputs would cost
    # more than the whole scan.
    spare = 64 // dtype.itemsize
    memory = np.empty(tokens + spare, dtype)
    skip = -memory.ctypes.data % 64 // dtype.itemsize
    return memory[skip : skip + tokens]


def deal(lengths: Array, threads: int) -> list[Array]:
    """Divides the sequences with ``lengths`` [S] into shares of about equal work, a few shares for each thread.

    A share is an array [G, LANES] with G groups. A group holds the indices of up to eight sequences of similar length, which are
    scanned side by side. In a group, the longest sequence comes first; -1 stands for no sequence.
    """
    rows = np.flatnonzero(lengths)
    if not len(rows):
        return []
    rows = rows[np.argsort(-lengths[rows], kind="stable")]
    rounds = -(-len(rows) // (threads * LANES))
    parts = np.array_split(rows, min(rounds * threads, len(rows)))
    groups = np.full((len(parts), LANES), -1)
    for group, part in zip(groups, parts, strict=True):
        group[: len(part)] = part
    shares = min(threads * SHARES_PER_THREAD, len(groups))
    return [groups[first::shares].copy() for first in range(shares)]


_INDEX = ir.IntType(32)


def _llvm_float(array: Any) -> Any:
    return ir.FloatType() if array.dtype == types.float32 else ir.DoubleType()


def _shuffle(builder: Any, x: Any, y: Any, picks: list[int]) -> Any:
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_INDEX, len(picks)), picks))


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """Generates LLVM code that transposes an 8 x 8 matrix. Argument and result are lists of 8 vectors."""
    # three rounds exchange elements between two vectors: first single elements, then pairs, then halves
    rounds = (
        (1, [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]),
        (2, [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]),
    )
    for apart, low, high in rounds:
        mixed: list[Any] = [None] * LANES
        for base in range(0, LANES, 2 * apart):
            for i in range(apart):
                pair = rows[base + i], rows[base + i + apart]
                mixed[base + 2 * i] = _shuffle(builder, *pair, low)
                mixed[base + 2 * i + 1] = _shuffle(builder, *pair, high)
        rows = mixed
    first = [_shuffle(builder, rows[i], rows[i + 4], [0, 1, 2, 3, 8, 9, 10, 11]) for i in range(4)]
    second = [_shuffle(builder, rows[i], rows[i + 4], [4, 5, 6, 7, 12, 13, 14, 15]) for i in range(4)]
    return first + second


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any, element: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), element.as_pointer())


class _Tile:
    """Generates LLVM code that loads and stores a tile (8 sequences x 8 tokens) in scratch memory.

    ``offset`` is the position of the tile's first token in each lane (sequence).
    """

    def __init__(self, context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> None:
        self._context, self._builder = context, builder
        self._array_type, self._array, self._offset = array_type, array, offset
        self._float = _llvm_float(array_type)
        self._bytes = array_type.dtype.bitwidth // 8
        self.vector = ir.VectorType(self._float, LANES)

    def _at(self, index: Any) -> Any:
        return _address(self._context, self._builder, self._array_type, self._array, index, self.vector)

    def _state(self, slot: int) -> Any:
        return self._at(ir.Constant(self._offset.type, STATE + slot * LANES))

    def _lane(self, plane: int, lane: int) -> Any:
        return self._at(self._builder.add(self._offset, ir.Constant(self._offset.type, plane + lane * PITCH)))

    def load(self, plane: int) -> list[Any]:
        rows = [self._builder.load(self._lane(plane, lane), align=self._bytes) for lane in range(LANES)]
        return _transpose(self._builder, rows)

    def store(self, plane: int, tokens: list[Any]) -> None:
        for lane, row in enumerate(_transpose(self._builder, tokens)):
            self._builder.store(row, self._lane(plane, lane), align=self._bytes)

    def load_state(self, slot: int) -> Any:
        return self._builder.load(self._state(slot), align=self._bytes)

    def store_state(self, slot: int, value: Any) -> None:
        self._builder.store(value, self._state(slot), align=self._bytes)

    def splat(self, scalar: Any) -> Any:
        vector = self._builder.insert_element(ir.Constant(self.vector, ir.Undefined), scalar, ir.Constant(_INDEX, 0))
        return _shuffle(self._builder, vector, vector, [0] * LANES)


Codegen = Callable[[Any, Any, Any, Any], Any]


@intrinsic
def scan_tile(
    typing_context: Any, scratch: Any, offset: Any, gamma: Any, decay: Any, values: Any
) -> tuple[Any, Codegen]:
    """Computes GAE advantages, or discounted returns if ``values`` is None, of a tile (8 sequences x 8 tokens) in scratch memory.

    ``offset`` is the position of the tile's first token in each lane (sequence).
    """
    is_gae = not isinstance(values, types.NoneType)

    def build(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        tile = _Tile(context, b, signature.args[0], arguments[0], arguments[1])
        gamma, decay, ones = tile.splat(arguments[2]), tile.splat(arguments[3]), ir.Constant(tile.vector, [1.0] * LANES)
        rewards, mask = tile.load(REWARD), tile.load(MASK)
        values = tile.load(VALUE) if is_gae else []
        next_value, running = tile.load_state(0), tile.load_state(1)
        results: list[Any] = [None] * LANES
        for t in reversed(range(LANES)):
            skip = b.fsub(ones, mask[t])
            delta = rewards[t]
            if is_gae:
                delta = b.fsub(b.fadd(delta, b.fmul(gamma, next_value)), values[t])
                next_value = b.fadd(b.fmul(values[t], mask[t]), b.fmul(skip, next_value))
            kept = b.fmul(b.fadd(delta, b.fmul(decay, running)), mask[t])
            running = b.fadd(kept, b.fmul(skip, running))
            results[t] = running if is_gae else kept
        tile.store_state(0, next_value)
        tile.store_state(1, running)
        tile.store(OUT, results)
        return context.get_dummy_value()

    return types.void(scratch, types.intp, gamma, decay, values), build


@intrinsic
def stream(typing_context: Any, target: Any, to: Any, source: Any, at: Any) -> tuple[Any, Codegen]:
    """Copies 8 elements, target[to:to+8] = source[at:at+8], with a store that bypasses the caches. ``target`` must be 64-byte
    aligned, ``to`` a multiple of 8."""

    def build(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(_llvm_float(signature.args[0]), LANES)
        size = signature.args[0].dtype.bitwidth // 8
        loaded = b.load(_address(context, b, signature.args[2], arguments[2], arguments[3], vector), align=size)
        target_at = _address(context, b, signature.args[0], arguments[0], arguments[1], vector)
        store = b.store(loaded, target_at, align=size * LANES)
        store.set_metadata("nontemporal", b.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp), build


@intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> tuple[Any, Codegen]:
    """Loads the memory around array[index] into the cache, for later use. ``index`` may be out of bounds."""

    def build(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        at = _address(context, b, signature.args[0], arguments[0], arguments[1], ir.IntType(8))
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [at.type, number, number, number])
        function = b.module.declare_intrinsic("llvm.prefetch", [at.type], kind)
        read, into_level_2, data = (ir.Constant(number, n) for n in (0, 2, 1))
        b.call(function, [at, read, into_level_2, data])
        return context.get_dummy_value()

    return types.void(array, types.intp), build


@intrinsic
def fence(typing_context: Any) -> tuple[Any, Codegen]:
    """Makes stores that bypassed the caches visible to other threads before any later memory access."""

    def build(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        b.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), build


def _take_mask(target: Any, to: Any, mask: Any, at: Any, count: Any) -> Any:
    """Writes mask[at:at+count] to target[to:to+count] as floats; ones if ``mask`` is None.

    Returns True if a mask value is outside [0, 1].
    """
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
            # converted via int32, for which processors have vector instructions; values that int32 truncates are refused anyway
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
    """Copies ``count`` elements: target[to:to+count] = source[at:at+count]."""
    # numba vectorises only loops over slices, because any other index might be negative and count from the end
    targets, sources = target[to : to + count], source[at : at + count]
    for i in range(count):
        targets[i] = sources[i]


@compiled
def clear(target: Array, to: int, count: int) -> None:
    """Sets ``count`` elements to 0: target[to:to+count] = 0."""
    targets = target[to : to + count]
    for i in range(count):
        targets[i] = 0


@compiled
def accumulate(target: Array, to: int, at: int, count: int) -> None:
    """Adds ``count`` elements of ``target`` to other elements of it: target[to:to+count] += target[at:at+count]."""
    targets, sources = target[to : to + count], target[at : at + count]
    for i in range(count):
        targets[i] += sources[i]


@compiled
def put(target: Array, to: int, source: Array, at: int, count: int, streamed: bool) -> None:
    """Copies ``count`` elements, target[to:to+count] = source[at:at+count]. If ``streamed``, the stores bypass the caches."""
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
    groups: Array,
    scratch: Array,
    gamma: float,
    decay: float,
    streamed: bool,
) -> bool:
    """Computes the results of groups of sequences. Returns True if the mask holds a value outside [0, 1].

    With ``values``, writes GAE advantages to ``first_out`` and returns to ``second_out``.
    Without ``values``, writes discounted returns to ``first_out``.

    Args:
        rewards, values, mask: flat arrays; ``values`` and ``mask`` may be None.
        table: [S, 5] int64, one row per sequence; columns: see :data:`LENGTH`.
        groups: [G, LANES] int64, a share of :func:`deal`: row numbers of ``table``; -1 marks an empty lane (no sequence).
        scratch: array of SCRATCH zeros, not shared with other threads.
        gamma: factor of the next value; unused without ``values``.
        decay: factor of the running advantage (gamma * lambda) or of the running return (gamma).
        streamed: whether stores to the outputs bypass the caches.
    """
    odd_mask = False
    rows = np.zeros((LANES, 5), np.int64)
    for group in range(groups.shape[0]):
        for lane in range(LANES):
            row = groups[group, lane]
            for column in range(5):
                rows[lane, column] = table[row, column] if row >= 0 else 0
        clear(scratch, STATE, 2 * LANES)
        longest = rows[0, LENGTH]
        for done in range(0, longest, BLOCK):
            width = min(BLOCK, (longest - done + 15) // 16 * 16)
            for lane in range(LANES):
                left = max(rows[lane, LENGTH] - done, 0)
                count = min(left, BLOCK)
                to = lane * PITCH + BLOCK - count
                empty = lane * PITCH + BLOCK - width
                clear(scratch, REWARD + empty, width - count)
                clear(scratch, MASK + empty, width - count)
                copy(scratch, REWARD + to, rewards, rows[lane, REWARD_START] + left - count, count)
                if values is not None:
                    clear(scratch, VALUE + empty, width - count)
                    copy(scratch, VALUE + to, values, rows[lane, VALUE_START] + left - count, count)
                odd_mask |= _take_mask(scratch, MASK + to, mask, rows[lane, MASK_START] + left - count, count)
            for token in range(BLOCK - 16, BLOCK - width - 1, -16):
                for lane in range(LANES):
                    # prefetches the same position in the next block
                    ahead = rows[lane, LENGTH] - done - 2 * BLOCK + token
                    if ahead >= 0:
                        prefetch(rewards, rows[lane, REWARD_START] + ahead)
                        if values is not None:
                            prefetch(values, rows[lane, VALUE_START] + ahead)
                        if mask is not None:
                            prefetch(mask, rows[lane, MASK_START] + ahead)
                            prefetch(mask, rows[lane, MASK_START] + ahead + 8)
                for tile in range(token + 8, token - 1, -8):
                    scan_tile(scratch, tile, gamma, decay, values)
            for lane in range(LANES):
                left = max(rows[lane, LENGTH] - done, 0)
                count = min(left, BLOCK)
                at = lane * PITCH + BLOCK - count
                to = rows[lane, OUT_START] + left - count
                put(first_out, to, scratch, OUT + at, count, streamed)
                if second_out is not None:
                    accumulate(scratch, OUT + at, VALUE + at, count)
                    put(second_out, to, scratch, OUT + at, count, streamed)
    fence()
    return odd_mask
