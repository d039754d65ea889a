"""Fixtures for the CPU engine: a small random model, and engines that are closed after the test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


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


@pytest.fixture
def engine_for() -> Iterator[Callable[..., Any]]:
    """``engine_for(model, **options)`` starts an engine that is closed after the test."""
    from rl_accel.lab.cpu_engine.engine import CPUEngine

    engines = []

    def start(model: Any, **options: Any) -> Any:
        engines.append(CPUEngine(model, **{"eos_token_ids": [4], "max_num_seqs": 8, "max_model_len": 512, **options}))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
