import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_accel.errors import ConfigError
from rl_accel.features import TpReplanFlags
from rl_accel.parallel.tp_sizes import possible_sizes

QWEN3_8B = json.loads((Path(__file__).parent / "qwen3_8b.json").read_text())
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
SMALL = {"num_hidden_layers": 3, "vocab_size": 8000, "hidden_size": 512, **HEADS}
up_to_8 = st.integers(1, 8)


def sizes_of(world_size=8, gpus_per_node=8, model=QWEN3_8B, **flags):
    """Each size with what stands against it."""
    return possible_sizes(TpReplanFlags(**flags), world_size=world_size, gpus_per_node=gpus_per_node, model=model)


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
    ],
)
def test_possible_sizes(arguments, sizes):
    assert possible(**arguments) == sizes


def test_sizes_that_are_not_possible_have_their_reasons():
    with pytest.raises(ConfigError, match="no tensor-parallel size is possible on 12 GPUs") as error:
        sizes_of(world_size=12, gpus_per_node=4, min_tp=4, model={**QWEN3_8B, "intermediate_size": 12290})
    reasons = dict(part.split(": ", 1) for part in str(error.value).split("12 GPUs: ")[1].split("; "))
    words = [
        "min_tp = 4",
        "min_tp = 4",
        "32 attention heads",
        "MLP size 12290",
        "the 4 GPUs of a node",
        "4 GPUs of a node",
    ]
    for size, part in zip((1, 2, 3, 4, 6, 12), words, strict=True):
        assert part in reasons.pop(f"TP {size}")
    assert reasons == {}


@settings(deadline=None, max_examples=30)
@given(world=st.integers(1, 64), node=st.integers(1, 16), kv_heads=up_to_8, group=up_to_8)
def test_exactly_the_sizes_that_fit_are_possible(world, node, kv_heads, group):
    model = {**QWEN3_8B, "num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads}

    def fits(tp):
        place = world % tp == 0 and tp <= node and (world <= node or node % tp == 0)
        return place and (kv_heads * group) % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0) and 12288 % tp == 0

    wanted = tuple(tp for tp in range(1, world + 1) if fits(tp))
    assert 1 in wanted
    assert possible(world_size=world, gpus_per_node=node, model=model) == wanted
