"""GAE and discounted returns on the CPU: compiled loops over the tokens of each sequence, one sequence after the other in a thread.

Results in float32 and float64 are bit-identical to :mod:`rl_accel.ops.scan.naive` for any number of threads, because no sequence is
cut into pieces, and float operations are neither fused nor reordered. Memory beyond the outputs does not grow with the number of
tokens, unless an argument must be copied first (half precision, or a last dimension that is not dense).
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
"""Number of tokens below which one thread is faster than several threads (measured on two cores: break-even at about 300,000).
Waking threads takes time."""
SHARES_PER_THREAD = 4
BLOCK = 1024
"""Number of tokens of a sequence whose mask is converted at a time."""


def scan(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Returns (advantages, returns), or (discounted returns,) if ``inputs`` has no value estimates (``inputs.values`` is None).

    The results have the dtype of the rewards. Half-precision inputs are computed in float32.
    """
    rewards, reward_starts = _flat(inputs.rewards, inputs)
    values, value_starts = (None, reward_starts) if inputs.values is None else _flat(inputs.values, inputs)
    mask, mask_starts = (None, reward_starts) if inputs.mask is None else _flat(inputs.mask, inputs)
    dtype, tokens = rewards.dtype, inputs.rewards.numel()
    # numpy requests huge pages from the operating system, torch does not; page faults would cost more than the scan
    outputs = [np.empty(tokens, dtype) for _ in range(1 if values is None else 2)]
    arrays = (rewards, values, mask, outputs[0], None if values is None else outputs[1])
    gamma, decay, one = (dtype.type(number) for number in (inputs.gamma, inputs.gamma * inputs.lam, 1))
    threads = inputs.num_threads or (1 if tokens < SMALL_TOKENS else default_threads())
    segments = np.array(inputs.segments(), dtype=np.int64).reshape(-1, 2)
    table = np.column_stack([reward_starts, value_starts, mask_starts, segments])
    longest_first = table[np.argsort(-table[:, -1], kind="stable")]
    odd_masks: list[bool] = []

    def work(share: Array) -> None:
        odd_masks.append(scan_sequences(*arrays, share, gamma, decay, one))

    shares = min(threads * SHARES_PER_THREAD, len(table))
    run([partial(work, longest_first[first::shares]) for first in range(shares)], threads)
    if any(odd_masks):
        raise ValueError(OUTSIDE)
    shape, wanted = inputs.rewards.shape, inputs.rewards.dtype
    return tuple(torch.from_numpy(out).view(shape).to(wanted) for out in outputs)


def _flat(tensor: torch.Tensor, inputs: Inputs) -> tuple[Array, Array]:
    """Returns the memory of ``tensor`` as one flat dense array, and the index of the first token of each sequence in this array.

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


@compiled
def scan_sequences(
    rewards: Array,
    values: Array | None,
    mask: Array | None,
    first_out: Array,
    second_out: Array | None,
    table: Array,
    gamma: Any,
    decay: Any,
    one: Any,
) -> bool:
    """Scans sequences and writes the results. Returns whether the mask holds a value outside [0, 1].

    With values, the scan computes GAE: advantages go to ``first_out``, returns to ``second_out``. Without values, discounted
    returns with discount ``decay`` go to ``first_out``.

    Args:
        rewards, values, mask: flat arrays, or None for values or mask.
        table: int64[S, 5], one row per sequence: index of its first token in the arrays of rewards, values, mask and outputs, and
            its number of tokens.
        gamma: factor of the next value; unused without values.
        decay: factor of the running advantage or of the running return.
        one: the number 1 in the dtype of the rewards, in which everything is computed.
    """
    odd_mask = False
    weights = np.ones(BLOCK, rewards.dtype)
    for row in range(len(table)):
        reward_at, value_at, mask_at = table[row, 0], table[row, 1], table[row, 2]
        out_at, tokens = table[row, 3], table[row, 4]
        last = next_value = one - one
        for first in range((tokens - 1) // BLOCK * BLOCK, -1, -BLOCK):
            count = min(BLOCK, tokens - first)
            r = rewards[reward_at + first : reward_at + first + count]
            out = first_out[out_at + first : out_at + first + count]
            if mask is not None:
                m = mask[mask_at + first : mask_at + first + count]
                for t in range(count):
                    odd_mask |= not (m[t] >= 0 and m[t] <= 1)
                    weights[t] = m[t]
            if values is not None:
                v = values[value_at + first : value_at + first + count]
                for t in range(count - 1, -1, -1):
                    weight = weights[t]
                    skip = one - weight
                    delta = r[t] + gamma * next_value - v[t]
                    candidate = delta + decay * last
                    next_value = v[t] * weight + skip * next_value
                    last = candidate * weight + skip * last
                    out[t] = last
                if second_out is not None:
                    sums = second_out[out_at + first : out_at + first + count]
                    for t in range(count):
                        sums[t] = out[t] + v[t]
            else:
                for t in range(count - 1, -1, -1):
                    weight = weights[t]
                    result = (r[t] + decay * last) * weight
                    out[t] = result
                    last = result + last * (one - weight)
    return odd_mask
