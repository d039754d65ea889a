# mypy: allow-untyped-decorators
"""The compiled part of the CPU scan: eight sequences side by side in one vector register.

A plain loop over tokens waits some 20 cycles a token, because each step needs the result of the one before. Eight
sequences in the lanes of a vector share that wait. Tensors hold one sequence after the other, so a tile of 8 sequences x 8
tokens is transposed in registers, walked back in time, and transposed again. numba offers neither the transposition nor
stores that bypass the caches; both are a few lines of LLVM here. Nothing is contracted or reordered: each lane does the
same float operations in the same order as the loop.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic, overload

from rl_accel.ops.compile_numba import compiled

Array = npt.NDArray[Any]

LANES = 8
BLOCK = 2048
"""Tokens of each sequence held in scratch memory at a time: long runs through main memory, all of it in a level-2 cache."""
PITCH = BLOCK + 16
"""Scratch elements from lane to lane; off a power of two, so that the lanes do not share cache sets."""
PLANE = LANES * PITCH
REWARD, VALUE, MASK = 0, PLANE, 2 * PLANE
OUT = REWARD
"""Results take the place of the rewards, which a tile has read by then: less scratch leaves more cache to what comes next."""
STATE = 3 * PLANE
"""Where the state is kept: the next values of all lanes, then the running advantages (or returns) of all lanes."""
SCRATCH = STATE + 2 * LANES

_INDEX = ir.IntType(32)


def _llvm_float(array: Any) -> Any:
    return ir.FloatType() if array.dtype == types.float32 else ir.DoubleType()


def _shuffle(builder: Any, x: Any, y: Any, picks: list[int]) -> Any:
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_INDEX, len(picks)), picks))


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose 8 vectors of 8: pairs, then pairs of pairs inside each half, then the halves."""
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
    """Loads and stores of the 8 x 8 tile that begins at token ``offset`` of the scratch memory."""

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

    def ones(self) -> Any:
        return ir.Constant(self.vector, [1.0] * LANES)


Codegen = Callable[[Any, Any, Any, Any], Any]


def _gae_tile(typing_context: Any, scratch: Any, offset: Any, gamma: Any, decay: Any) -> tuple[Any, Codegen]:
    """GAE over the tile, from its last token to its first; reads and leaves the state."""

    def build(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        tile = _Tile(context, b, signature.args[0], arguments[0], arguments[1])
        gamma, decay, ones = tile.splat(arguments[2]), tile.splat(arguments[3]), tile.ones()
        rewards, values, mask = tile.load(REWARD), tile.load(VALUE), tile.load(MASK)
        next_value, last = tile.load_state(0), tile.load_state(1)
        advantages: list[Any] = [None] * LANES
        for t in reversed(range(LANES)):
            skip = b.fsub(ones, mask[t])
            delta = b.fsub(b.fadd(rewards[t], b.fmul(gamma, next_value)), values[t])
            candidate = b.fadd(delta, b.fmul(decay, last))
            next_value = b.fadd(b.fmul(values[t], mask[t]), b.fmul(skip, next_value))
            last = b.fadd(b.fmul(candidate, mask[t]), b.fmul(skip, last))
            advantages[t] = last
        tile.store_state(0, next_value)
        tile.store_state(1, last)
        tile.store(OUT, advantages)
        return context.get_dummy_value()

    return types.void(scratch, types.intp, gamma, decay), build


def _returns_tile(typing_context: Any, scratch: Any, offset: Any, gamma: Any) -> tuple[Any, Codegen]:
    """Discounted returns over the tile, from its last token to its first; reads and leaves the running value."""

    def build(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        tile = _Tile(context, b, signature.args[0], arguments[0], arguments[1])
        gamma, ones = tile.splat(arguments[2]), tile.ones()
        rewards, mask = tile.load(REWARD), tile.load(MASK)
        running = tile.load_state(1)
        returns: list[Any] = [None] * LANES
        for t in reversed(range(LANES)):
            candidate = b.fadd(rewards[t], b.fmul(gamma, running))
            returns[t] = b.fmul(candidate, mask[t])
            running = b.fadd(returns[t], b.fmul(running, b.fsub(ones, mask[t])))
        tile.store_state(1, running)
        tile.store(OUT, returns)
        return context.get_dummy_value()

    return types.void(scratch, types.intp, gamma), build


def _stream(typing_context: Any, target: Any, to: Any, source: Any, at: Any) -> tuple[Any, Codegen]:
    """target[to:to+8] = source[at:at+8], past the caches; ``to`` must be a multiple of 8 of a 64-byte aligned array."""

    def build(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(_llvm_float(signature.args[0]), LANES)
        size = signature.args[0].dtype.bitwidth // 8
        loaded = b.load(_address(context, b, signature.args[2], arguments[2], arguments[3], vector), align=size)
        target_at = _address(context, b, signature.args[0], arguments[0], arguments[1], vector)
        store = b.store(loaded, target_at, align=size * LANES)
        store.set_metadata("nontemporal", b.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(target, types.intp, source, types.intp), build


def _prefetch(typing_context: Any, array: Any, index: Any) -> tuple[Any, Codegen]:
    """Ask for the cache line of array[index], which may lie outside: a prefetch never faults."""

    def build(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        at = _address(context, b, signature.args[0], arguments[0], arguments[1], ir.IntType(8))
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [at.type, number, number, number])
        function = b.module.declare_intrinsic("llvm.prefetch", [at.type], kind)
        read, into_level_2, data = (ir.Constant(number, n) for n in (0, 2, 1))
        b.call(function, [at, read, into_level_2, data])
        return context.get_dummy_value()

    return types.void(array, types.intp), build


def _fence(typing_context: Any) -> tuple[Any, Codegen]:
    """Make streamed stores visible to other threads before whatever follows."""

    def build(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        b.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), build


gae_tile = intrinsic(_gae_tile)
returns_tile = intrinsic(_returns_tile)
stream = intrinsic(_stream)
prefetch = intrinsic(_prefetch)
fence = intrinsic(_fence)


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
    """Scan the groups of a :class:`rl_accel.ops.scan.numba.Share`; tell whether the mask holds a value outside [0, 1].

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
    """Return (p, d, c) of :func:`rl_accel.ops.scan.numba.compose` for the ``length`` tokens from ``first`` on."""
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
