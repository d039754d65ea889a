"""Which sizes are possible: by example, by brute force, and what is said about the others."""

import json
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rl_accel.parallel.tp_bounds import TpBounds
from rl_accel.parallel.tp_settings import TpSettings

QWEN3_8B = json.loads((Path(__file__).parent / "qwen3_8b.json").read_text())
GIB = 2**30


def bounds(world_size=8, gpus_per_node=8, model=QWEN3_8B, max_tokens=32768, **settings):
    return TpBounds(TpSettings(**settings), world_size, gpus_per_node, model=model, max_tokens=max_tokens)


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ({}, (1, 2, 4, 8)),
        ({"world_size": 32}, (1, 2, 4, 8)),
        ({"world_size": 12, "gpus_per_node": 12}, (1, 2, 4)),
        ({"world_size": 4}, (1, 2, 4)),
        ({"world_size": 24, "gpus_per_node": 6}, (1, 2)),
        ({"world_size": 16, "gpus_per_node": 16}, (1, 2, 4, 8, 16)),
        ({"min_tp": 2, "max_tp": 4}, (2, 4)),
        ({"model": {**QWEN3_8B, "num_attention_heads": 28, "num_key_value_heads": 4}}, (1, 2, 4)),
        ({"model": {**QWEN3_8B, "num_attention_heads": 24, "num_key_value_heads": 3}, "world_size": 12}, (1,)),
        ({"model": {**QWEN3_8B, "intermediate_size": 12290}}, (1, 2)),
        ({"model": None, "world_size": 6}, (1, 2, 3, 6)),
        ({"model": {"model_type": "other", "num_attention_heads": 12}, "world_size": 8}, (1, 2, 4)),
        ({"gpus_per_node": None, "world_size": 16}, (1, 2, 4, 8, 16)),
    ],
)
def test_possible_sizes(arguments, sizes):
    assert bounds(**arguments).sizes == sizes


def test_sizes_are_multiples_of_what_splits_an_engine_itself():
    found = TpBounds(TpSettings(), 8, 8, multiple_of=4)
    assert found.sizes == (4, 8)
    assert found.why_not(2) == "is no multiple of 4"


def test_the_users_node_goes_before_the_frameworks():
    assert TpBounds(TpSettings(gpus_per_node=2), 16, 8).sizes == (1, 2)


def test_memory_for_weights_and_cache():
    """15.3 GiB of weights and 4 x 4.5 GiB of cache: one GPU of 36 GiB holds it at a share of 0.95, two of 20 GiB at 0.9."""
    assert bounds(memory_gb=36.0, memory_share=0.95).sizes == (1, 2, 4, 8)
    assert bounds(memory_gb=20.0).sizes == (2, 4, 8)
    assert "needs 15.3 GiB a GPU for weights and 18.0 for 131072 tokens of cache, and has 18.0" in bounds(
        memory_gb=20.0
    ).why_not(1)
    assert bounds(memory_gb=20.0, min_sequences=1, memory_share=1.0).sizes == (1, 2, 4, 8)


def test_the_cache_of_all_servers_grows_with_tp():
    tokens = [bounds(memory_gb=80.0).cache_tokens(tp) for tp in (1, 2, 4, 8)]
    assert tokens == sorted(tokens)
    assert tokens[0] == pytest.approx(8 * (72 * GIB - 2 * 8.19e9) / 147_456, rel=0.01)
    assert tokens[1] / tokens[0] == pytest.approx((72 - 15.26 / 2) / (72 - 15.26), rel=0.01)
    assert bounds().cache_tokens(1) is None
    assert bounds(memory_gb=80.0, model={"model_type": "other"}).cache_tokens(1) is None


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        ({"memory_gb": 80.0}, ""),
        ({}, "memory is not bounded, unknown: memory_gb"),
        ({"memory_gb": 80.0, "max_tokens": None}, "memory is bounded for weights alone, unknown: max_tokens"),
        ({"memory_gb": 80.0, "model": None}, "memory is not bounded, unknown: the model"),
        (
            {"memory_gb": 80.0, "model": {"model_type": "mamba"}},
            "memory is not bounded, unknown: the size of model family 'mamba'",
        ),
        (
            {"memory_gb": 80.0, "model": {**QWEN3_8B, "quantization_config": {"bits": 8}}},
            "memory is not bounded, unknown: quantised weights",
        ),
    ],
)
def test_it_says_what_it_does_not_know(arguments, note):
    assert bounds(**arguments).note == note


def test_bounds_that_nothing_satisfies_name_every_reason():
    with pytest.raises(ValueError) as error:
        bounds(world_size=12, gpus_per_node=4, min_tp=4, memory_gb=8.0)
    message = str(error.value)
    assert message.startswith(
        "no tensor-parallel size is possible on 12 GPUs: TP 1: is below min_tp = 4, needs 15.3 GiB"
    )
    assert (
        "TP 3: does not divide the 4 GPUs of a node, is below min_tp = 4, does not divide 32 attention heads" in message
    )
    assert "TP 4: needs 3.8 GiB a GPU for weights and 4.5 for 131072 tokens of cache, and has 7.2" in message
    assert "TP 12: is more than the 4 GPUs of a node" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size must be at least 1, found 0"),
        ({"gpus_per_node": 0}, "gpus_per_node must be at least 1, found 0"),
        ({"max_tokens": -1}, "max_tokens must be at least 1, found -1"),
        ({"model": {"model_type": "qwen3"}}, "hidden_size of the model configuration must be"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        bounds(**arguments)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"threshold": 0.9}, ValueError, "threshold must be at least 1 and finite, found 0.9"),
        ({"threshold": float("nan")}, ValueError, "threshold must be at least 1 and finite, found nan"),
        ({"threshold": "1.05"}, TypeError, "threshold must be a number, found '1.05'"),
        ({"calm_steps": 0}, ValueError, "calm_steps must be at least 1, found 0"),
        ({"calm_steps": 4.0}, TypeError, "calm_steps must be a whole number, found 4.0"),
        ({"cooldown": True}, TypeError, "cooldown must be a whole number, found True"),
        ({"max_tp": 0}, ValueError, "max_tp must be at least 1, found 0"),
        ({"min_tp": 4, "max_tp": 2}, ValueError, "max_tp must be at least min_tp = 4, found 2"),
        ({"kv_limit": 1.5}, ValueError, "kv_limit must be between 0 and 1, found 1.5"),
        ({"memory_gb": 0.0}, ValueError, "memory_gb must be at least 0.1 and finite, found 0.0"),
        ({"check_steps": 5, "check_limit": 4}, ValueError, "check_limit must be at least check_steps = 5, found 4"),
    ],
)
def test_settings_are_checked(settings, error, message):
    with pytest.raises(error, match=message):
        TpSettings(**settings)


@given(
    world=st.integers(1, 64),
    node=st.integers(1, 16),
    kv_heads=st.integers(1, 8),
    group=st.integers(1, 8),
    memory=st.floats(4, 80),
)
def test_exactly_the_sizes_that_fit_are_possible(world, node, kv_heads, group, memory):
    model = {**QWEN3_8B, "num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads}

    def fits(tp):
        place = world % tp == 0 and tp <= node and (world <= node or node % tp == 0)
        whole = (kv_heads * group) % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0) and 12288 % tp == 0
        own_kv_heads = -(-kv_heads // tp)
        values = 4 * 1000 * 2 * 36 * own_kv_heads * 128
        hidden, kv_width = 4096, kv_heads * 128
        split = 2 * 151936 * hidden + 36 * (3 * 12288 * hidden + 2 * kv_heads * group * 128 * hidden)
        weights = split / tp + 36 * 2 * hidden * max(kv_width / tp, 128)
        need = 2 * (values + weights)
        have = memory * GIB * 0.9
        assume(abs(need / have - 1) > 1e-3)  # norms and embeddings are counted roughly here
        return place and whole and need <= have

    wanted = tuple(tp for tp in range(1, world + 1) if fits(tp))
    if not wanted:
        with pytest.raises(ValueError, match="no tensor-parallel size is possible"):
            bounds(world, node, model, 1000, memory_gb=memory)
        return
    found = bounds(world, node, model, 1000, memory_gb=memory)
    assert found.sizes == wanted
    assert all(found.why_not(tp) for tp in range(1, world + 3) if tp not in found.sizes)
