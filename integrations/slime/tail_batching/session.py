"""One response in the making, and the generate function that slime is given for it."""

import asyncio
import inspect
import itertools
import time
import uuid
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from slime.rollout import sglang_rollout
from slime.utils.misc import load_function
from slime.utils.types import Sample

from rl_accel.rollout.driver import Event

GENERATE = f"{__name__}.generate"


@dataclass(eq=False)
class Session:
    """A response in the making. Watches its own requests; see :class:`~rl_accel.patches.slime.requests.Watcher`."""

    response_id: int
    prompt_id: str
    sample: Any
    report: Callable[[Event], None]
    task: "asyncio.Task[Any] | None" = None
    judged: "asyncio.Future[None] | None" = None
    requests: set[str] = field(default_factory=set)
    result: Any = None
    tokens: int = 0
    retractions: int | None = None
    began: float = 0.0
    cancelled_at: float | None = None
    abort_again: float = 0.0

    def begin(self) -> str:
        if self.cancelled_at is not None:  # between two turns
            raise asyncio.CancelledError
        request_id = f"rl-accel-{self.response_id}-{uuid.uuid4().hex}"
        self.requests.add(request_id)
        return request_id

    def end(self, request_id: str, answer: Any) -> None:
        self.requests.discard(request_id)
        found = answer.get("meta_info", {}).get("num_retractions") if isinstance(answer, dict) else None
        if found is not None:
            self.retractions = (self.retractions or 0) + int(found)

    def finish(self, result: Any) -> None:
        """Generation is over. Raises CancelledError if the response was cut off, RuntimeError if its engine gave up."""
        self.result = result
        leaves = list(samples_of(result))
        self.tokens = sum(sample.response_length for sample in leaves)
        if self.cancelled_at is not None:
            raise asyncio.CancelledError
        if not leaves:
            raise RuntimeError("the generate function returned no sample")
        if any(sample.status is Sample.Status.ABORTED for sample in leaves):
            raise RuntimeError(f"the engine aborted the response after {self.tokens} tokens")
        self.report(Event("generated", self.response_id, self.tokens))


SESSION: ContextVar[Session] = ContextVar("session")


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """The user's ``--custom-generate-function-path``, else slime's own; tells when generation ends, before any judge begins."""
    session = SESSION.get()
    sample.generate_function_path = None
    path = args.custom_generate_function_path
    function = sglang_rollout.generate if path is None else load_function(path)
    extra = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
    session.began = time.monotonic()
    result = await function(args, sample, sampling_params, **extra)
    session.finish(result)
    return result


def samples_of(result: Any) -> Iterator[Any]:
    """Return the samples of a response: one, or what a generate function has fanned it out to."""
    return itertools.chain.from_iterable(map(samples_of, result)) if isinstance(result, list) else iter([result])
