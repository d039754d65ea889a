"""A small generation engine on CPU: continuous batching of a transformers causal LM, independent of verl and Ray.

One thread owns the model and all state. A public method posts a command to this thread and returns a
:class:`concurrent.futures.Future`. The thread executes the command between two decoding steps.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from rl_accel.lab.cpu_engine.batch import Batch
from rl_accel.lab.cpu_engine.sampling import SamplingParams, derive_seed
from rl_accel.lab.cpu_engine.scheduler import EngineError, EngineStats, Generation, Request, Scheduler

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def _command(method: "Callable[Concatenate[CPUEngine, P], T]") -> "Callable[Concatenate[CPUEngine, P], Future[T]]":
    """Decorator that makes the engine's thread run ``method``. A call returns a future of the result."""

    @wraps(method)
    def post(self: "CPUEngine", /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        future: Future[T] = Future()

        def command() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(method(self, *args, **kwargs))
                except Exception as error:
                    future.set_exception(error)

        self._post(command, future)
        return future

    return post


class CPUEngine:
    """Generation engine with continuous batching over ``model``.

    The engine takes over ``model`` and replaces the model's attention.

    Args:
        model: a transformers causal LM on CPU, in eval mode, with full attention in every layer.
        eos_token_ids: tokens that end a response.
        max_num_seqs: maximum number of requests decoded together; further requests wait in order of arrival.
        max_model_len: maximum number of tokens of prompt and response together.
        seed: seed of the engine. A request without a seed gets a seed derived from the engine's seed and the request id.
        seconds_per_step: minimum seconds of a decoding step; 0 for no minimum. Imitates a GPU engine, whose steps take about the
            same time for few requests as for many.
        kv_tokens: maximum number of tokens (prompts and responses so far) of all running requests together, like the size of a GPU
            engine's key-value cache; None for no limit. At the limit, the youngest request is preempted. It waits at the front of
            the queue, and is prefilled again when there is room. The tokens stay the same; log-probabilities differ by rounding
            only.

    Raises:
        ValueError: the model has layers without full attention, or a limit is out of range.
    """

    def __init__(
        self,
        model: Any,
        eos_token_ids: Iterable[int],
        max_num_seqs: int = 64,
        max_model_len: int = 4096,
        seed: int = 0,
        seconds_per_step: float = 0.0,
        kv_tokens: int | None = None,
    ) -> None:
        if not 0 <= seconds_per_step < 10:
            raise ValueError(f"seconds_per_step wants a number from 0 to 10, found {seconds_per_step!r}")
        if max_model_len < 2:
            raise ValueError(f"max_model_len wants at least 2, found {max_model_len}")
        self._scheduler = Scheduler(max_num_seqs, kv_tokens)
        self._batch = Batch(model, max_num_seqs)
        self._eos = frozenset(eos_token_ids)
        self.max_model_len, self.kv_tokens = max_model_len, kv_tokens
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self._seed = seed
        self.seconds_per_step = seconds_per_step
        self._commands: queue.SimpleQueue[tuple[Callable[[], None], Future[Any]]] = queue.SimpleQueue()
        self._gate = threading.Lock()  # lets no command enter the queue after the engine has stopped
        self._paused = False
        self._stopping = False
        self._closed = False
        self._counts = dict.fromkeys(("tokens", "completed", "aborted", "failed"), 0)
        self._thread = threading.Thread(target=self._loop, name="rl-accel-cpu-engine", daemon=True)
        self._thread.start()

    # Methods for any thread

    def submit(self, request_id: str, prompt_ids: Iterable[int], params: SamplingParams) -> "Future[Generation]":
        """Queues a request and returns the future of its output. Cancelling the future drops the request.

        Raises:
            ValueError: the prompt is empty, leaves no room for a response or has a token outside the vocabulary, or prompt and
                longest possible response exceed ``kv_tokens``.
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
        request = Request(request_id, prompt, params, seed)
        self._scheduler.check_fits(request, min(len(prompt) + params.max_tokens, self.max_model_len))
        self._post(lambda: self._scheduler.add(request), request.future)
        return request.future

    def ends(self, token: int, params: SamplingParams) -> bool:
        """Returns whether ``token`` is an end token of a request with the sampling parameters ``params``."""
        return (token in self._eos and not params.ignore_eos) or token in params.stop_token_ids

    @_command
    def abort(self, request_id: str) -> int:
        """Ends every request with the id ``request_id`` as "aborted". The future gives the number of ended requests."""
        return self._abort(lambda request: request.request_id == request_id)

    @_command
    def pause(self) -> int:
        """Ends every request as "aborted", and holds later requests until :meth:`resume`. The future gives the number of ended
        requests."""
        self._paused = True
        return self._abort(lambda request: True)

    @_command
    def resume(self) -> None:
        """Resumes decoding after :meth:`pause`."""
        self._paused = False

    @_command
    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copies ``weights`` (parameter name -> tensor) into the model. Nothing is written unless all tensors fit.

        The future fails with :class:`EngineError` while a request is decoding or preempted, and with ValueError for a missing name,
        an unknown name or a different shape.
        """
        if begun := len(self._batch.requests) + self._scheduler.preempted:
            raise EngineError(f"{begun} requests are decoding; pause the engine before it gets new weights")
        self._batch.load(weights)

    @_command
    def stats(self) -> EngineStats:
        """Returns the counts of this engine."""
        return EngineStats(
            **self._counts,
            prefills=self._batch.prefills,
            preemptions=self._scheduler.preemptions,
            running=len(self._batch.requests),
            waiting=len(self._scheduler.waiting),
            paused=self._paused,
        )

    def close(self) -> None:
        """Aborts all requests and ends the engine's thread. Further commands fail with :class:`EngineError`."""
        with contextlib.suppress(EngineError):
            self._stop()
        self._thread.join()

    def _post(self, command: Callable[[], None], future: "Future[Any]") -> None:
        with self._gate:
            if self._closed:
                raise EngineError("the engine is closed")
            self._commands.put((command, future))

    # Methods for the thread of the engine only

    @torch.inference_mode()
    def _loop(self) -> None:
        try:
            while not self._stopping:
                self._run_once()
        except Exception as error:
            logger.exception("the engine thread failed; its requests fail with it")
            for request in (*self._batch.requests, *self._scheduler.waiting):
                if not request.future.done():
                    self._fail(request, error)
        finally:
            with self._gate:
                self._closed = True
            while not self._commands.empty():
                _, future = self._commands.get()
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineError("the engine is closed"))

    def _run_once(self) -> None:
        """Executes queued commands, admits waiting requests, and decodes one token of each running request."""
        self._run_commands(wait=self._paused or not (self._scheduler.waiting or self._batch.requests))
        if self._paused:
            return
        self._drop_cancelled()
        while (request := self._scheduler.next(self._batch.requests)) is not None:
            self._admit(request)
        if self._batch.requests:
            due = time.monotonic() + self.seconds_per_step
            self._decode()
            time.sleep(max(0.0, due - time.monotonic()))

    def _run_commands(self, wait: bool) -> None:
        while wait or not self._commands.empty():
            command, _ = self._commands.get()
            command()
            wait = False

    def _admit(self, request: Request) -> None:
        try:
            memory, token, logprob = self._batch.begin(request)
            if not self._append(request, token, logprob):
                self._batch.join(request, memory)
        except Exception as error:
            self._fail(request, error)

    def _decode(self) -> None:
        self._keep(self._scheduler.preempt(self._batch.requests))
        running = self._batch.requests
        try:
            tokens, logprobs = self._batch.step()
        except Exception as error:
            logger.exception("a decoding step failed; its %d requests fail with it", len(running))
            for request in running:
                self._fail(request, error)
            self._batch.keep([])
            return
        drawn = zip(running, tokens, logprobs, strict=True)
        self._keep([row for row, new in enumerate(drawn) if not self._append(*new)])

    def _keep(self, rows: list[int]) -> None:
        if len(rows) < len(self._batch.requests):
            self._batch.keep(rows)

    def _append(self, request: Request, token: int, logprob: float) -> bool:
        """Adds a drawn token to the response of ``request``. Returns whether the request has ended."""
        if token < 0:
            self._fail(request, EngineError(f"request {request.request_id}: the model gave logits that are not finite"))
            return True
        request.tokens.append(token)
        request.logprobs.append(logprob)
        self._counts["tokens"] += 1
        params = request.params
        if self.ends(token, params) or len(request.tokens) >= params.max_tokens or request.length >= self.max_model_len:
            self._finish(request, "completed")
            return True
        return False

    def _finish(self, request: Request, reason: str) -> None:
        self._counts[reason] += 1
        logprobs = request.logprobs if request.params.logprobs else None
        if request.future.set_running_or_notify_cancel():
            request.future.set_result(Generation(request.tokens, logprobs, reason, request.preemptions))

    def _fail(self, request: Request, error: Exception) -> None:
        self._counts["failed"] += 1
        if request.future.set_running_or_notify_cancel():
            request.future.set_exception(error)

    def _drop_cancelled(self) -> None:
        if any(r.future.cancelled() for queue in (self._batch.requests, self._scheduler.waiting) for r in queue):
            self._abort(lambda request: request.future.cancelled())

    def _abort(self, chosen: Callable[[Request], bool]) -> int:
        out = [request for request in self._batch.requests if chosen(request)]
        self._keep([row for row, request in enumerate(self._batch.requests) if not chosen(request)])
        out += self._scheduler.drop(chosen)
        for request in out:
            self._finish(request, "aborted")
        return len(out)

    @_command
    def _stop(self) -> None:
        self._abort(lambda request: True)
        self._stopping = True
