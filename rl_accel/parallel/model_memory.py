"""What a decoder needs of GPU memory at a tensor-parallel size, told from its Hugging Face configuration alone."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KNOWN_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""``model_type`` of the families whose parameters are counted here."""
_QUERY_KEY_VALUE_BIAS = ("qwen2", "qwen2_moe")
_QUERY_KEY_NORM = ("qwen3", "qwen3_moe")
_MIXTURES = {"mixtral": "num_local_experts", "qwen2_moe": "num_experts", "qwen3_moe": "num_experts"}


@dataclass(frozen=True)
class ModelShape:
    """What the estimate needs to know of a model.

    Attributes:
        family: its ``model_type``.
        heads, kv_heads: attention heads for queries, and for keys and values.
        intermediate: sizes of the MLP layers that tensor parallelism splits.
        parameters: of the whole model.
        kv_parameters: those of the key and value projections, of which a GPU holds at least one head.
        layers, head_dim: what the key-value cache is made of.
    """

    family: str
    heads: int
    kv_heads: int
    intermediate: tuple[int, ...]
    parameters: int
    kv_parameters: int
    layers: int
    head_dim: int

    def weight_bytes(self, tp: int, bytes_per_value: int = 2) -> float:
        """Return the bytes of the weights on each of ``tp`` GPUs."""
        copies = max(1.0, tp / self.kv_heads)
        return (self.parameters + self.kv_parameters * (copies - 1)) / tp * bytes_per_value

    def kv_bytes_per_token(self, tp: int, bytes_per_value: int = 2) -> int:
        """Return the bytes that one token takes in the key-value cache of each of ``tp`` GPUs, sliding windows not counted."""
        return 2 * self.layers * max(1, self.kv_heads // tp) * self.head_dim * bytes_per_value


def read_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape of the model with this configuration (``config.json``, or ``PretrainedConfig.to_dict()``).

    Returns:
        ``None`` if the family is not one of :data:`KNOWN_FAMILIES` or the weights are quantised: nothing is guessed then.

    Raises:
        ValueError: the family is known, but a size is missing or not a positive whole number.
    """
    family = config.get("model_type")
    if family not in KNOWN_FAMILIES or config.get("quantization_config"):
        return None
    hidden, layers = _size(config, "hidden_size"), _size(config, "num_hidden_layers")
    vocabulary, heads = _size(config, "vocab_size"), _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    head_dim = _size(config, "head_dim", hidden // heads)

    kv_parameters = 2 * kv_heads * head_dim * hidden
    attention = 2 * heads * head_dim * hidden + kv_parameters + 2 * hidden
    if family in _QUERY_KEY_VALUE_BIAS or config.get("attention_bias"):
        attention += (heads + 2 * kv_heads) * head_dim
    if config.get("attention_bias"):
        attention += hidden
    if family in _QUERY_KEY_NORM:
        attention += 2 * head_dim
    mlp, intermediate = _mlp(family, config, hidden, layers)
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings", False) else 2)
    parameters = embeddings + hidden + layers * attention + mlp
    return ModelShape(family, heads, kv_heads, intermediate, parameters, layers * kv_parameters, layers, head_dim)


def _mlp(family: str, config: Mapping[str, Any], hidden: int, layers: int) -> tuple[int, tuple[int, ...]]:
    """Return the parameters of all MLP layers, and the sizes that are split."""
    if family not in _MIXTURES:
        inner = _size(config, "intermediate_size")
        bias = 2 * inner + hidden if config.get("mlp_bias") else 0
        return layers * (3 * inner * hidden + bias), (inner,)
    experts = config.get(_MIXTURES[family]) or config.get("num_local_experts")  # transformers 5 renames it
    experts = _size({_MIXTURES[family]: experts}, _MIXTURES[family])
    inner = _size(config, "intermediate_size" if family == "mixtral" else "moe_intermediate_size")
    sparse = experts * 3 * inner * hidden + experts * hidden
    split = [inner]
    if family == "qwen2_moe":
        shared = _size(config, "shared_expert_intermediate_size")
        sparse += 3 * shared * hidden + hidden
        split.append(shared)
    if family == "mixtral":
        return layers * sparse, tuple(split)
    every, dense_layers = _size(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    mixed = sum((i + 1) % every == 0 and i not in dense_layers for i in range(layers))
    total = mixed * sparse
    if mixed < layers:
        dense = _size(config, "intermediate_size")
        total += (layers - mixed) * 3 * dense * hidden
        split.append(dense)
    return total, tuple(split)


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} of the model configuration must be a whole number of at least 1, found {value!r}")
    return value


def read_configuration(path: str, fetch: Callable[[str], str] = str) -> Mapping[str, Any] | None:
    """Return a model's Hugging Face configuration; None if it cannot be read here, and the bounds then say what is unknown.

    Args:
        path: a folder, or the name of a model.
        fetch: makes of what is no folder here something that transformers finds.
    """
    try:
        file = Path(path) / "config.json"
        if file.is_file():
            found: Mapping[str, Any] = json.loads(file.read_text())
            return found
        from transformers import AutoConfig

        read: dict[str, Any] = AutoConfig.from_pretrained(fetch(path)).to_dict()
        return read
    except Exception:  # of the file system, of the hub, of code that comes with a model
        return None
