import json
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rl_accel.errors import ConfigError
from rl_accel.features import TpReplanFlags
from rl_accel.parallel.model_memory import KNOWN_FAMILIES, possible_sizes, read_memory

QWEN3_8B = json.loads((Path(__file__).parent / "qwen3_8b.json").read_text())
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
SMALL = {"num_hidden_layers": 3, "vocab_size": 8000, "hidden_size": 512, **HEADS}
up_to_8 = st.integers(1, 8)


@pytest.mark.parametrize("family", KNOWN_FAMILIES)
def test_cache_bytes_are_those_of_the_real_cache(family):
    config = transformers.AutoConfig.for_model(family, **SMALL, intermediate_size=96, moe_intermediate_size=64)
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(config)
        cache = model(torch.zeros(1, 5, dtype=torch.long), use_cache=True).past_key_values
    values = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    memory = read_memory(config.to_dict())
    assert memory.kv_bytes_per_token(1, bytes_per_value=2) * 5 == values * 2
    assert memory.kv_parameters == 2 * 3 * 512 * 2 * memory.head_dim


def test_a_published_size_and_shares_of_weights_and_cache():
    shape = read_memory(QWEN3_8B)
    assert shape.parameters == pytest.approx(8.19e9, rel=0.01)
    assert shape.kv_bytes_per_token(1) == 147_456
    assert shape.weight_bytes(8) * 8 == shape.weight_bytes(1) == shape.parameters * 2
    assert shape.weight_bytes(16) * 16 == shape.weight_bytes(1) + 2 * shape.kv_parameters, "each has a head"
    assert shape.kv_bytes_per_token(4) * 4 == shape.kv_bytes_per_token(1)
    assert shape.kv_bytes_per_token(16) == shape.kv_bytes_per_token(8)


def sizes_of(world_size=8, gpus_per_node=8, model=QWEN3_8B, max_tokens=32768, memory_share=0.9, **flags):
    """Each size with what stands against it."""
    where = {"world_size": world_size, "gpus_per_node": gpus_per_node}
    return possible_sizes(
        TpReplanFlags(**flags), model=model, max_tokens=max_tokens, memory_share=memory_share, **where
    )


def possible(**arguments):
    return tuple(size for size, obstacles in sizes_of(**arguments).items() if not obstacles)


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ({"min_tp": 2, "max_tp": 4}, (2, 4)),
        ({"model": {**QWEN3_8B, "intermediate_size": 12290}}, (1, 2)),
        ({"model": {}, "world_size": 6}, (1, 2, 3, 6)),
        ({"model": {"model_type": "other", "num_attention_heads": 12}}, (1, 2, 4)),
        ({"model": {"model_type": "other", "num_attention_heads": [12, 8]}}, (1, 2, 4, 8)),
        ({"model": {"model_type": "qwen2_vl", "text_config": {"num_attention_heads": 12}}}, (1, 2, 4)),
        ({"memory_gb": 36.0, "memory_share": 0.95}, (1, 2, 4, 8)),  # 15.3 GiB of weights and 4 x 4.5 GiB of cache
        ({"memory_gb": 36.0}, (2, 4, 8)),
    ],
)
def test_possible_sizes(arguments, sizes):
    assert possible(**arguments) == sizes


@pytest.mark.parametrize("model", [{}, {"model_type": "other"}, {**QWEN3_8B, "quantization_config": {"bits": 8}}])
def test_a_memory_that_cannot_be_checked_is_refused(model):
    with pytest.raises(
        ConfigError, match=r"tp_replan\.memory_gb wants an unquantised model of llama, .*, found another"
    ):
        sizes_of(model=model, memory_gb=80.0)


def test_sizes_that_are_not_possible_have_their_reasons():
    assert (
        sizes_of(memory_gb=20.0)[1]
        == "needs 15.3 GiB a GPU for weights and 18.0 for 4 sequences of cache, and has 18.0"
    )
    with pytest.raises(ConfigError, match="no tensor-parallel size is possible on 12 GPUs") as error:
        sizes_of(world_size=12, gpus_per_node=4, min_tp=4, memory_gb=8.0)
    reasons = dict(part.split(": ", 1) for part in str(error.value).split("12 GPUs: ")[1].split("; "))
    words = ["min_tp = 4", "min_tp = 4", "32 attention heads", "has 7.2", "the 4 GPUs of a node", "4 GPUs of a node"]
    for size, part in zip((1, 2, 3, 4, 6, 12), words, strict=True):
        assert part in reasons.pop(f"TP {size}")
    assert reasons == {}


@settings(deadline=None, max_examples=30)
@given(world=st.integers(1, 64), node=st.integers(1, 16), kv_heads=up_to_8, group=up_to_8, memory=st.floats(4, 80))
def test_exactly_the_sizes_that_fit_are_possible(world, node, kv_heads, group, memory):
    model = {**QWEN3_8B, "num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads}

    def fits(tp):
        place = world % tp == 0 and tp <= node and (world <= node or node % tp == 0)
        whole = (kv_heads * group) % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0) and 12288 % tp == 0
        values = 4 * 1000 * 2 * 36 * -(-kv_heads // tp) * 128
        hidden, kv_width = 4096, kv_heads * 128
        split = 2 * 151936 * hidden + 36 * (3 * 12288 * hidden + 2 * kv_heads * group * 128 * hidden)
        weights = split / tp + 36 * 2 * hidden * max(kv_width / tp, 128)
        need, have = 2 * (values + weights), memory * 2**30 * 0.9
        assume(abs(need / have - 1) > 1e-3)  # norms and embeddings are counted roughly here
        return place and whole and need <= have

    wanted = tuple(tp for tp in range(1, world + 1) if fits(tp))
    arguments = {"world_size": world, "gpus_per_node": node, "model": model, "max_tokens": 1000, "memory_gb": memory}
    if wanted:
        assert possible(**arguments) == wanted
    else:
        with pytest.raises(ConfigError, match="no tensor-parallel size is possible"):
            sizes_of(**arguments)
