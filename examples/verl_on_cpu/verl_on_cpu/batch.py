"""Batched decoding of the CPU engine: the model, the key-value cache, and the running requests. Each request has one cache row.

A cache row starts at position 0 and is padded on the right, so that the position of a key does not depend on other requests. The
attention of a new token is computed row by row over exactly the length of the row, so that the result cannot depend on the batch.
Without padding, decoding is about three times as fast as with ``scaled_dot_product_attention`` on one core.

Shapes: H attention heads of width D, L tokens.
"""

from collections.abc import Mapping
from typing import Any

import numba
import numpy as np
import torch
from cachetools import FIFOCache
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from verl_on_cpu.requests import Request
from verl_on_cpu.sampling import BatchSampler

ATTENTION = "rl_accel_cpu"
"""Name under which :func:`attend` is registered as an attention function of transformers."""
BLOCK = 128
"""The length of cache rows, in tokens, is rounded up to a multiple of this, so that rows seldom grow.
With half of it, rows are copied twice as often; with twice of it, more memory is unused."""
ROWS = 8
"""The number of rows of a forward pass is rounded up to a multiple of this. For very few rows, CPU kernels use another matrix
multiplication, which rounds differently."""
_PROMPTS_KEPT = 64
"""Maximum number of prompts whose key-value cache is kept for further responses to the same prompt. With
fewer, prompts of one batch would be computed again; more take memory."""


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


class SlotCache:
    """Key-value cache of up to ``slots`` sequences, one per row, with the methods that transformers calls on a cache.

    Each layer has keys and values [slots, H, capacity, D] for H heads of width D. The capacity, the number of tokens per row, grows
    on demand. Before a decoding step, :meth:`window` sets the position of the new token in each row. :meth:`update` stores the new
    keys and values and returns the whole cache.
    """

    is_compileable = False

    def __init__(self, slots: int) -> None:
        self._slots = round_up(slots, ROWS)
        self._capacity = 0
        self._memory: list[torch.Tensor] = []  # keys and values of the first layer, of the second, and so on
        self._width = 0

    def store(self, row: int, prompt: DynamicCache) -> None:
        """Copies the keys and values of a prompt to the beginning of row ``row`` of the cache."""
        tensors = [tensor for layer in prompt.layers for tensor in (layer.keys, layer.values)]
        if not self._memory:
            self._memory = [tensor.new_zeros(self._slots, tensor.shape[1], 0, tensor.shape[3]) for tensor in tensors]
        length = prompt.get_seq_length()
        self._reserve(length)
        for memory, tensor in zip(self._memory, tensors, strict=True):
            memory[row, :, :length] = tensor[0]

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first ``length`` tokens of the cache row ``source`` over those of the row ``target``."""
        for memory in self._memory:
            memory[target, :, :length] = memory[source, :, :length]

    def clear(self, row: int) -> None:
        """Sets row ``row`` of the cache to 0. A remaining NaN would spoil the next request in this row."""
        for memory in self._memory:
            memory[row] = 0

    def window(self, positions: torch.Tensor) -> None:
        """Prepares the next forward pass, in which row i stores its new token at ``positions[i]``."""
        self._width = round_up(int(positions.max()) + 1, BLOCK)
        self._reserve(self._width)
        self._rows = torch.arange(len(positions))
        self._positions = positions

    def mask(self) -> torch.Tensor:
        """Returns the attention mask [rows, 1, 1, positions] of the next forward pass: True for positions that a row attends to."""
        return (torch.arange(self._width) <= self._positions[:, None])[:, None, None, :]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        all_keys, all_values = self._memory[2 * layer_idx : 2 * layer_idx + 2]
        all_keys[self._rows, :, self._positions] = keys[:, :, 0]
        all_values[self._rows, :, self._positions] = values[:, :, 0]
        return all_keys, all_values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._width

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._width, 0

    def _reserve(self, length: int) -> None:
        if length <= self._capacity:
            return
        capacity = round_up(max(length, 2 * self._capacity), BLOCK)
        for index, old in enumerate(self._memory):
            grown = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
            grown[:, :, : self._capacity] = old
            self._memory[index] = grown
        self._capacity = capacity


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes the attention of ``query`` [B, H, L, D] (L new tokens) to ``key`` and ``value``. Returns float32 [B, L, H, D].

    For L > 1 (prefill), calls transformers' SDPA function. For L = 1 (decoding), ``key`` and ``value`` are the whole cache [slots,
    KV heads, capacity, D] with slots >= B. The first n positions of each row are read, where n is the number of True values in
    the row of ``attention_mask`` [B, 1, 1, T].
    """
    if query.shape[2] > 1:
        output: torch.Tensor
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output, None
    rows, heads, _, width = query.shape
    if attention_mask is None:  # a prompt of one token
        lengths = torch.full((rows,), key.shape[2])
    else:
        lengths = attention_mask[:, 0, 0].sum(-1)
    scale = width**-0.5 if scaling is None else scaling
    out = torch.empty(rows, 1, heads, width)
    arrays = [tensor.contiguous().numpy() for tensor in (query[:, :, 0], key, value)]
    _one_token(*arrays, lengths.numpy(), scale, out[:, 0].numpy())
    return out, None


_SIGNATURE = "void(f4[:,:,::1], f4[:,:,:,::1], f4[:,:,:,::1], i8[::1], f4, f4[:,:,::1])"
"""Argument types of :func:`_one_token`, so that numba compiles a single version, whose sums have one order."""


# The compiler may reorder sums for vector registers. The order is fixed at compile time and is the same for every row.
@numba.njit(_SIGNATURE, fastmath={"reassoc", "contract"}, error_model="numpy", nogil=True, cache=True)
def _one_token(query, keys, values, lengths, scale, out):  # type: ignore[no-untyped-def]
    rows, heads, width = query.shape
    group = heads // keys.shape[1]
    weights = np.empty(keys.shape[2], np.float32)
    for row in range(rows):
        length = lengths[row]
        for head in range(heads):
            q = query[row, head]
            k = keys[row, head // group]
            v = values[row, head // group]
            highest = np.float32(-np.inf)
            for t in range(length):
                score = np.float32(0)
                for d in range(width):
                    score += q[d] * k[t, d]
                score *= scale
                weights[t] = score
                highest = max(highest, score)
            total = np.float32(0)
            for t in range(length):
                weights[t] = np.exp(weights[t] - highest)
                total += weights[t]
            o = out[row, head]
            o[:] = 0
            for t in range(length):
                weight = weights[t]
                for d in range(width):
                    o[d] += weight * v[t, d]
            for d in range(width):
                o[d] /= total


class Batch:
    """The running requests of one model, at most ``slots``. Row i of the key-value cache belongs to ``requests[i]``.

    The batch takes over ``model`` and replaces the model's attention by :func:`attend`.

    Raises:
        ValueError: the model has layers without full attention.
    """

    def __init__(self, model: Any, slots: int) -> None:
        kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ValueError(f"the CPU engine decodes models with full attention only, found layers of {sorted(kinds)}")
        AttentionInterface.register(ATTENTION, attend)
        model.set_attn_implementation(ATTENTION)
        self._model = model
        self.requests: list[Request] = []
        self.prefills = 0
        self._cache = SlotCache(slots)
        self._sampler: BatchSampler | None = None
        self._prompts: FIFOCache[tuple[int, ...], tuple[DynamicCache, torch.Tensor]] = FIFOCache(_PROMPTS_KEPT)

    def begin(self, request: Request) -> tuple[DynamicCache, int, float]:
        """Computes the key-value cache of the prompt of ``request``.

        Returns the filled cache, which :meth:`join` takes, the next token of the response, and this token's log-probability.
        """
        prompt = tuple(request.prompt)
        if prompt not in self._prompts:  # equal prompts are computed only once
            self._prompts[prompt] = self.read(request.prompt)
        memory, logits = self._prompts[prompt]
        (token,), (logprob,) = BatchSampler([request.params], [request.seed])(logits, [request.length])
        return memory, token, logprob

    def join(self, request: Request, memory: DynamicCache) -> None:
        """Adds ``request``, whose cache from :meth:`begin` is ``memory``, to the batch."""
        self._cache.store(len(self.requests), memory)
        self.requests.append(request)
        self._sampler = None

    def read(self, tokens: list[int]) -> tuple[DynamicCache, torch.Tensor]:
        """Returns the key-value cache and the last logits of one sequence, which other sequences cannot change."""
        cache = DynamicCache()
        output = self._model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        self.prefills += 1
        return cache, output.logits[:, -1].float()

    def step(self) -> tuple[list[int], list[float]]:
        """Draws the next token of every request. Returns token ids (-1 for logits that are not finite) and log-probabilities."""
        requests = self.requests
        lengths = [request.length for request in requests]
        padding = [0] * (-len(requests) % ROWS)
        ids = torch.tensor([request.tokens[-1] for request in requests] + padding)
        positions = torch.tensor([length - 1 for length in lengths] + padding)
        self._cache.window(positions)
        output = self._model(
            input_ids=ids[:, None],
            attention_mask=self._cache.mask(),
            position_ids=positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        if self._sampler is None:
            self._sampler = BatchSampler([r.params for r in requests], [r.seed for r in requests])
        tokens, logprobs = self._sampler(output.logits[: len(requests), -1].float(), lengths)
        for row, token in enumerate(tokens):
            if token < 0:
                self._cache.clear(row)
        return tokens, logprobs

    def keep(self, rows: list[int]) -> None:
        """Removes all requests except those in ``rows``, and moves remaining requests into the rows that have become free."""
        if len(rows) == len(self.requests):
            return
        running = self.requests
        movers = [row for row in rows if row >= len(rows)]
        gaps = set(range(len(rows))) - set(rows)
        self.requests = running[: len(rows)]
        for gap, source in zip(sorted(gaps), reversed(movers), strict=True):
            self._cache.move(source, gap, running[source].length)
            self.requests[gap] = running[source]
        self._sampler = None

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copies ``weights`` (parameter name -> tensor) into the model of an empty batch. Tied weights need only one name.

        Raises:
            ValueError: a parameter is missing, a name is unknown or a shape differs. Nothing is written in that case.
        """
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        tensors: dict[str, torch.Tensor] = {**parameters, **dict(self._model.named_buffers())}
        unknown = sorted(set(weights) - set(tensors))
        given_ids = {id(tensors[name]) for name in weights if name in tensors}
        missing = sorted(name for name, tensor in parameters.items() if id(tensor) not in given_ids)
        if unknown or missing:
            raise ValueError(f"weights do not fit the model: missing {missing[:5]}, unknown {unknown[:5]}")
        shapes = [(name, tuple(tensor.shape), tuple(tensors[name].shape)) for name, tensor in weights.items()]
        if wrong := [f"{name} {given} for {own}" for name, given, own in shapes if given != own]:
            raise ValueError(f"weights do not fit the model: {', '.join(wrong[:5])}")
        with torch.no_grad():
            for name, tensor in weights.items():
                tensors[name].copy_(tensor)
        self._prompts.clear()
