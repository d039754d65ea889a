"""Which tensor-parallel sizes are possible at all, and why the others are not."""

from collections.abc import Mapping
from typing import Any

from rl_accel.parallel.model_memory import ModelShape, read_shape
from rl_accel.parallel.tp_settings import TpSettings, check_whole

_GIB = 2**30


class TpBounds:
    """The sizes that divide the GPUs and the model, stay within a node, and leave room for the key-value cache.

    Of the model, vLLM and SGLang want: attention heads divisible by TP; key-value heads divisible by it, or TP by them (each
    is then copied); the inner sizes of the MLP layers divisible by it.

    Args:
        settings: bounds of the user, and the memory of a GPU.
        world_size: GPUs for rollout, over the data- and pipeline-parallel size of a server.
        gpus_per_node: what the framework says; ``settings.gpus_per_node`` goes before it, and a single node is assumed if both
            are unknown.
        model: configuration of the model as a mapping (``config.json``). If the family is unknown, what the mapping says of heads
            still bounds, and memory does not.
        max_tokens: greatest length of a sequence, prompt and response.
        bytes_per_value: of weights and cache, 2 for bfloat16.
        multiple_of: what sizes must be multiples of: the expert-parallel size, which splits an engine's GPUs itself.

    Attributes:
        sizes: the possible sizes, ascending.
        note: what is left out of the bounds for want of knowledge; empty if nothing is.

    Raises:
        TypeError, ValueError: an argument is out of range.
        ValueError: no size is possible; names the reason for each.
    """

    def __init__(
        self,
        settings: TpSettings,
        world_size: int,
        gpus_per_node: int | None = None,
        *,
        model: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        bytes_per_value: int = 2,
        multiple_of: int = 1,
    ) -> None:
        check_whole("world_size", world_size, 1)
        check_whole("multiple_of", multiple_of, 1)
        check_whole("bytes_per_value", bytes_per_value, 1)
        for name, value in (("gpus_per_node", gpus_per_node), ("max_tokens", max_tokens)):
            if value is not None:
                check_whole(name, value, 1)
        self.settings, self.world_size, self.max_tokens = settings, world_size, max_tokens
        self.gpus_per_node = settings.gpus_per_node or gpus_per_node or world_size
        self._bytes, self._multiple_of = bytes_per_value, multiple_of
        self._shape = read_shape(model or {})
        self._heads, self._kv_heads = _heads(model or {}, self._shape)
        self.note = self._what_is_unknown(model)
        self._why_not = {size: self._obstacles(size) for size in range(1, world_size + 1)}
        self.sizes = tuple(size for size, why in self._why_not.items() if not why)
        if not self.sizes:
            each = "; ".join(f"TP {size}: {self.why_not(size)}" for size in self._interesting())
            raise ValueError(f"no tensor-parallel size is possible on {world_size} GPUs: {each}")

    def why_not(self, size: int) -> str:
        """Return why ``size`` is impossible, or an empty string."""
        if size > self.world_size:
            return f"there are {self.world_size} GPUs"
        return ", ".join(self._why_not[size])

    def cache_tokens(self, tp: int) -> float | None:
        """Return the tokens that the caches of all servers hold together at ``tp``; ``None`` if unknown."""
        if self._shape is None or self.settings.memory_gb is None:
            return None
        room = self.settings.memory_gb * self.settings.memory_share * _GIB - self._shape.weight_bytes(tp, self._bytes)
        return max(0.0, room / self._shape.kv_bytes_per_token(tp, self._bytes)) * (self.world_size / tp)

    def _obstacles(self, size: int) -> list[str]:
        found = []
        if self.world_size % size:
            found.append(f"does not divide {self.world_size} GPUs")
        if size % self._multiple_of:
            found.append(f"is no multiple of {self._multiple_of}")
        if size > self.gpus_per_node:
            found.append(f"is more than the {self.gpus_per_node} GPUs of a node")
        elif self.world_size > self.gpus_per_node and self.gpus_per_node % size:
            found.append(f"does not divide the {self.gpus_per_node} GPUs of a node")
        if size < self.settings.min_tp:
            found.append(f"is below min_tp = {self.settings.min_tp}")
        if self.settings.max_tp is not None and size > self.settings.max_tp:
            found.append(f"is above max_tp = {self.settings.max_tp}")
        if self._heads is not None and self._heads % size:
            found.append(f"does not divide {self._heads} attention heads")
        if self._kv_heads is not None and self._kv_heads % size and size % self._kv_heads:
            found.append(f"neither divides {self._kv_heads} key-value heads nor is divided by them")
        for inner in self._shape.intermediate if self._shape else ():
            if inner % size:
                found.append(f"does not divide the MLP size {inner}")
        return [*found, *self._too_large(size)]

    def _too_large(self, size: int) -> list[str]:
        room = self.cache_tokens(size)
        if room is None or self._shape is None or self.settings.memory_gb is None:
            return []
        have = self.settings.memory_gb * self.settings.memory_share
        weights = self._shape.weight_bytes(size, self._bytes) / _GIB
        tokens = self.settings.min_sequences * (self.max_tokens or 1)
        cache = tokens * self._shape.kv_bytes_per_token(size, self._bytes) / _GIB
        if weights + cache <= have:
            return []
        return [
            f"needs {weights:.1f} GiB a GPU for weights and {cache:.1f} for {tokens} tokens of cache, and has {have:.1f}"
        ]

    def _what_is_unknown(self, model: Mapping[str, Any] | None) -> str:
        missing = []
        if self._shape is None:
            family = (model or {}).get("model_type")
            what = "the model" if not model else f"the size of model family {family!r}"
            missing.append("quantised weights" if (model or {}).get("quantization_config") else what)
        if self.settings.memory_gb is None:
            missing.append("memory_gb")
        if self.max_tokens is None:
            missing.append("max_tokens")
        if not missing:
            return ""
        unbounded = self._shape is None or self.settings.memory_gb is None
        return f"memory is {'not bounded' if unbounded else 'bounded for weights alone'}, unknown: {', '.join(missing)}"

    def _interesting(self) -> list[int]:
        """Sizes worth naming when none is possible: the divisors of the world size, there are few."""
        return [size for size in range(1, self.world_size + 1) if self.world_size % size == 0]


def _heads(model: Mapping[str, Any], shape: ModelShape | None) -> tuple[int | None, int | None]:
    """Attention and key-value heads; of an unknown family only what its configuration plainly says."""
    if shape is not None:
        return shape.heads, shape.kv_heads
    heads, kv_heads = (model.get(key) for key in ("num_attention_heads", "num_key_value_heads"))
    return (
        heads if isinstance(heads, int) and heads > 0 else None,
        kv_heads if isinstance(kv_heads, int) and kv_heads > 0 else None,
    )
