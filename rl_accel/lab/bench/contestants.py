"""The ways to compute GAE that the benchmark sets side by side, the published ones written anew from their descriptions."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rl_accel.ops import gae

Result = tuple[torch.Tensor, torch.Tensor]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, float, float]


@dataclass(frozen=True)
class Contestant:
    """One way. ``masked`` tells whether it honours verl's mask; ``quadratic`` whether it needs O(T^2) memory or work."""

    name: str
    run: Callable[[Inputs], Result]
    masked: bool
    quadratic: bool = False
    exact: bool = False
    """Promised to equal verl's loop bit for bit."""


def _ours(backend: str) -> Callable[[Inputs], Result]:
    return lambda inputs: gae(*inputs, backend=backend)


def _deltas(rewards: torch.Tensor, values: torch.Tensor, gamma: float) -> torch.Tensor:
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    return rewards + gamma * following - values


def slime_chunk(inputs: Inputs, chunk: int = 128) -> Result:
    """slime's chunk scan (its pull request 850): reversed time, a matrix product a chunk, then a serial pass over chunks."""
    rewards, values, _, gamma, lam = inputs
    rows, tokens = rewards.shape
    decay = gamma * lam
    padded = torch.nn.functional.pad(_deltas(rewards, values, gamma).flip(1), (0, -tokens % chunk))
    blocks = padded.view(rows, -1, chunk)
    steps = torch.arange(chunk, device=rewards.device)
    powers = torch.tensor(decay, device=rewards.device, dtype=rewards.dtype) ** (steps[None, :] - steps[:, None])
    local = blocks @ torch.triu(powers)
    carry = decay ** (steps + 1.0).to(rewards.dtype)
    out = torch.empty_like(local)
    last = rewards.new_zeros(rows)
    for index in range(blocks.shape[1]):
        out[:, index] = local[:, index] + carry * last[:, None]
        last = out[:, index, -1]
    advantages = out.view(rows, -1)[:, :tokens].flip(1)
    return advantages, advantages + values


def matrix(inputs: Inputs) -> Result:
    """All weights decay^(t - s) as one [T, T] matrix."""
    rewards, values, _, gamma, lam = inputs
    steps = torch.arange(rewards.shape[1], device=rewards.device)
    exponents = (steps[:, None] - steps[None, :]).clamp(min=0).to(rewards.dtype)
    weights = torch.tril((gamma * lam) ** exponents)
    advantages = _deltas(rewards, values, gamma) @ weights
    return advantages, advantages + values


def convolution(inputs: Inputs) -> Result:
    """The same weights as a convolution kernel of length T, the way torchrl's vectorised estimator does it."""
    rewards, values, _, gamma, lam = inputs
    tokens = rewards.shape[1]
    kernel = (gamma * lam) ** torch.arange(tokens, device=rewards.device, dtype=rewards.dtype)
    padded = torch.nn.functional.pad(_deltas(rewards, values, gamma)[:, None], (0, tokens - 1))
    advantages = torch.nn.functional.conv1d(padded, kernel[None, None])[:, 0]
    return advantages, advantages + values


LOOP, CHUNK_128, OURS = "verl's loop", "slime chunk 128", "rl-accel"


def contestants(device: str) -> list[Contestant]:
    """Return the contestants for tensors on ``device``, verl's loop first and ours second."""
    fastest = "triton" if device == "cuda" else "numba"
    return [
        Contestant(LOOP, _ours("naive"), masked=True, exact=True),
        Contestant(f"{OURS} {fastest}", _ours(fastest), masked=True, exact=fastest == "numba"),
        Contestant(f"{OURS} chunk", _ours("chunk"), masked=True),
        Contestant(CHUNK_128, slime_chunk, masked=False),
        Contestant("convolution", convolution, masked=False, quadratic=True),
        Contestant("matrix", matrix, masked=False, quadratic=True),
    ]
