"""Possible tensor-parallel (TP) sizes and GPU memory needs of a decoder model, computed from its Hugging Face configuration."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_accel.errors import ConfigError
from rl_accel.features import TpReplanFlags

FLAG = "rl_accel.tp_replan"
KNOWN_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Model families (``model_type`` in the Hugging Face configuration) whose memory needs :class:`ModelMemory` describes."""
MIN_SEQUENCES = 4
"""Minimum number of sequences of maximum length that must fit into the key-value cache of a rollout server. With
half of it, a size is possible at which nearly every long response preempts another."""
_GIB = 2**30


@dataclass(frozen=True)
class ModelMemory:
    """Sizes of a model, which determine the memory of weights and key-value cache on each GPU.

    Attributes:
        parameters: number of parameters of the model.
        kv_parameters: number of parameters in the key and value projections.
        kv_heads: number of key-value heads.
        layers: number of layers.
        head_dim: size of an attention head.
    """

    parameters: int
    kv_parameters: int
    kv_heads: int
    layers: int
    head_dim: int

    def weight_bytes(self, tp: int, bytes_per_value: int = 2) -> float:
        """Returns the size in bytes of the weights on each GPU at the tensor-parallel size ``tp``."""
        copies = max(1.0, tp / self.kv_heads)  # each GPU has at least one key-value head
        return (self.parameters + self.kv_parameters * (copies - 1)) / tp * bytes_per_value

    def kv_bytes_per_token(self, tp: int, bytes_per_value: int = 2) -> int:
        """Returns the bytes of key-value cache per token on each GPU at the tensor-parallel size ``tp``.

        An overestimate for models with sliding windows, which keep only the latest tokens.
        """
        return 2 * self.layers * max(1, self.kv_heads // tp) * self.head_dim * bytes_per_value


def read_memory(configuration: Mapping[str, Any]) -> ModelMemory | None:
    """Returns the sizes of a model, from its configuration (``config.json`` or ``PretrainedConfig.to_dict()``).

    Returns None if the model family is not in :data:`KNOWN_FAMILIES` or the weights are quantised.
    """
    family = configuration.get("model_type")
    if family not in KNOWN_FAMILIES or configuration.get("quantization_config"):
        return None
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[family].from_dict(dict(configuration))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    kv_layers = ("k_proj.weight", "v_proj.weight")
    return ModelMemory(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        kv_parameters=sum(weight.numel() for name, weight in model.named_parameters() if name.endswith(kv_layers)),
        kv_heads=config.num_key_value_heads,
        layers=config.num_hidden_layers,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    )


def read_configuration(path: str, is_quantised: bool, fetch: Callable[[str], str] = str) -> Mapping[str, Any] | None:
    """Returns the Hugging Face configuration of a model, or None if it cannot be read.

    Args:
        path: folder of the model (local or on remote storage), or its name on the Hugging Face hub.
        is_quantised: True if the engine quantises the weights. The result then has the key "quantization_config".
        fetch: function that turns a ``path`` that is no local folder into one that transformers can load.
    """
    try:
        file = Path(path) / "config.json"
        if file.is_file():
            config = json.loads(file.read_text())
        else:
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(fetch(path)).to_dict()
    except Exception:  # raised by the file system, the Hugging Face hub or code that comes with a model
        return None
    return {**config, "quantization_config": True} if is_quantised else config


def possible_sizes(
    flags: TpReplanFlags,
    *,
    world_size: int,
    gpus_per_node: int,
    max_tokens: int,
    model: Mapping[str, Any],
    memory_share: float = 0.9,
    bytes_per_value: int = 2,
) -> dict[int, str]:
    """Returns each tensor-parallel (TP) size of a rollout server, with the reason why it is impossible; "" if it is possible.

    A possible size divides the number of GPUs, fits into a node, and leaves memory for the key-value cache. It divides the number
    of attention heads and the inner sizes of the MLP layers, and divides the number of key-value heads or is a multiple of it.

    Args:
        flags: ``min_tp`` and ``max_tp`` limit the sizes; ``memory_gb`` is the memory of one GPU in GiB.
        world_size: number of GPUs for rollout, divided by the data-parallel and pipeline-parallel size of a server.
        gpus_per_node: number of GPUs in each node of the cluster.
        max_tokens: maximum length of a sequence (prompt and response) in tokens.
        model: content of the model's ``config.json``; empty if it cannot be read.
        memory_share: share of the GPU memory that the rollout engine may use for weights and key-value cache.
        bytes_per_value: bytes per value of weights and cache; 2 for bfloat16.

    Raises:
        ConfigError: no size is possible, or ``memory_gb`` is set and the memory needs of the model are not known.
    """
    memory = read_memory(model) if flags.memory_gb is not None else None
    if flags.memory_gb is not None and memory is None:
        raise ConfigError(f"{FLAG}.memory_gb wants an unquantised model of {', '.join(KNOWN_FAMILIES)}, found another")

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
        if memory is not None and flags.memory_gb is not None:
            weights = memory.weight_bytes(size, bytes_per_value) / _GIB
            cache = MIN_SEQUENCES * max_tokens * memory.kv_bytes_per_token(size, bytes_per_value) / _GIB
            available = flags.memory_gb * memory_share
            if weights + cache > available:
                needs = f"{weights:.1f} GiB a GPU for weights and {cache:.1f} for {MIN_SEQUENCES} sequences of cache"
                yield f"needs {needs}, and has {available:.1f}"

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
    if model.get("model_type") in KNOWN_FAMILIES:
        of_experts = [model.get(f"{which}_intermediate_size") for which in ("moe", "shared_expert")]
        for inner in filter(None, of_experts if any(of_experts) else [model.get("intermediate_size")]):
            if inner % size:
                yield f"does not divide the MLP size {inner}"
