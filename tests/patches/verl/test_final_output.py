"""Parts of a response are put together to what vLLM would have handed over; requests of others pass untouched."""

import asyncio
from types import SimpleNamespace

import pytest

from rl_accel.errors import PatchRefused
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


def seen(parts, in_parts):
    async def collect():
        final_output._in_parts.set(in_parts)
        joined = final_output._joined(Engine(parts).generate)
        return [
            (list(part.token_ids), None if part.logprobs is None else list(part.logprobs))
            async for output in joined(prompt="p")
            for part in output.outputs
        ]

    return asyncio.run(collect())


def test_each_output_has_all_tokens_so_far_but_requests_of_others_pass_as_they_are():
    whole = [5, 6, 7], [{5: -0.1}, {6: -0.2}, {7: -0.3}]
    assert seen(PARTS, in_parts=True) == [([5], [{5: -0.1}]), whole, whole]
    assert seen([([5], None), ([6], None)], in_parts=True) == [([5], None), ([5, 6], None)], "none were asked for"
    assert seen(PARTS, in_parts=False) == PARTS


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_request_that_is_dropped_ends_at_once(in_parts):
    async def drop():
        final_output._in_parts.set(in_parts)
        engine = Engine(PARTS)
        outputs = final_output._joined(engine.generate)("p")
        await anext(outputs)
        await outputs.aclose()
        return engine.closed

    assert asyncio.run(drop())


def test_a_server_of_another_shape_is_refused():
    async def generate(self):
        return self.engine

    (patch,) = final_output.SWITCHES
    with pytest.raises(PatchRefused, match="no longer reads self"):
        patch.probe(generate, None, None)
