"""Tests the sampler in slime's own rollout with over-sampling on real SGLang, turned on by ``rl-accel slime-config``."""

import asyncio
import itertools
import statistics
import time

import pytest

from rl_accel.integrations.slime import custom_config
from rl_accel.patches.slime import abort

pytestmark = pytest.mark.slow

(PATCH,) = abort.SWITCHES


def test_a_rollout_ends_without_slimes_pause_and_with_a_whole_batch(start, serve, requests_on, monkeypatch):
    url = serve()
    args, _, rollout = start(url, over_sampling_batch_size=16, **custom_config.make(["sampler"], {}))
    from slime.backends.sglang_utils import server_control

    slept, sleep, looks, count = [], asyncio.sleep, [], server_control.num_requests_from_load

    def noted(seconds, *result):
        slept.append(seconds)
        return sleep(seconds, *result)

    def busy_at_two_looks(load):
        if "loads" not in load:  # a part of an answer
            return count(load)
        looks.append(count(load))
        return looks[-1] if len(looks) > 2 else 1

    monkeypatch.setattr(asyncio, "sleep", noted)
    monkeypatch.setattr(server_control, "num_requests_from_load", busy_at_two_looks)
    for rollout_id in range(2):
        slept.clear()
        looks.clear()
        output = rollout(rollout_id)
        assert [len(group) for group in output.samples] == [args.n_samples_per_prompt] * args.rollout_batch_size
        assert looks[-1] == requests_on(url) == 0
        assert [seconds for seconds in slept if seconds][:2] == [0.05, 0.1]


def test_slimes_function_ends_the_requests_of_a_server_and_returns_when_it_is_idle(start, serve, requests_on):
    """``pytest -s`` prints the seconds of slime's function without and with the patch."""
    url = serve()
    start(url)  # slime's HTTP client
    from slime.backends.sglang_utils import server_control
    from slime.utils.async_utils import run
    from slime.utils.http_utils import post

    seconds = {PATCH.revert: [], PATCH.apply: []}
    body = {"input_ids": [10, 11, 12], "sampling_params": {"max_new_tokens": 16_000, "ignore_eos": True}}

    async def play():
        answers = [asyncio.create_task(post(f"{url}/generate", body)) for _ in range(16)]
        while await asyncio.to_thread(requests_on, url) < 16:
            await asyncio.sleep(0.05)
        began = time.monotonic()
        await server_control.abort_servers_until_idle([url])
        spent = time.monotonic() - began
        assert await asyncio.to_thread(requests_on, url) == 0
        return spent, [(await answer)["meta_info"]["finish_reason"]["type"] for answer in answers]

    try:
        for change in itertools.chain.from_iterable([[*seconds]] * 3):
            change()
            spent, reasons = run(play())
            seconds[change].append(spent)
            assert reasons == ["abort"] * 16
    finally:
        PATCH.revert()
    stock, ours = seconds.values()
    print(f"\nstock {stock} s, patched {ours} s; medians {statistics.median(stock):.2f}, {statistics.median(ours):.2f}")
