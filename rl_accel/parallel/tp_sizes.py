"""Possible tensor-parallel (TP) sizes of a decoder model, from its Hugging Face configuration and the GPUs of a run."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rl_accel.errors import ConfigError
from rl_accel.features import TpReplanFlags

FLAG = "rl_accel.tp_replan"
SPLIT_MLP_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Values of ``model_type`` in the Hugging Face configuration of models whose MLP layers an engine splits among the GPUs."""


def read_configuration(path: str, fetch: Callable[[str], str] = str) -> Mapping[str, Any]:
    """Returns the Hugging Face configuration of a model; empty if it cannot be read.

    Args:
        path: folder of the model (local or on remote storage), or its name on the Hugging Face hub.
        fetch: function that turns a ``path`` that is no local folder into one that transformers can load.
    """
    try:
        file = Path(path) / "config.json"
        if file.is_file():
            config: Mapping[str, Any] = json.loads(file.read_text())
            return config
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(fetch(path)).to_dict()
        return config
    except Exception:  # raised by the file system, the Hugging Face hub or code that comes with a model
        return {}


def possible_sizes(
    flags: TpReplanFlags, *, world_size: int, gpus_per_node: int, model: Mapping[str, Any]
) -> dict[int, str]:
    """Returns each tensor-parallel (TP) size of a rollout server, with the reason why it is impossible; "" if it is possible.

    A possible size divides the number of GPUs, and fits into a node. It divides the number of attention heads and the inner sizes
    of the MLP layers, and divides the number of key-value heads or is a multiple of it. Memory is not looked at.

    Args:
        flags: ``min_tp`` and ``max_tp`` limit the sizes.
        world_size: number of GPUs for rollout, divided by the data-parallel and pipeline-parallel size of a server.
        gpus_per_node: number of GPUs in each node of the cluster.
        model: content of the model's ``config.json``; empty if it cannot be read.

    Raises:
        ConfigError: no size is possible.
    """

    def obstacles(size: int) -> Iterator[str]:
        if world_size % size:
            yield f"does not divide {world_size} GPUs"
        if size > gpus_per_node:
            yield f"is more than the {gpus_per_node} GPUs of a node"
        elif world_size > gpus_per_node and gpus_per_node % size:
            yield f"does not divide the {gpus_per_node} GPUs of a node"
        if size < flags.min_tp:
            yield f"is below min_tp = {flags.min_tp}"
        if flags.max_tp is not None and size > flags.max_tp:
            yield f"is above max_tp = {flags.max_tp}"
        yield from _obstacles_of_model(size, model)

    sizes = {size: ", ".join(obstacles(size)) for size in range(1, world_size + 1)}
    if all(sizes.values()):
        found = "; ".join(f"TP {size}: {reasons}" for size, reasons in sizes.items() if world_size % size == 0)
        raise ConfigError(f"{FLAG}: no tensor-parallel size is possible on {world_size} GPUs: {found}")
    return sizes


def _obstacles_of_model(size: int, model: Mapping[str, Any]) -> Iterator[str]:
    language_model = model.get("text_config") or model  # a model that sees images nests its language model
    heads = language_model.get("num_attention_heads")
    if isinstance(heads, int) and heads % size:
        yield f"does not divide {heads} attention heads"
    kv_heads = language_model.get("num_key_value_heads")
    if isinstance(kv_heads, int) and kv_heads % size and size % kv_heads:
        yield f"neither divides {kv_heads} key-value heads nor is divided by them"
    if model.get("model_type") in SPLIT_MLP_FAMILIES:
        of_experts = [model.get(f"{which}_intermediate_size") for which in ("moe", "shared_expert")]
        for inner in filter(None, of_experts if any(of_experts) else [model.get("intermediate_size")]):
            if inner % size:
                yield f"does not divide the MLP size {inner}"
