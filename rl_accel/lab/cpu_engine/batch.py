"""The model, its key-value memory and the requests that are being decoded in it: one row each."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from rl_accel.lab.cpu_engine.requests import Request
from rl_accel.lab.cpu_engine.sampling import BatchSampler
from rl_accel.lab.cpu_engine.slots import ROWS, PromptCache, SlotCache, round_up
from rl_accel.lab.cpu_engine.weights import copy_weights

_PROMPTS_KEPT = 64


class Batch:
    """Up to ``places`` requests of one model. ``requests[i]`` has row i of the memory.

    The model is the batch's from then on: its attention is replaced by one that decodes over this memory.

    Raises:
        ValueError: the model has an attention layout that this does not do.
    """

    def __init__(self, model: Any, places: int) -> None:
        kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ValueError(f"the CPU engine decodes models with full attention only, found layers of {sorted(kinds)}")
        from rl_accel.lab.cpu_engine import attention  # imports transformers

        model.set_attn_implementation(attention.register())
        self._model = model
        self.requests: list[Request] = []
        self.prefills = 0
        self.peak = 0
        """The most tokens of memory that a step took; may be set back to 0."""
        self._cache = SlotCache(places)
        self._sampler: BatchSampler | None = None
        self._prompts: OrderedDict[tuple[int, ...], tuple[PromptCache, torch.Tensor]] = OrderedDict()

    def begin(self, request: Request) -> tuple[PromptCache, int, float]:
        """Read a request's prompt, and its response if it was preempted; return what to :meth:`join` with, a token, its logprob."""
        if request.tokens:
            memory, logits = self._read(request.prompt + request.tokens)
        else:
            memory, logits = self._read_prompt(tuple(request.prompt))
        (token,), (logprob,) = BatchSampler([request.params], [request.seed])(logits, [request.length])
        return memory, token, logprob

    def join(self, request: Request, memory: PromptCache) -> None:
        """Give ``request`` a row."""
        self._cache.store(len(self.requests), memory)
        self.requests.append(request)
        self._sampler = None

    def _read_prompt(self, prompt: tuple[int, ...]) -> tuple[PromptCache, torch.Tensor]:
        """Equal prompts (a group) share one reading."""
        found = self._prompts.get(prompt)
        if found is None:
            found = self._prompts[prompt] = self._read(prompt)
            if len(self._prompts) > _PROMPTS_KEPT:
                self._prompts.popitem(last=False)
        return found

    def _read(self, tokens: tuple[int, ...] | list[int]) -> tuple[PromptCache, torch.Tensor]:
        # One sequence at a time: its numbers then do not depend on the others.
        cache = PromptCache()
        output = self._model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        self.prefills += 1
        return cache, output.logits[:, -1].float()

    def step(self) -> tuple[list[int], list[float]]:
        """Draw the next token of every request; -1 for one whose logits are not finite. Returns tokens and logprobs by row."""
        requests = self.requests
        count = len(requests)
        lengths = [request.length for request in requests]
        self.peak = max(self.peak, sum(lengths))
        rows = round_up(count, ROWS)
        ids = torch.zeros(rows, 1, dtype=torch.long)
        ids[:count, 0] = torch.tensor([request.tokens[-1] for request in requests])
        positions = torch.zeros(rows, dtype=torch.long)
        positions[:count] = torch.tensor(lengths) - 1
        self._cache.window(rows, positions)
        output = self._model(
            input_ids=ids,
            attention_mask=self._cache.mask(),
            position_ids=positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        if self._sampler is None:
            self._sampler = BatchSampler([r.params for r in requests], [r.seed for r in requests])
        tokens, logprobs = self._sampler(output.logits[:count, -1].float(), lengths)
        for row, token in enumerate(tokens):
            if token < 0:
                self._cache.clear(row)
        return tokens, logprobs

    def keep(self, rows: list[int]) -> None:
        """Go on with ``rows`` only. The last rows move into the gaps, so that running rows are always the first ones."""
        count = len(rows)
        movers = [row for row in rows if row >= count]
        kept = set(rows)
        running = self.requests[:count]
        for gap in range(count):
            if gap not in kept:
                source = movers.pop()
                self._cache.move(source, gap, self.requests[source].length)
                running[gap] = self.requests[source]
        self.requests = running
        self._sampler = None

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy ``weights`` into the model of an empty batch, all or nothing.

        Raises:
            ValueError: the weights do not fit the model.
        """
        copy_weights(self._model, weights)
        self._prompts.clear()
