"""The sampler in slime's own rollout with over-sampling, turned on by the file of ``rl-accel slime-config``."""

import asyncio

import httpx
import pytest

from rl_accel.integrations.slime import custom_config

pytestmark = pytest.mark.slow


def test_a_rollout_ends_without_slimes_pause_and_with_a_whole_batch(start, serve, monkeypatch):
    url = serve("--seconds-per-step", "0.002", "--max-running-requests", "256")
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
        assert looks[-1] == httpx.get(f"{url}/v1/loads", timeout=None).json()["loads"][0]["num_total_reqs"] == 0
        assert [seconds for seconds in slept if seconds][:2] == [0.05, 0.1]
