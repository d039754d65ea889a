"""Makes vLLM return a response to verl when the response is finished, not after each token.

verl waits for whole responses, but requests an output after every token. vLLM's server process builds each of these outputs in its
only thread, which limits the engine's speed when many requests run. With ``RequestOutputKind.DELTA`` and a ``stream_interval``,
vLLM sends the first token, which tells verl that the request was admitted, and later the remaining tokens. This module joins both
parts into the output that verl expects.
"""

import contextlib
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any

from rl_accel.errors import PatchRefused
from rl_accel.patches.patch import Patch
from rl_accel.patches.view import View

NEVER = 1 << 30
"""Value for vLLM's ``stream_interval``, the number of tokens between two outputs: more than any response has."""


def _at_the_end(original: Any, _settings: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    has_interval = "stream_interval" in SamplingParams.__struct_fields__
    if not has_interval:
        from vllm.v1.engine.output_processor import OutputProcessor

        if "stream_interval" not in inspect.signature(OutputProcessor).parameters:
            raise PatchRefused("vLLM has no stream_interval, neither of a request nor of an engine")
    kind = RequestOutputKind.DELTA

    async def generate(self: Any, prompt_ids: Any, sampling_params: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self._disaggregation_role != "null" or sampling_params.keys() & {"output_kind", "n", "prompt_logprobs"}:
            return await original(self, prompt_ids, sampling_params, *args, **kwargs)
        params = {**sampling_params, "output_kind": kind}
        if not params.get("stop"):  # verl uses only the tokens; vLLM needs the text to find stop strings
            params.setdefault("detokenize", False)
        if has_interval:
            params["stream_interval"] = NEVER
        server = View(self, engine=View(self.engine, generate=_joined(self.engine.generate)))
        with contextlib.nullcontext() if has_interval else _never_between(self.engine.output_processor):
            return await original(server, prompt_ids, params, *args, **kwargs)

    return generate


@contextlib.contextmanager
def _never_between(processor: Any) -> Iterator[None]:
    """Sets the ``stream_interval`` of an engine's output ``processor`` to ``NEVER`` inside the ``with`` block.

    For vLLM before 0.27, where all requests share one interval. If blocks overlap, the end of the last block restores the interval.
    """
    running, interval = getattr(processor, "_rl_accel_blocks", (0, processor.stream_interval))
    processor._rl_accel_blocks = (running + 1, interval)
    processor.stream_interval = NEVER
    try:
        yield
    finally:
        running, interval = processor._rl_accel_blocks
        processor._rl_accel_blocks = running - 1, interval
        if running == 1:
            del processor._rl_accel_blocks
            processor.stream_interval = interval


def _joined(generate: Any) -> Any:
    """Returns a wrapper of ``AsyncLLM.generate`` whose outputs hold all tokens of the response so far, not only the new tokens."""

    async def joined(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        tokens: list[int] = []
        logprobs: list[Any] = []
        async with contextlib.aclosing(generate(*args, **kwargs)) as outputs:
            async for output in outputs:
                if output.outputs:
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
        params=("self", "prompt_ids", "sampling_params", "*"),  # further arguments are passed on
        make=_at_the_end,
        fingerprints=("35068cca988bd96e871621af32e92aecff5f6913fba26d8c37a3aedc046826a0",),
        uses=("_disaggregation_role", "engine"),
        no_seam="the kind of output has no key in verl's configuration, and vLLM's default is every token",
        remove_when="verl asks vLLM for final outputs only",
    ),
)
