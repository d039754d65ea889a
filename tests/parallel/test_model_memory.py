"""Parameters and cache bytes, against real transformers models that hold no memory."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from rl_accel.parallel.model_memory import KNOWN_FAMILIES, read_shape

SMALL = {"num_hidden_layers": 3, "vocab_size": 8000, "hidden_size": 512, "num_attention_heads": 8}
GROUPED = {**SMALL, "num_key_value_heads": 2}
CASES = {
    "llama": GROUPED | {"intermediate_size": 1536},
    "llama tied, biases": SMALL
    | {"intermediate_size": 1536, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "mistral": GROUPED | {"intermediate_size": 1536, "head_dim": 128},
    "mixtral": GROUPED | {"intermediate_size": 1024, "num_local_experts": 4},
    "qwen2": GROUPED | {"intermediate_size": 1536},
    "qwen2 0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen2_moe": GROUPED
    | {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 768, "num_experts": 6, "intermediate_size": 96},
    "qwen3": GROUPED | {"intermediate_size": 1536, "head_dim": 128},
    "qwen3_moe": GROUPED | {"moe_intermediate_size": 256, "num_experts": 8, "head_dim": 128},
    "qwen3_moe, some layers dense": GROUPED
    | {"moe_intermediate_size": 256, "num_experts": 8, "intermediate_size": 1024, "mlp_only_layers": [0]},
    "qwen3_moe 30B": {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
    },
}
QWEN3_8B = json.loads((Path(__file__).parent / "qwen3_8b.json").read_text())


def a_config(name):
    return transformers.AutoConfig.for_model(name.split()[0].rstrip(","), **CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_of_the_real_model(name):
    config = a_config(name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    real = sum(parameter.numel() for parameter in model.parameters())
    assert read_shape(config.to_dict()).parameters == real
    kv = sum(p.numel() for n, p in model.named_parameters() if n.endswith(("k_proj.weight", "v_proj.weight")))
    assert read_shape(config.to_dict()).kv_parameters == kv


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_cache_bytes_are_those_of_the_real_cache(name):
    config = a_config(name)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        cache = model(torch.zeros(1, 5, dtype=torch.long), use_cache=True).past_key_values
    values = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert read_shape(config.to_dict()).kv_bytes_per_token(1, bytes_per_value=2) * 5 == values * 2


def test_every_known_family_is_checked():
    assert {name.split()[0].rstrip(",") for name in CASES} == set(KNOWN_FAMILIES)


def test_a_published_size():
    assert read_shape(QWEN3_8B).parameters == pytest.approx(8.19e9, rel=0.01)
    assert read_shape(QWEN3_8B).kv_bytes_per_token(1) == 147_456


def test_weights_are_shared_out_but_for_key_value_heads():
    shape = read_shape(QWEN3_8B)
    assert shape.weight_bytes(8) * 8 == shape.weight_bytes(1) == shape.parameters * 2
    assert shape.weight_bytes(16) * 16 == shape.weight_bytes(1) + 2 * shape.kv_parameters
    assert shape.kv_bytes_per_token(4) * 4 == shape.kv_bytes_per_token(1)
    assert shape.kv_bytes_per_token(16) == shape.kv_bytes_per_token(8)


@pytest.mark.parametrize(
    "config",
    [{}, {"model_type": "deepseek_v3"}, {**QWEN3_8B, "quantization_config": {"quant_method": "fp8"}}],
    ids=["no family", "unknown family", "quantised"],
)
def test_nothing_is_guessed(config):
    assert read_shape(config) is None


@pytest.mark.parametrize("value", [None, 0, -1, 2.5, "32", True])
def test_a_known_family_without_a_size_is_an_error(value):
    with pytest.raises(ValueError, match=r"hidden_size of the model configuration must be .*, found"):
        read_shape({**QWEN3_8B, "hidden_size": value})
