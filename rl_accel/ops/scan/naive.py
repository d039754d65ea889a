"""The token-by-token loops that every other kernel is held to. Slow, and obviously right.

The order of operations is that of verl 0.9.1 (``verl/trainer/ppo/core_algos.py``: ``compute_gae_advantage_return`` and
``compute_reinforce_plus_plus_outcome_advantage``), so that float32 results can be compared bit by bit. Arithmetic runs in
the dtype of the rewards; a mask is converted to it first, which for 0/1 masks changes nothing.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch

from rl_accel.ops.inputs import Inputs, check_mask_values


def gae(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns, shaped and typed like the rewards. See :func:`rl_accel.ops.gae`."""
    check_mask_values(inputs.mask)
    assert inputs.values is not None
    advantages = torch.empty_like(inputs.rewards, memory_format=torch.contiguous_format)
    for where, (rewards, values, mask) in _rows(inputs.rewards, inputs.values, inputs.mask, inputs.offsets):
        advantages[where] = gae_rows(rewards, values, mask, inputs.gamma, inputs.lam).view_as(advantages[where])
    return advantages, advantages + inputs.values


def discounted_returns(inputs: Inputs) -> torch.Tensor:
    """Return discounted returns, shaped and typed like the rewards. See :func:`rl_accel.ops.discounted_returns`."""
    check_mask_values(inputs.mask)
    returns = torch.empty_like(inputs.rewards, memory_format=torch.contiguous_format)
    for where, (rewards, _, mask) in _rows(inputs.rewards, inputs.rewards, inputs.mask, inputs.offsets):
        returns[where] = returns_rows(rewards, mask, inputs.gamma).view_as(returns[where])
    return returns


def gae_rows(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float) -> torch.Tensor:
    """Advantages of [B, T] tensors. At mask 0 the next value and the running advantage are carried through unchanged."""
    next_values = torch.zeros_like(rewards[:, :0].sum(1))
    last = torch.zeros_like(next_values)
    reversed_advantages = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        candidate = delta + gamma * lam * last
        next_values = values[:, t] * mask[:, t] + (1 - mask[:, t]) * next_values
        last = candidate * mask[:, t] + (1 - mask[:, t]) * last
        reversed_advantages.append(last)
    return torch.stack(reversed_advantages[::-1], dim=1) if reversed_advantages else torch.empty_like(rewards)


def returns_rows(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """Discounted returns of [B, T] tensors: 0 at mask 0, where the running value is carried through unchanged."""
    running = torch.zeros_like(rewards[:, :0].sum(1))
    reversed_returns = []
    for t in reversed(range(rewards.shape[1])):
        candidate = rewards[:, t] + gamma * running
        reversed_returns.append(candidate * mask[:, t])
        running = candidate * mask[:, t] + running * (1 - mask[:, t])
    return torch.stack(reversed_returns[::-1], dim=1) if reversed_returns else torch.empty_like(rewards)


def _rows(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, offsets: tuple[int, ...] | None
) -> Iterator[tuple[slice, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    mask = torch.ones_like(rewards) if mask is None else mask.to(rewards.dtype)
    if offsets is None:
        yield slice(None), (rewards, values, mask)
        return
    for first, last in pairwise(offsets):
        where = slice(first, last)
        yield where, (rewards[None, where], values[None, where], mask[None, where])
