# mypy: allow-untyped-decorators
"""GAE and discounted returns on the CPU: each sequence is walked from its last token to its first, as in the naive loop.

Results in float32 and float64 are bit-identical to :mod:`rl_accel.ops.scan.naive` for any number of threads, because no sequence is
cut into pieces, and operations are neither fused nor reordered. Memory beyond the outputs does not grow with the number of tokens,
unless an argument must be copied first (half precision, or a last dimension that is not dense).

A step of the walk needs the result of the previous one, and a processor core waits some 15 cycles for it. A thread therefore walks
two sequences side by side. More than two gain nothing: the time is then that of reading and writing memory.
"""

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rl_accel.ops.cpu import compiled, run
from rl_accel.ops.inputs import OUTSIDE, Inputs, default_threads

Array = npt.NDArray[Any]

SMALL_TOKENS = 1 << 18
"""Number of tokens below which one thread does all the work. On two cores, one thread was faster up to about 300,000 tokens."""
SHARES_PER_THREAD = 4
"""Number of shares of the sequences for each thread. More than one lets a fast thread process more."""


def scan(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Computes GAE, or discounted returns if ``inputs`` has no values. Half-precision inputs are computed in float32."""
    arguments = [inputs.rewards] if inputs.values is None else [inputs.rewards, inputs.values]
    sources = [_flat(tensor, inputs) for tensor in arguments]
    segments = np.array(inputs.segments(), dtype=np.int64).reshape(-1, 2)
    out_starts = segments[:, 0]
    lengths = segments[:, 1]
    tokens = inputs.rewards.numel()
    if inputs.mask is None:
        sources.append((np.broadcast_to(np.uint8(1), tokens), out_starts))
    else:
        sources.append(_flat(inputs.mask, inputs))
    starts = np.column_stack([*(first_tokens for _, first_tokens in sources), out_starts])
    dtype = sources[0][0].dtype
    # numpy requests huge pages from the operating system, torch does not. Without them, the page faults of large outputs would cost
    # more than the whole scan.
    outputs = [np.empty(tokens, dtype) for _ in arguments]
    arrays = (*(array for array, _ in sources), *outputs)
    rates = (dtype.type(inputs.gamma), dtype.type(inputs.gamma * inputs.lam), dtype.type(1))
    kernel = returns_rows if inputs.values is None else gae_rows
    threads = inputs.num_threads or (1 if tokens < SMALL_TOKENS else default_threads())
    are_masks_right: list[bool] = []

    def work(rows: Array) -> None:
        are_masks_right.append(kernel(arrays, rates, rows, starts, lengths))

    run([partial(work, rows) for rows in shares(lengths, threads)], threads)
    if not all(are_masks_right):
        raise ValueError(OUTSIDE)
    return tuple(torch.from_numpy(out).view(inputs.rewards.shape).to(inputs.rewards.dtype) for out in outputs)


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


def shares(lengths: Array, threads: int) -> list[Array]:
    """Divides the sequences with ``lengths`` [S] into shares of about equal work, a few shares for each thread.

    A share is an array of indices of sequences, the longest first, so that neighbours have about the same length.
    """
    rows = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    pairs = len(rows) // 2
    count = min(max(threads, min(pairs, threads * SHARES_PER_THREAD)), len(rows))
    return [rows[first::count].copy() for first in range(count)]


@compiled
def gae_rows(arrays: Any, rates: Any, rows: Array, starts: Array, lengths: Array) -> bool:
    """Writes the advantages and returns of some sequences, two side by side. Returns False if a mask value is outside [0, 1].

    Args:
        arrays: flat arrays of rewards, values, mask, advantages and returns.
        rates: gamma, gamma * lambda and 1, in the dtype of the rewards.
        rows: indices of the sequences, the longest first: a share of :func:`shares`.
        starts: [S, 4] index of each sequence's first token in the rewards, the values, the mask and the outputs.
        lengths: [S] number of tokens of each sequence.
    """
    zero = arrays[0].dtype.type(0)
    is_mask_right = True
    for index in range(0, len(rows), 2):
        long = _gae_sequence(arrays, starts[rows[index]], lengths[rows[index]])
        other = rows[min(index + 1, len(rows) - 1)]
        short_length = lengths[other] if index + 1 < len(rows) else 0
        short = _gae_sequence(arrays, starts[other], short_length)
        long_state = (zero, zero)
        short_state = (zero, zero)
        for t in range(lengths[rows[index]] - 1, short_length - 1, -1):
            long_state, is_right = _gae_token(long, t, long_state, rates)
            is_mask_right &= is_right
        for t in range(short_length - 1, -1, -1):
            long_state, is_right = _gae_token(long, t, long_state, rates)
            is_mask_right &= is_right
            short_state, is_right = _gae_token(short, t, short_state, rates)
            is_mask_right &= is_right
    return is_mask_right


@compiled
def _gae_sequence(arrays: Any, starts: Array, length: int) -> Any:
    """Returns the parts of ``arrays`` (see :func:`gae_rows`) that hold one sequence."""
    rewards, values, mask, advantages, returns = arrays
    return (
        rewards[starts[0] : starts[0] + length],
        values[starts[1] : starts[1] + length],
        mask[starts[2] : starts[2] + length],
        advantages[starts[3] : starts[3] + length],
        returns[starts[3] : starts[3] + length],
    )


@compiled
def _gae_token(sequence: Any, t: int, state: Any, rates: Any) -> Any:
    """Writes the advantage and the return of token ``t``, computed in the operation order of the naive loop.

    ``state``: next value and advantage of the next token. Returns this state for the token before, and whether the mask is right.
    """
    rewards, values, mask, advantages, returns = sequence
    gamma, decay, one = rates
    next_value, advantage = state
    weight = rewards.dtype.type(mask[t])
    skip = one - weight
    delta = rewards[t] + gamma * next_value - values[t]
    candidate = delta + decay * advantage
    next_value = values[t] * weight + skip * next_value
    advantage = candidate * weight + skip * advantage
    advantages[t] = advantage
    returns[t] = advantage + values[t]
    return (next_value, advantage), (mask[t] >= 0) & (mask[t] <= 1)


@compiled
def returns_rows(arrays: Any, rates: Any, rows: Array, starts: Array, lengths: Array) -> bool:
    """Writes the discounted returns of some sequences. Returns False if a mask value is outside [0, 1].

    Arguments: as for :func:`gae_rows`. ``arrays`` are rewards, mask and returns, and ``starts`` is [S, 3].
    """
    rewards, mask, returns = arrays
    gamma, _, one = rates
    is_mask_right = True
    for row in rows:
        reward_start, mask_start, out_start = starts[row]
        following = rewards.dtype.type(0)
        for t in range(lengths[row] - 1, -1, -1):
            weight = rewards.dtype.type(mask[mask_start + t])
            kept = (rewards[reward_start + t] + gamma * following) * weight
            following = kept + following * (one - weight)
            returns[out_start + t] = kept
            is_mask_right &= (mask[mask_start + t] >= 0) & (mask[mask_start + t] <= 1)
    return is_mask_right
