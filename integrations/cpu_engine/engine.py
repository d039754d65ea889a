"""A small generation engine on CPU: batched decoding of a transformers causal LM with requests joining and leaving.

It knows nothing of verl or Ray. One thread owns the model and all state; every public method posts a command that this thread
carries out between two decoding steps and returns a :class:`concurrent.futures.Future`.
"""

import contextlib
import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import torch

from rl_accel.integrations.cpu_engine.requests import EngineError, EngineStats, Generation, Request
from rl_accel.integrations.cpu_engine.sampling import BatchSampler, SamplingParams, derive_seed
from rl_accel.integrations.cpu_engine.slots import ROWS, PromptCache, SlotCache, round_up
from rl_accel.integrations.cpu_engine.weights import copy_weights

logger = logging.getLogger(__name__)

_PROMPTS_KEPT = 64


class Engine:
    """Continuous batching over ``model``, which must be in eval mode with full attention in every layer.

    The model is the engine's from then on: its attention is replaced by one that decodes over the engine's memory.

    Args:
        model: a transformers causal LM on CPU.
        eos_token_ids: tokens that end a response.
        max_num_seqs: requests decoded together; further ones wait in order of arrival.
        max_model_len: largest length of prompt and response together.
        seed: part of the seed of requests that bring none.
        seconds_per_step: least time of a decoding step, 0 for as fast as it goes. A GPU engine takes about the same time for
            a token of few requests as of many, and leaves the processor to others meanwhile; so does a paced engine.

    Raises:
        ValueError: the model has an attention layout this engine does not do, or a limit is out of range.
    """

    def __init__(
        self,
        model: Any,
        eos_token_ids: Iterable[int],
        max_num_seqs: int = 64,
        max_model_len: int = 4096,
        seed: int = 0,
        seconds_per_step: float = 0.0,
    ) -> None:
        if not 0 <= seconds_per_step < 10:
            raise ValueError(f"seconds_per_step wants a number from 0 to 10, found {seconds_per_step!r}")
        if max_num_seqs < 1 or max_model_len < 2:
            raise ValueError(
                f"max_num_seqs wants at least 1 and max_model_len at least 2, found {max_num_seqs}, {max_model_len}"
            )
        kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ValueError(f"the CPU engine decodes models with full attention only, found layers of {sorted(kinds)}")
        from rl_accel.integrations.cpu_engine import attention  # imports transformers

        model.set_attn_implementation(attention.register())
        self._model = model
        self._eos = frozenset(eos_token_ids)
        self._max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self._seed = seed
        self.seconds_per_step = seconds_per_step
        self._commands: queue.SimpleQueue[tuple[Callable[[], None], Future[Any]]] = queue.SimpleQueue()
        self._gate = threading.Lock()  # nothing is put into the queue after it was emptied for the last time
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._sampler: BatchSampler | None = None
        self._cache = SlotCache(max_num_seqs)
        self._prompts: OrderedDict[tuple[int, ...], tuple[PromptCache, torch.Tensor]] = OrderedDict()
        self._paused = False
        self._stopping = False
        self._closed = False
        self._counts = dict.fromkeys(("tokens", "decode_steps", "prefills", "completed", "aborted", "failed"), 0)
        self._thread = threading.Thread(target=self._loop, name="rl-accel-cpu-engine", daemon=True)
        self._thread.start()

    # -- commands: any thread ------------------------------------------------------------------------------------

    def submit(
        self,
        request_id: str,
        prompt_ids: Iterable[int],
        params: SamplingParams,
        watch: Callable[[int, float], None] | None = None,
    ) -> "Future[Generation]":
        """Queue a request. Cancelling the returned future drops the request.

        ``watch(token, logprob)`` is called for each token as it is drawn, in the engine's thread, and must be quick.

        Raises:
            ValueError: the prompt is empty, leaves no room for a token, or holds an id outside the vocabulary.
        """
        prompt = [int(token) for token in prompt_ids]
        if not prompt:
            raise ValueError(f"request {request_id}: the prompt is empty")
        if len(prompt) >= self.max_model_len:
            raise ValueError(
                f"request {request_id}: a prompt of {len(prompt)} tokens leaves no room below max_model_len={self.max_model_len}"
            )
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise ValueError(f"request {request_id}: a prompt token is outside the vocabulary of {self.vocab_size}")
        seed = derive_seed(self._seed, request_id) if params.seed is None else params.seed % 2**64
        request = Request(request_id, prompt, params, seed, watch=watch)
        self._post(lambda: self._waiting.append(request), request.future)
        return request.future

    def ends(self, token: int, params: SamplingParams) -> bool:
        """Whether ``token`` ends a response."""
        return (token in self._eos and not params.ignore_eos) or token in params.stop_token_ids

    def abort(self, request_id: str) -> "Future[int]":
        """End every request with this id as "aborted"; resolves to how many there were."""
        return self._call(lambda: self._abort(lambda request: request.request_id == request_id))

    def abort_all(self) -> "Future[int]":
        """End every request as "aborted"; resolves to how many there were. Later ones are not held."""
        return self._call(lambda: self._abort(lambda request: True))

    def pause(self) -> "Future[int]":
        """End every request as "aborted" and hold later ones until :meth:`resume`; resolves to how many were ended."""
        return self._call(self._pause)

    def resume(self) -> "Future[None]":
        """Go on after :meth:`pause`."""
        return self._call(self._resume)

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> "Future[None]":
        """Copy ``weights`` (name -> tensor) into the model. Nothing is written unless all of them fit.

        The future fails with :class:`EngineError` while a request is decoding, and with ValueError for a name that is missing
        or unknown, or a shape that differs.
        """
        return self._call(lambda: self._load(weights))

    def stats(self) -> "Future[EngineStats]":
        """Resolve to the counts of this engine."""
        return self._call(
            lambda: EngineStats(
                **self._counts, running=len(self._running), waiting=len(self._waiting), paused=self._paused
            )
        )

    def close(self) -> None:
        """Abort everything and end the thread. Further commands fail with :class:`EngineError`."""
        with contextlib.suppress(EngineError):
            self._call(self._close)
        self._thread.join()

    def _call(self, action: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = action()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._post(command, future)
        return future

    def _post(self, command: Callable[[], None], future: "Future[Any]") -> None:
        with self._gate:
            if self._closed:
                raise EngineError("the engine is closed")
            self._commands.put((command, future))

    # -- the engine thread ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _loop(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except Exception as error:
            logger.exception("the engine thread failed; its requests fail with it")
            for request in (*self._running, *self._waiting):
                if not request.future.done():
                    self._fail(request, error)
        finally:
            with self._gate:
                self._closed = True
            while not self._commands.empty():
                _, future = self._commands.get()
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineError("the engine is closed"))

    def _turn(self) -> None:
        self._obey(wait=self._paused or not (self._waiting or self._running))
        if self._paused:
            return
        self._drop_cancelled()
        while self._waiting and len(self._running) < self._max_num_seqs:
            self._admit(self._waiting.popleft())
        if self._running:
            due = time.monotonic() + self.seconds_per_step
            self._decode()
            time.sleep(max(0.0, due - time.monotonic()))

    def _obey(self, wait: bool) -> None:
        while wait or not self._commands.empty():
            command, _ = self._commands.get()
            command()
            wait = False

    def _admit(self, request: Request) -> None:
        row = len(self._running)
        try:
            prompt, logits = self._prefill(tuple(request.prompt))
            (token,), (logprob,) = BatchSampler([request.params], [request.seed])(logits, [request.length])
            if self._append(request, token, logprob):
                return
            self._cache.store(row, prompt)
        except Exception as error:
            self._fail(request, error)
            return
        self._running.append(request)
        self._sampler = None

    def _prefill(self, prompt: tuple[int, ...]) -> tuple[PromptCache, torch.Tensor]:
        # One prompt at a time: its numbers then do not depend on the other prompts. Equal prompts (a group) share one.
        found = self._prompts.get(prompt)
        if found is None:
            cache = PromptCache()
            output = self._model(
                input_ids=torch.tensor([prompt]), past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            found = self._prompts[prompt] = (cache, output.logits[:, -1].float())
            self._counts["prefills"] += 1
            if len(self._prompts) > _PROMPTS_KEPT:
                self._prompts.popitem(last=False)
        return found

    def _decode(self) -> None:
        count = len(self._running)
        try:
            rows = round_up(count, ROWS)
            ids = torch.zeros(rows, 1, dtype=torch.long)
            ids[:count, 0] = torch.tensor([request.tokens[-1] for request in self._running])
            positions = torch.zeros(rows, dtype=torch.long)
            positions[:count] = torch.tensor([request.length - 1 for request in self._running])
            self._cache.window(rows, positions)
            output = self._model(
                input_ids=ids,
                attention_mask=self._cache.mask(),
                position_ids=positions[:, None],
                past_key_values=self._cache,
                use_cache=True,
            )
            if self._sampler is None:
                self._sampler = BatchSampler([r.params for r in self._running], [r.seed for r in self._running])
            logits = output.logits[:count, -1].float()
            tokens, logprobs = self._sampler(logits, [request.length for request in self._running])
        except Exception as error:
            logger.exception("a decoding step failed; its %d requests fail with it", count)
            for request in self._running:
                self._fail(request, error)
            self._keep([])
            return
        self._counts["decode_steps"] += 1
        ended = [
            self._append(request, token, logprob)
            for request, token, logprob in zip(self._running, tokens, logprobs, strict=True)
        ]
        for row, token in enumerate(tokens):
            if token < 0:
                self._cache.clear(row)
        if any(ended):
            self._keep([row for row, over in enumerate(ended) if not over])

    def _append(self, request: Request, token: int, logprob: float) -> bool:
        """Record a token; True if the request is over."""
        if token < 0:
            self._fail(request, EngineError(f"request {request.request_id}: the model gave logits that are not finite"))
            return True
        request.tokens.append(token)
        request.logprobs.append(logprob)
        self._counts["tokens"] += 1
        if request.watch is not None:
            request.watch(token, logprob)
        params = request.params
        if self.ends(token, params) or len(request.tokens) >= params.max_tokens or request.length >= self.max_model_len:
            self._finish(request, "completed")
            return True
        return False

    def _keep(self, rows: list[int]) -> None:
        """Go on with ``rows`` only. The last rows move into the gaps, so that running rows are always the first ones."""
        count = len(rows)
        movers = [row for row in rows if row >= count]
        kept = set(rows)
        running = self._running[:count]
        for gap in range(count):
            if gap not in kept:
                source = movers.pop()
                self._cache.move(source, gap, self._running[source].length)
                running[gap] = self._running[source]
        self._running = running
        self._sampler = None

    def _finish(self, request: Request, reason: str) -> None:
        self._counts[reason] += 1
        logprobs = request.logprobs if request.params.logprobs else None
        if request.future.set_running_or_notify_cancel():
            request.future.set_result(Generation(request.tokens, logprobs, reason))

    def _fail(self, request: Request, error: Exception) -> None:
        self._counts["failed"] += 1
        if request.future.set_running_or_notify_cancel():
            request.future.set_exception(error)

    def _drop_cancelled(self) -> None:
        if any(r.future.cancelled() for r in self._running) or any(r.future.cancelled() for r in self._waiting):
            self._abort(lambda request: request.future.cancelled())

    def _abort(self, chosen: Callable[[Request], bool]) -> int:
        out = [request for request in (*self._running, *self._waiting) if chosen(request)]
        self._waiting = deque(request for request in self._waiting if not chosen(request))
        self._keep([row for row, request in enumerate(self._running) if not chosen(request)])
        for request in out:
            self._finish(request, "aborted")
        return len(out)

    def _pause(self) -> int:
        self._paused = True
        return self._abort(lambda request: True)

    def _resume(self) -> None:
        self._paused = False

    def _close(self) -> None:
        self._abort(lambda request: True)
        self._stopping = True

    def _load(self, weights: Mapping[str, torch.Tensor]) -> None:
        if self._running:
            raise EngineError(
                f"{len(self._running)} requests are decoding; pause the engine before it gets new weights"
            )
        copy_weights(self._model, weights)
        self._prompts.clear()
