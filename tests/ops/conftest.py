"""Random inputs for the advantage kernels, and how to compare results."""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch


def make_case(seed: int, *, most_rows: int = 40, most_tokens: int = 60) -> SimpleNamespace:
    """Arguments of ``gae``, with at least two tokens: responses of uneven length, observation spans, padding on both sides."""
    random = np.random.RandomState(seed)
    rows, tokens = random.randint(1, most_rows), random.randint(2, most_tokens)
    if seed % 80 == 0:  # more than the kernels hold at a time
        tokens += 2048
    scale = 10.0 ** random.choice([-20, -3, 0, 0, 0, 3, 20])
    rewards, values = (torch.from_numpy(random.randn(rows, tokens) * scale).float() for _ in range(2))
    if seed % 3 == 0:
        rewards[:, :-1] = 0
    places = torch.arange(tokens)
    mask = places < torch.from_numpy(random.randint(0, tokens + 1, (rows, 1)))
    if seed % 2:
        mask &= torch.from_numpy(random.rand(rows, tokens)) < 0.7
    if seed % 5 == 0:
        mask = mask.flip(1)
    mask[0, :2] = True
    mask_type = torch.float32 if seed % 4 == 3 else torch.int64
    gamma, lam = random.choice([0.0, 0.5, 0.9, 0.99, 1.0]), random.choice([0.0, 0.5, 0.95, 1.0])
    mask = mask.to(mask_type)
    if seed % 7 == 0:  # as verl cuts the response out of a mask over prompt and response
        mask = torch.nn.functional.pad(mask, (5, 0), value=1)[:, 5:]
    if seed % 11 == 0:
        rewards = rewards.t().contiguous().t()
    return SimpleNamespace(rewards=rewards, values=values, mask=mask, gamma=float(gamma), lam=float(lam))


@pytest.fixture(scope="session")
def case() -> Callable[..., SimpleNamespace]:
    return make_case


@pytest.fixture(scope="session")
def core_algos() -> Any:
    """verl's advantage functions, whose bits ours must have."""
    return importlib.import_module("verl.trainer.ppo.core_algos")
