"""Fixtures for the CPU platform: its engine's model and one thread, and configurations of verl."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rl_accel.patches.verl.verl_run import VerlRun


@pytest.fixture
def configured(monkeypatch):
    """``configured(*overrides)`` returns the configuration that ``python -m verl.trainer.main_ppo`` composes from ``overrides``."""
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return lambda *overrides: VerlRun.compose("verl.trainer.main_ppo", overrides).config


@pytest.fixture
def model(make_model: Callable[..., Any]) -> Any:
    return make_model()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Limits torch to one thread, as in real runs of the engine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
