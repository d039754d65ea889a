"""Makes vLLM return a response to verl when the response is finished, not after each token.

verl waits for whole responses, but requests an output after every token. vLLM's server process builds each of these outputs in its
only thread, which limits the engine's speed when many requests run. With ``RequestOutputKind.DELTA`` and a ``stream_interval``,
vLLM sends the first token, which tells verl that the request was admitted, and later the remaining tokens. This module joins both
parts into the output that verl expects.
"""

import contextlib
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Any

from rl_accel.patches.patch import Patch

NEVER = 1 << 30
"""Value for vLLM's ``stream_interval``, in tokens: longer than any response, so that no output is sent in between."""

_in_parts: ContextVar[bool] = ContextVar("in_parts", default=False)


def _at_the_end(original: Any, _settings: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    has_interval = "stream_interval" in SamplingParams.__struct_fields__

    async def generate(
        self: Any, prompt_ids: Any, sampling_params: dict[str, Any], request_id: str, *args: Any, **kwargs: Any
    ) -> Any:
        if self._disaggregation_role != "null" or sampling_params.keys() & {"output_kind", "n", "prompt_logprobs"}:
            return await original(self, prompt_ids, sampling_params, request_id, *args, **kwargs)
        params = {**sampling_params, "output_kind": RequestOutputKind.DELTA}
        if not params.get("stop"):  # verl uses only the tokens; vLLM needs the text to find stop strings
            params.setdefault("detokenize", False)
        if has_interval:
            params["stream_interval"] = NEVER
        with _joining(self.engine, None if has_interval else self.engine.output_processor):
            return await original(self, prompt_ids, params, request_id, *args, **kwargs)

    return generate


@contextlib.contextmanager
def _joining(engine: Any, processor: Any) -> Iterator[None]:
    """Replaces ``generate`` of ``engine`` (vLLM's ``AsyncLLM``), so that partial outputs of requests in the block are joined.

    Blocks of several requests may overlap. When the last block ends, the original ``engine.generate`` is restored. ``processor``:
    the engine's output processor, whose ``stream_interval`` is changed too; None if each request has its own.
    """
    if (joined := getattr(engine, "_rl_accel_joined", None)) is None:
        joined = engine._rl_accel_joined = _joined(engine.generate)
        joined.running, joined.replaced = 0, vars(engine).get("generate")
        engine.generate = joined
        if processor is not None:
            joined.interval, processor.stream_interval = processor.stream_interval, NEVER
    joined.running += 1
    token = _in_parts.set(True)
    try:
        yield
    finally:
        _in_parts.reset(token)
        joined.running -= 1
        if not joined.running and engine.generate is joined:  # else other code has wrapped ``joined``, which then stays
            del engine.generate, engine._rl_accel_joined
            if joined.replaced is not None:
                engine.generate = joined.replaced
            if processor is not None:
                processor.stream_interval = joined.interval


def _joined(generate: Any) -> Any:
    """Returns a wrapper of ``AsyncLLM.generate`` whose outputs hold all tokens of the response so far.

    vLLM puts only the new tokens into an output of the kind ``DELTA``. Requests outside :func:`_joining` are not changed.
    """

    async def joined(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        in_parts = _in_parts.get()
        tokens: list[int] = []
        logprobs: list[Any] = []
        async with contextlib.aclosing(generate(*args, **kwargs)) as outputs:
            async for output in outputs:
                if in_parts and output.outputs:
                    (part,) = output.outputs
                    tokens += part.token_ids
                    part.token_ids = tokens
                    if part.logprobs is not None:
                        logprobs += part.logprobs
                        part.logprobs = logprobs
                yield output

    return joined


SWITCHES = (
    Patch(
        name="verl.final_output",
        target="verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.generate",
        supports="verl>=0.9",
        params=("self", "prompt_ids", "sampling_params", "request_id", "*"),  # further arguments are passed on
        make=_at_the_end,
        fingerprints=("35068cca988bd96e871621af32e92aecff5f6913fba26d8c37a3aedc046826a0",),
        uses=("_disaggregation_role", "engine"),
        no_seam="the kind of output has no key in verl's configuration, and vLLM's default is every token",
        remove_when="verl asks vLLM for final outputs only",
    ),
)
