"""Tests that parts of a response are joined to vLLM's own output, and that other requests are untouched."""

import asyncio
import sys
from types import SimpleNamespace

import pytest

from rl_accel.errors import PatchRefused
from rl_accel.patches.upstream import require_names
from rl_accel.patches.verl import final_output

PARTS = [([5], [{5: -0.1}]), ([6, 7], [{6: -0.2}, {7: -0.3}]), ([], [])]


class Engine:
    """Yields ``parts`` of a response, and remembers that it was closed."""

    def __init__(self, parts):
        self.parts, self.closed = parts, False

    async def generate(self, prompt):
        try:
            for tokens, logprobs in self.parts:
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)], prompt=prompt)
        finally:
            self.closed = True


def seen(parts):
    async def collect():
        joined = final_output._joined(Engine(parts).generate)
        return [
            (list(part.token_ids), None if part.logprobs is None else list(part.logprobs))
            async for output in joined(prompt="p")
            for part in output.outputs
        ]

    return asyncio.run(collect())


def test_each_output_has_all_tokens_so_far():
    whole = [5, 6, 7], [{5: -0.1}, {6: -0.2}, {7: -0.3}]
    assert seen(PARTS) == [([5], [{5: -0.1}]), whole, whole]
    assert seen([([5], None), ([6], None)]) == [([5], None), ([5, 6], None)], "none were asked for"


def test_a_request_that_is_dropped_ends_at_once():
    async def drop():
        engine = Engine(PARTS)
        outputs = final_output._joined(engine.generate)("p")
        await anext(outputs)
        await outputs.aclose()
        return engine.closed

    assert asyncio.run(drop())


@pytest.mark.parametrize("has_interval", [True, False])
def test_requests_of_others_pass_as_they_are_and_when_the_last_has_ended_the_engine_is_as_it_was(
    monkeypatch, has_interval
):
    fields = {"stream_interval": ()} if has_interval else {}
    parameters = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta"))
    vllm = SimpleNamespace(SamplingParams=SimpleNamespace(__struct_fields__=fields))
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", parameters)
    processors = SimpleNamespace(OutputProcessor=lambda tokenizer, stream_interval=1: None)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.output_processor", processors)
    (patch,) = final_output.SWITCHES
    engine, processor = Engine(PARTS), SimpleNamespace(stream_interval=1)
    engine.output_processor = processor
    before = dict(vars(engine))
    seen_intervals = []

    async def of_verl(server, prompt_ids, sampling_params, request_id):
        outputs = []
        server.requests += 1
        assert [output.outputs[0].token_ids async for output in engine.generate("p")] == [ids for ids, _ in PARTS]
        async for output in server.engine.generate(prompt=prompt_ids):
            await asyncio.sleep(0)
            seen_intervals.append(processor.stream_interval)
            outputs = [part.token_ids for part in output.outputs]
        if request_id == "fails":
            raise RuntimeError(request_id)
        return outputs

    ours = patch.make(of_verl, None)
    server = SimpleNamespace(engine=engine, _disaggregation_role="null", requests=0)

    async def run():
        requests = [ours(server, "p", {}, name) for name in ("first", "fails", "last")]
        return await asyncio.gather(*requests, return_exceptions=True)

    first, _, last = asyncio.run(run())
    assert first == last == [[5, 6, 7]]
    assert server.requests == 3
    assert set(seen_intervals) == {1 if has_interval else final_output.NEVER}
    assert vars(engine) | {"closed": False} == before
    assert processor.stream_interval == 1
    processors.OutputProcessor = lambda tokenizer: None
    if not has_interval:
        with pytest.raises(PatchRefused, match="vLLM has no stream_interval"):
            patch.make(of_verl, None)


def test_a_server_of_another_shape_is_refused():
    async def generate(self):
        return self.engine

    (patch,) = final_output.SWITCHES
    with pytest.raises(PatchRefused, match="no longer uses _disaggregation_role"):
        require_names(generate, patch.uses, patch.target)
