"""Token-by-token loops for GAE and discounted returns: the reference for every other kernel, slow and obviously right.

The order of operations is that of verl 0.9.1 (``verl/trainer/ppo/core_algos.py``: ``compute_gae_advantage_return`` and
``compute_reinforce_plus_plus_outcome_advantage``), so that float32 results can be compared bit by bit. Arithmetic runs in the dtype
of the rewards. The mask is first converted to this dtype, which changes nothing for masks of 0 and 1.
"""

from itertools import pairwise
from typing import Any

import torch

from rl_accel.ops.inputs import Inputs


def scan(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    rewards = inputs.rewards
    values = inputs.values
    mask = torch.ones_like(rewards) if inputs.mask is None else inputs.mask.to(rewards.dtype)
    results = torch.empty_like(rewards, memory_format=torch.contiguous_format)
    sequences: list[Any] = [...]
    if inputs.offsets is not None:
        sequences = [(None, slice(first, last)) for first, last in pairwise(inputs.offsets)]
    for rows in sequences:
        if values is None:
            results[rows] = returns_rows(rewards[rows], mask[rows], inputs.gamma)
        else:
            results[rows] = gae_rows(rewards[rows], values[rows], mask[rows], inputs.gamma, inputs.lam)
    return (results,) if values is None else (results, results + values)


def gae_rows(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float) -> torch.Tensor:
    """Returns the GAE advantages of [B, T] tensors. A token with mask 0 gets the advantage of the token after it."""
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
    """Returns the discounted returns of [B, T] tensors. Tokens with mask 0 get 0 and do not change the returns before them."""
    running = torch.zeros_like(rewards[:, :0].sum(1))
    reversed_returns = []
    for t in reversed(range(rewards.shape[1])):
        candidate = rewards[:, t] + gamma * running
        reversed_returns.append(candidate * mask[:, t])
        running = candidate * mask[:, t] + running * (1 - mask[:, t])
    return torch.stack(reversed_returns[::-1], dim=1) if reversed_returns else torch.empty_like(rewards)
