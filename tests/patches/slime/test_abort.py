"""Tests polling of aborted servers at short intervals by slime's own function. The HTTP servers report a scripted load."""

import asyncio
import importlib
import json
import logging
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from rl_accel.errors import PatchRefused
from rl_accel.patches.slime import abort
from rl_accel.switch import SwitchState

(PATCH,) = abort.SWITCHES

DOUBLED = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3, 3, 3]


@pytest.fixture
def control(slime_root, monkeypatch):
    """slime's module with the function, and a client for its requests."""
    from slime.utils import http_utils

    monkeypatch.setattr(http_utils, "_http_client", None)
    args = {"rollout_num_engines": 1, "sglang_server_concurrency": 8, "use_distributed_post": False}
    http_utils.init_http_client(SimpleNamespace(**args))
    yield importlib.import_module("slime.backends.sglang_utils.server_control")
    PATCH.revert()


@dataclass
class Server:
    """What answers a look with ``load()``, or with an error if that is None. ``calls`` lists aborts and these answers."""

    load: object
    aborts_fail: bool = False
    calls: list = field(default_factory=list)
    url: str = ""
    first_abort: float | None = None

    def answer(self, path, given):
        if given is not None:
            assert (path, given) == ("/abort_request", {"abort_all": True})
            self.calls.append("abort")
            self.first_abort = self.first_abort or time.monotonic()
            return None if self.aborts_fail else "{}"
        assert path.startswith("/v1/loads?include=core")
        load = self.load()
        self.calls.append(load)
        return load if load is None else json.dumps({"loads": [{"num_running_reqs": load, "num_waiting_reqs": 0}]})


@pytest.fixture
def sleeps(monkeypatch):
    """Seconds of all calls of ``asyncio.sleep``, which return at once."""
    asked, sleep = [], asyncio.sleep

    async def at_once(seconds, *result):
        asked.append(seconds)
        return await sleep(0, *result)

    monkeypatch.setattr(asyncio, "sleep", at_once)
    return asked


@pytest.fixture
def stop(control, web_server):
    """``stop(server, ...)``: slime's function stops these servers, as at the end of a rollout."""

    def call(*servers):
        for server in servers:
            server.calls.clear()
            server.url = web_server(server.answer)
        asyncio.run(control.abort_servers_until_idle([server.url for server in servers]))

    return call


def played(*loads, **how):
    """A server that answers with these loads, one at each look."""
    server = Server(None, **how)
    server.load = lambda: loads[sum(call != "abort" for call in server.calls)]
    return server


@pytest.mark.parametrize(
    "server",
    [
        pytest.param(played(0), id="idle"),
        pytest.param(played(5, 5, 5, 4, 3, 2, 1, 1, 1, 0), id="slow"),
        pytest.param(played(5, 1, 0, aborts_fail=True), id="aborts fail"),
        pytest.param(played(3, None, 0), id="a look fails"),
    ],
)
def test_only_the_seconds_between_two_looks_differ_from_slimes(control, stop, sleeps, caplog, server):
    """The outer function, which slime's rollout imports by name, stays slime's and calls the patched one."""
    outer, runs = control.abort_servers_until_idle, []
    for patched in (False, True):
        if patched:
            PATCH.apply()
        sleeps.clear()
        caplog.clear()
        with caplog.at_level(logging.INFO, logger=control.logger.name):
            stop(server)
        log = [r.getMessage().replace(server.url, "URL") for r in caplog.records if r.name == control.logger.name]
        runs.append((list(server.calls), log, [seconds for seconds in sleeps if seconds != 1]))  # 1: retries of a post
    (calls, log, stock), (calls_patched, log_patched, ours) = runs
    assert (calls_patched, log_patched) == (calls, log)
    assert stock == [3] * len(stock)
    assert ours == DOUBLED[: len(stock)]
    assert control.abort_servers_until_idle is outer


def test_each_server_and_each_rollout_begins_with_a_short_sleep(stop, sleeps):
    PATCH.apply()
    for _ in range(2):
        sleeps.clear()
        stop(played(1, 0), played(2, 2, 2, 0), played(0))
        assert sorted(sleeps) == [0.05, 0.05, 0.1, 0.2]


@pytest.mark.slow
def test_returns_when_the_load_is_zero_and_not_before(stop):
    """``pytest -s`` prints the seconds of both, for a server whose requests end 0.1 s after the first abort."""
    seconds = {PATCH.revert: [], PATCH.apply: []}
    for change in [*seconds] * 5:
        change()
        server = Server(None)
        server.load = lambda server=server: int(time.monotonic() < server.first_abort + 0.1)
        began = time.monotonic()
        stop(server)
        seconds[change].append(time.monotonic() - began)
        looks = [call for call in server.calls if call != "abort"]
        assert looks == [1] * (len(looks) - 1) + [0]
        assert server.calls.count("abort") == len(looks)
    stock, ours = map(statistics.median, seconds.values())
    print(f"\nmedians of five: stock {stock:.2f} s, with the patch {ours:.2f} s, {stock / ours:.1f}x")


def test_a_rollout_that_is_cancelled_meanwhile_ends(control, web_server):
    PATCH.apply()
    server = Server(lambda: 1)

    async def cancelled(url):
        task = asyncio.create_task(control.abort_servers_until_idle([url]))
        await asyncio.sleep(0.3)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled(web_server(server.answer)))
    assert server.calls.count(1) > 1


SOURCE = """
    import asyncio

    async def abort_server_until_idle(url, retry_interval=3, *, timeout=180.0):
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while loop.time() < deadline:
            if not url():
                return "idle"
            await asyncio.sleep(min(retry_interval, deadline - loop.time()))
        raise TimeoutError("not idle")
"""


@pytest.fixture
def patch_of(framework):
    """``patch_of(old, new)`` returns the patch for a function like slime's in which ``new`` stands for ``old``, and its module."""

    def make(old="", new=""):
        name = framework(SOURCE.replace(old, new))
        target = f"{name}.core:abort_server_until_idle"
        return replace(PATCH, target=target, fingerprints=()), sys.modules[f"{name}.core"]

    return make


def test_a_time_limit_of_the_function_stays_in_force(patch_of, sleeps):
    patch, core = patch_of()
    patch.apply()
    loads = [2, 1, 0]
    assert asyncio.run(core.abort_server_until_idle(lambda: loads.pop(0), timeout=5)) == "idle"
    assert sleeps == [0.05, 0.1]
    with pytest.raises(TimeoutError, match="not idle"):
        asyncio.run(core.abort_server_until_idle(lambda: 1, timeout=0.02))
    assert max(sleeps[2:]) <= 0.02
    sleeps.clear()
    loads = [1, 0]
    asyncio.run(core.abort_server_until_idle(lambda: loads.pop(0), 0.01))
    assert sleeps == [0.01], "no sleep is longer than the one that was asked for"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("url, retry", "address, retry", r"takes \(address, retry_.*\), wanted \(url, retry_interval, \*\)$"),
        ("=3", "=0.05", r"slime sleeps only 0\.05 s itself$"),
        ("asyncio.sleep(min(retry_interval, ", "asyncio.wait_for(url(), (", "of retry_interval, found none$"),
        ("min(retry_interval", "min(pause", r"found asyncio\.sleep\(min\(pause, deadline - loop\.time\(\)\)\)$"),
        ('return "idle"', "await asyncio.sleep(1)", r"found asyncio\.sleep\(min\(.*\), asyncio\.sleep\(1\)$"),
        ("_idle", "_quiet", "abort_server_until_idle does not exist"),
    ],
)
def test_another_function_is_refused_in_a_line(patch_of, old, new, message):
    patch, core = patch_of(old, new)
    before = dict(vars(core))
    with pytest.raises(PatchRefused, match=message) as refused:
        patch.apply()
    assert "\n" not in str(refused.value)
    assert vars(core) == before
    assert patch.state() is SwitchState.WAITING
