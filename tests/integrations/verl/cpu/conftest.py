"""A model that is built in memory, small enough for a CPU and random enough that its tokens differ in probability."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """``make_model(seed=0, **config)`` builds a Qwen2 of two layers with 64 tokens, of which 4 ends a response."""
    transformers = pytest.importorskip("transformers")

    def make(seed: int = 0, **changes: Any) -> Any:
        config = transformers.Qwen2Config(
            **{
                "vocab_size": 64,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 1024,
                "initializer_range": 0.2,
                "eos_token_id": 4,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "attn_implementation": "sdpa",
                **changes,
            }
        )
        torch.manual_seed(seed)
        return transformers.Qwen2ForCausalLM(config).eval()

    return make


@pytest.fixture
def model(make_model: Callable[..., Any]) -> Any:
    return make_model()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The engine is run on one thread in production too; and tests share the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def engine_for() -> Iterator[Callable[..., Any]]:
    """``engine_for(model, **options)`` starts an engine that ends with the test."""
    from rl_accel.integrations.verl.cpu.engine import Engine

    engines = []

    def start(model: Any, **options: Any) -> Any:
        engines.append(Engine(model, **{"eos_token_ids": [4], "max_num_seqs": 8, "max_model_len": 512, **options}))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
