"""A small generation engine on CPU: continuous batching of a transformers causal LM, independent of verl and Ray.

One thread owns the model and all state. A public method posts a command to this thread and returns at once, with a
:class:`concurrent.futures.Future` of the result. A decoding step is a command that posts the next step. The thread executes
commands in the order in which they were posted, and so between two steps.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from verl_on_cpu.batch import Batch
from verl_on_cpu.requests import EngineError, EngineStats, Generation, Request
from verl_on_cpu.sampling import SamplingParams, derive_seed

logger = logging.getLogger("rl_accel")

P = ParamSpec("P")
T = TypeVar("T")


def _command(method: "Callable[Concatenate[CPUEngine, P], T]") -> "Callable[Concatenate[CPUEngine, P], Future[T]]":
    """Decorator that makes the engine's thread run ``method``. A call returns a future of the result or the error."""

    @wraps(method)
    def post(self: "CPUEngine", /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        return self._post(partial(method, self, *args, **kwargs))

    return post


class CPUEngine:
    """Generation engine with continuous batching over ``model``. The engine takes over the model and replaces its attention.

    Args:
        model: a transformers causal LM on CPU, in eval mode, with full attention in every layer.
        eos_token_ids: tokens that end a response.
        max_num_seqs: maximum number of requests decoded together; further requests wait in order of arrival.
        max_model_len: maximum number of tokens of prompt and response together.
        seed: seed of the engine. A request without a seed gets a seed derived from the engine's seed and the request id.
        seconds_per_step: minimum seconds of a decoding step. Imitates a GPU engine, whose steps take about the same time for few
            requests as for many.

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
    ) -> None:
        if not 0 <= seconds_per_step < 10:
            raise ValueError(f"seconds_per_step wants a number from 0 to 10, found {seconds_per_step!r}")
        if max_model_len < 2:
            raise ValueError(f"max_model_len wants at least 2, found {max_model_len}")
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs wants at least 1, found {max_num_seqs}")
        self._slots = max_num_seqs
        self._waiting: deque[Request] = deque()
        self._batch = Batch(model, max_num_seqs)
        self._eos = frozenset(eos_token_ids)
        self._longest = max_model_len
        self._seed = seed
        self._seconds_per_step = seconds_per_step
        self._vocab_size = int(model.get_input_embeddings().num_embeddings)
        self._thread = ThreadPoolExecutor(1, "rl-accel-cpu-engine")
        self._paused = self._closed = False
        self._step_is_posted = False
        self._counts = dict.fromkeys(("tokens", "completed", "aborted", "failed"), 0)

    # Methods for any thread

    def submit(self, request_id: str, prompt_ids: Iterable[int], params: SamplingParams) -> "Future[Generation]":
        """Queues a request and returns the future of its output. Cancelling the future drops the request.

        Raises:
            ValueError: the prompt is empty, leaves no room for a response or has a token outside the vocabulary.
        """
        prompt = [int(token) for token in prompt_ids]
        if not prompt:
            raise ValueError(f"request {request_id}: the prompt is empty")
        if len(prompt) >= self._longest:
            raise ValueError(
                f"request {request_id}: a prompt of {len(prompt)} tokens leaves no room below max_model_len={self._longest}"
            )
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            raise ValueError(f"request {request_id}: a prompt token is outside the vocabulary of {self._vocab_size}")
        seed = derive_seed(self._seed, request_id) if params.seed is None else params.seed % 2**64
        request = Request(request_id, prompt, params, seed)
        self._post(partial(self._add, request))
        return request.future

    @_command
    def abort(self, request_id: str) -> int:
        """Ends every request with the id ``request_id`` as "aborted". Returns the number of ended requests."""
        return self._abort(lambda request: request.request_id == request_id)

    @_command
    def pause(self) -> int:
        """Ends every request as "aborted", and returns the number of these. Later requests wait for :meth:`resume`."""
        self._paused = True
        return self._abort(lambda request: True)

    @_command
    def resume(self) -> None:
        """Resumes decoding after :meth:`pause`."""
        self._paused = False

    @_command
    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copies ``weights`` (parameter name -> tensor) into the model. Nothing is written unless all tensors fit.

        Raises:
            EngineError: a request is decoding.
            ValueError: a name is missing or unknown, or a shape differs.
        """
        if self._batch.requests:
            raise EngineError(
                f"{len(self._batch.requests)} requests are decoding; pause the engine before it gets new weights"
            )
        self._batch.load(weights)

    @_command
    def stats(self) -> EngineStats:
        return EngineStats(
            **self._counts,
            prefills=self._batch.prefills,
            running=len(self._batch.requests),
            waiting=len(self._waiting),
            paused=self._paused,
        )

    def close(self) -> None:
        """Aborts all requests and ends the engine's thread. Further commands fail with :class:`EngineError`."""
        with contextlib.suppress(EngineError):
            self._end()
        self._thread.shutdown()

    def _post(self, action: Callable[[], T]) -> "Future[T]":
        try:
            return self._thread.submit(self._execute, action)
        except RuntimeError:
            raise EngineError("the engine is closed") from None

    # Methods for the thread of the engine only

    @torch.inference_mode()
    def _execute(self, action: Callable[[], T]) -> T:
        result = action()
        self._post_step()
        return result

    def _post_step(self) -> None:
        """Posts a decoding step to the engine's thread if there are requests and no step is posted yet."""
        if not (self._paused or self._step_is_posted) and (self._waiting or self._batch.requests):
            with contextlib.suppress(RuntimeError):  # this process is exiting
                self._thread.submit(self._step)
                self._step_is_posted = True

    @torch.inference_mode()
    def _step(self) -> None:
        """Admits waiting requests, and decodes one token of each running request."""
        self._step_is_posted = False
        if self._paused:
            return
        try:
            self._drop_cancelled()
            while self._waiting and len(self._batch.requests) < self._slots:
                self._admit(self._waiting.popleft())
            if self._batch.requests:
                due = time.monotonic() + self._seconds_per_step
                self._decode()
                time.sleep(max(0.0, due - time.monotonic()))
            self._post_step()
        except Exception as error:
            logger.exception("the engine thread failed; its requests fail with it")
            self._closed = True
            self._thread.shutdown(wait=False)
            for request in (*self._batch.requests, *self._waiting):
                if not request.future.done():
                    self._fail(request, error)

    def _add(self, request: Request) -> None:
        if self._closed:  # by a command that was posted earlier
            self._fail(request, EngineError("the engine is closed"))
        else:
            self._waiting.append(request)

    def _admit(self, request: Request) -> None:
        try:
            memory, token, logprob = self._batch.begin(request)
            if not self._append(request, token, logprob):
                self._batch.join(request, memory)
        except Exception as error:
            self._fail(request, error)

    def _decode(self) -> None:
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
        self._batch.keep([row for row, new in enumerate(drawn) if not self._append(*new)])

    def _append(self, request: Request, token: int, logprob: float) -> bool:
        """Adds a drawn token to the response of ``request``. Returns whether the request has ended."""
        if token < 0:
            self._fail(request, EngineError(f"request {request.request_id}: the model gave logits that are not finite"))
            return True
        request.tokens.append(token)
        request.logprobs.append(logprob)
        self._counts["tokens"] += 1
        params = request.params
        ended = (
            (token in self._eos and not params.ignore_eos)
            or token in params.stop_token_ids
            or len(request.tokens) >= params.max_tokens
            or request.length >= self._longest
        )
        if ended:
            self._finish(request, "completed")
        return ended

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
        self._abort(lambda request: request.future.cancelled())

    def _abort(self, chosen: Callable[[Request], bool]) -> int:
        requests = self._batch.requests
        # asked once for each request, because another thread may cancel a request meanwhile
        ended = [request for request in (*requests, *self._waiting) if chosen(request)]
        self._batch.keep([row for row, request in enumerate(requests) if request not in ended])
        self._waiting = deque(request for request in self._waiting if request not in ended)
        for request in ended:
            self._finish(request, "aborted")
        return len(ended)

    @_command
    def _end(self) -> None:
        self._abort(lambda request: True)
        self._closed = True
