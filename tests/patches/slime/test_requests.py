"""Tests the patch of slime's ``post`` on a real SGLang server: an id stops a request, and failed attempts are logged."""

import asyncio

import httpx
import pytest

from rl_accel.patches.slime import requests


class Watcher:
    """Sees what becomes of a request, and ends it after so many tries that failed."""

    def __init__(self, patience=99):
        self.patience, self.seen = patience, []

    def begin(self):
        return "r0"

    async def failed(self):
        self.seen.append("failed")
        if len(self.seen) == self.patience:
            raise ConnectionError("the server is dead")

    def end(self, request_id, answer):
        assert request_id == "r0"
        self.seen.append(answer)


@pytest.mark.slow
def test_a_watched_request_carries_an_id_by_which_it_can_be_aborted(serve):
    """Over a plain HTTP client: what a rollout function does to stop one response. The answer has what was generated until then."""
    client = httpx.Client(base_url=serve(), timeout=None)
    watcher = Watcher()

    async def plain(target, payload, max_retries=60, headers=None):
        return await asyncio.to_thread(lambda: client.post(target, json=payload).json())

    def running():
        return client.get("/v1/loads").json()["loads"][0]["num_running_reqs"]

    async def play():
        requests.WATCHER.set(watcher)
        body = {"input_ids": [10, 11, 12], "sampling_params": {"max_new_tokens": 16_000, "ignore_eos": True}}
        task = asyncio.create_task(requests._make(plain, None)("/generate", body))
        while not await asyncio.to_thread(running):
            await asyncio.sleep(0.05)
        for request_id in ("nobody", "r0"):
            client.post("/abort_request", json={"rid": request_id})
        assert watcher.seen == [await task]
        assert "rid" not in body

    with client:
        asyncio.run(play())
    (answer,) = watcher.seen
    meta = answer["meta_info"]
    assert (meta["id"], meta["finish_reason"]["type"], meta["num_retractions"]) == ("r0", "abort", 0)
    assert 0 < len(answer["output_ids"]) < 16_000


def test_a_try_that_failed_is_shown_to_the_watcher_which_may_end_it(monkeypatch):
    pauses = []

    async def pause(seconds):
        pauses.append(seconds)

    async def broken(url, payload, max_retries=60, headers=None):
        assert max_retries == 1
        raise OSError("refused")

    async def send(watcher, tries):
        requests.WATCHER.set(watcher)
        await requests._make(broken, None)("http://x/generate", {}, tries)

    monkeypatch.setattr(requests.asyncio, "sleep", pause)
    for patience, tries, error, failures in ((99, 2, "refused", 2), (3, 60, "is dead", 3)):
        watcher = Watcher(patience)
        with pytest.raises(OSError, match=error):
            asyncio.run(send(watcher, tries))
        assert watcher.seen == ["failed"] * failures + [None]
    assert set(pauses) == {1}
