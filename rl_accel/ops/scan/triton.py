# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""GAE and discounted returns on the GPU. Each token is read once, and each result is written once.

One GPU program walks a sequence block by block, from the last token to the first. The state of the recurrence stays in registers
while the next block is loaded. Each token is a map from the state (next value, running result) to the state one token earlier; an
associative scan composes the maps of a block.

Half precision is computed in float32, float64 in float64. Composed maps are wrong for NaN and inf: inf times a 0 of a map is NaN
where the token-by-token loop has inf. A second launch therefore recomputes sequences with NaN or inf token by token. This launch
reads only one number of each other sequence.

Set TRITON_INTERPRET=1 before the import to run the scan on CPU tensors.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from rl_accel.ops.inputs import Inputs

INTERPRETED = bool(triton.knobs.runtime.interpret) if hasattr(triton, "knobs") else False
BLOCK = 2048
WARPS = 8
"""Number of warps (groups of 32 GPU threads) that process a block of BLOCK tokens. Both numbers are chosen by hand."""

jit: Any = triton.jit


def scan(inputs: Inputs, *, block: int = BLOCK) -> tuple[torch.Tensor, ...]:
    """Computes GAE, or discounted returns if ``inputs`` has no values. ``block``: tokens processed at a time, a power of two."""
    rewards = _dense(inputs.rewards)
    outputs = [
        torch.empty_like(rewards, memory_format=torch.contiguous_format)
        for _ in range(1 if inputs.values is None else 2)
    ]
    if rewards.numel() == 0:
        return tuple(outputs)
    pointers = [rewards if tensor is None else _dense(tensor) for tensor in (rewards, inputs.values, inputs.mask)]
    pitches = [tensor.stride(0) if tensor.dim() == 2 else 0 for tensor in pointers]
    packed = inputs.offsets is not None
    segments = inputs.segments()
    offsets = torch.tensor(inputs.offsets, device=rewards.device) if packed else rewards
    longest = max(length for _, length in segments)
    wide = rewards.dtype is torch.float64
    rates = (*_split(inputs.gamma), *_split(inputs.gamma * inputs.lam))
    for repair in (False, True):
        _scan_kernel[(len(segments),)](
            *pointers,
            *pitches,
            outputs[0],
            outputs[-1],
            offsets,
            longest,
            *rates,
            PACKED=packed,
            MASKED=inputs.mask is not None,
            GAE=inputs.values is not None,
            ACC=tl.float64 if wide else tl.float32,
            REPAIR=repair,
            BLOCK=block,
            num_warps=1 if repair else WARPS,
        )
    return tuple(outputs)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _split(rate: float) -> tuple[float, float]:
    """Returns two numbers with the sum ``rate``: its float32 value, and what that lacks. Kernels round Python floats to float32."""
    high = float(torch.tensor(rate, dtype=torch.float32))
    return high, rate - high


@jit
def _compose(a1, b1, c1, d1, e1, a2, b2, c2, d2, e2):
    """Returns the map that applies map 1, then map 2. A map is the step over one token (see :func:`_token_map`) or several tokens.

    Map (a, b, c, d, e) takes the state (n, x) to (a n + b, c x + d n + e).
    """
    return a2 * a1, a2 * b1 + b2, c2 * c1, c2 * d1 + d2 * a1, c2 * e1 + d2 * b1 + e2


@jit
def _token_map(reward, value, m, gamma, decay, GAE: tl.constexpr):
    """Returns the map (see ``_compose``) from the state at the next token to the state at this token. ``m``: mask of this token.

    The state is the pair (value, advantage) for GAE; a token with mask 0 does not change it. For discounted returns, the state is
    (running return, result of the token); a token with mask 0 keeps the running return, but has the result 0.
    """
    keep = 1 - m
    if GAE:
        return keep, value * m, decay * m + keep, gamma * m, (reward - value) * m
    else:
        return gamma * m + keep, reward * m, 0 * m, gamma * m, reward * m


@jit
def _load(rewards, values, mask, token, inside, MASKED: tl.constexpr, GAE: tl.constexpr, ACC: tl.constexpr):
    reward = tl.load(rewards + token, mask=inside, other=0).to(ACC)
    value = reward
    if GAE:
        value = tl.load(values + token, mask=inside, other=0).to(ACC)
    if MASKED:
        m = tl.load(mask + token, mask=inside, other=0).to(ACC)
    else:
        m = inside.to(ACC)
    return reward, value, m


@jit
def _at(x, where):
    return tl.sum(tl.where(where, x, 0), axis=0)


@jit
def _scan_kernel(
    rewards,
    values,
    mask,
    reward_pitch,
    value_pitch,
    mask_pitch,
    first_out,
    second_out,
    offsets,
    longest,
    gamma_high,
    gamma_low,
    decay_high,
    decay_low,
    PACKED: tl.constexpr,
    MASKED: tl.constexpr,
    GAE: tl.constexpr,
    ACC: tl.constexpr,
    REPAIR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the results of one sequence in blocks. With ``REPAIR``, recomputes a sequence with NaN or inf token by token."""
    row = tl.program_id(0).to(tl.int64)
    gamma = tl.full((), gamma_high, ACC) + tl.full((), gamma_low, ACC)
    decay = tl.full((), decay_high, ACC) + tl.full((), decay_low, ACC)
    if PACKED:
        first = tl.load(offsets + row)
        length = tl.load(offsets + row + 1) - first
        rewards = rewards + first
        values = values + first
        mask = mask + first
    else:
        first = row * longest
        length = row * 0 + longest  # an int64 tensor: triton makes a ``longest`` of 1 a constant
        rewards = rewards + row * reward_pitch
        values = values + row * value_pitch
        mask = mask + row * mask_pitch
    state = tl.full((), 0, ACC)
    result = tl.full((), 0, ACC)
    if REPAIR:
        # NaN and inf propagate through every later step, up to the first token of the sequence
        probe = tl.load(first_out + first, mask=length > 0, other=0).to(ACC)
        tokens = tl.where(probe - probe == 0, 0, length)
        for back in range(tokens):
            token = length - 1 - back
            reward, value, m = _load(rewards, values, mask, token, token >= 0, MASKED, GAE, ACC)
            if GAE:
                candidate = reward + gamma * state - value + decay * result
                state = value * m + (1 - m) * state
                result = candidate * m + (1 - m) * result
                tl.store(second_out + first + token, result + value)
            else:
                result = (reward + gamma * state) * m
                state = result + state * (1 - m)
            tl.store(first_out + first + token, result)
    else:
        blocks = tl.cdiv(length, BLOCK)
        lane = tl.arange(0, BLOCK)
        earliest = lane == 0
        # blocks are counted from the start of the sequence, where memory is aligned, so that loads and stores can be wide
        token = (blocks - 1) * BLOCK + lane
        reward, value, m = _load(rewards, values, mask, token, (token >= 0) & (token < length), MASKED, GAE, ACC)
        for _ in range(blocks):
            ahead = token - BLOCK
            next_reward, next_value, next_m = _load(rewards, values, mask, ahead, ahead >= 0, MASKED, GAE, ACC)
            inside = token < length
            maps = _token_map(reward, value, m, gamma, decay, GAE)
            ta, tb, tc, td, te = tl.associative_scan(maps, 0, _compose, reverse=True)
            results = tc * result + td * state + te
            states = ta * state + tb
            tl.store(first_out + first + token, results, mask=inside)
            if GAE:
                tl.store(second_out + first + token, results + value, mask=inside)
            state = _at(states, earliest)
            result = _at(results, earliest)
            token = ahead
            reward = next_reward
            value = next_value
            m = next_m
