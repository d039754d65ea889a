"""Tests reading the preemption counters of engines from their servers. Unknown engines give no counts."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from rl_accel.integrations.verl.engines import EngineSupport, counted_engines, engine_of, read_servers, register
from rl_accel.telemetry.server_counters import Reading


@pytest.fixture
def endpoint(web_server):
    """A server whose ``/metrics`` is ``page.text``, 404 if it is None."""
    page = SimpleNamespace(text=None)
    url = web_server(lambda path, _: page.text if path == "/metrics" else None)
    page.address = url.removeprefix("http://")
    return page


def engine(name):
    return engine_of(OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": name}}}))


def test_endpoints_are_read_and_those_that_are_off_are_unknown_and_named_once(endpoint, monkeypatch, caplog):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    for _ in range(2):
        assert read_servers(engine("vllm"), [endpoint.address]) == {endpoint.address: None}
    assert caplog.text.count(f"preemptions are unknown, http://{endpoint.address}/metrics: HTTP Error 404") == 1
    endpoint.text = "vllm:num_preemptions_total 5\n"
    assert read_servers(engine("vllm"), [endpoint.address]) == {endpoint.address: Reading(5)}
    endpoint.text = "sglang:num_retracted_requests_total 6\n"
    readings = read_servers(engine("sglang"), [endpoint.address, "127.0.0.1:1"])
    assert readings == {endpoint.address: Reading(6), "127.0.0.1:1": None}


def test_an_engine_is_known_once_it_is_added():
    assert engine("mine") == EngineSupport()
    assert read_servers(engine("mine"), ["s"]) == {"s": None}
    register("mine", EngineSupport(read_counters=lambda servers: dict.fromkeys(servers, Reading(3))))
    assert read_servers(engine("mine"), ["s"]) == {"s": Reading(3)}
    assert {"mine", "sglang", "vllm"} <= set(counted_engines())


class TokenizerManager:
    """The part of SGLang's that ends requests. A request holds the lock until its response has arrived."""

    def __init__(self):
        self.is_pause, self.is_pause_cond = False, asyncio.Condition()
        self.rid_to_state, self.aborts, self.model_update_lock = {}, [], self

    async def is_locked(self):
        await asyncio.sleep(0)
        return bool(self.rid_to_state)

    def abort_request(self, rid="", abort_all=False):
        self.aborts.append("all" if abort_all else rid)
        ended = [name for name, sent in self.rid_to_state.items() if sent and (abort_all or name == rid)]
        for name in self.rid_to_state:
            self.rid_to_state[name] = True  # those that were still being tokenized
        for name in ended:
            asyncio.get_running_loop().call_soon(self.rid_to_state.pop, name)


@pytest.fixture
def in_loop():
    """Calls a function in an event loop of another thread, as under Ray, with the task that it runs in; returns the result."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def run(make):
        return make(asyncio.current_task())

    yield lambda make: asyncio.run_coroutine_threadsafe(run(make), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def sglang(in_loop):
    """A server whose tokenizer manager lives in this event loop."""
    return in_loop(lambda task: SimpleNamespace(tokenizer_manager=TokenizerManager(), _server_task=task))


async def pause_of_031(*, mode="abort", wait_for_inflight_requests=None, clear_cache=True):
    return mode, wait_for_inflight_requests, clear_cache


async def pause_of_032(*, mode="abort", clear_cache=True):
    return mode, clear_cache


@pytest.mark.parametrize(("pause", "wanted"), [(pause_of_031, ("abort", False, True)), (pause_of_032, ("abort", True))])
def test_vllm_is_paused_by_verl_also_where_it_no_longer_takes_an_argument_of_verls(in_loop, pause, wanted):
    """The last call of verl 0.9.1's ``abort_all_requests`` is as here."""

    async def abort_all_requests():
        found.append(await server.engine.pause_generation(wait_for_inflight_requests=False, clear_cache=True))

    found, server = [], SimpleNamespace(abort_all_requests=abort_all_requests)
    server.engine = in_loop(lambda task: SimpleNamespace(output_handler=task, pause_generation=pause))
    for _ in range(2):
        engine("vllm").pause(server)
    assert found == [wanted, wanted]


def test_sglang_is_paused_when_the_last_request_has_ended_and_then_told_once_more(sglang):
    manager = sglang.tokenizer_manager
    manager.rid_to_state = {"running": True, "arrives after the first abort": False}
    engine("sglang").pause(sglang)
    assert manager.is_pause
    assert not manager.rid_to_state
    assert set(manager.aborts) == {"all"}
    assert len(manager.aborts) >= 3, "requests whose caller is gone hold no lock"


def test_another_sglang_is_paused_as_verl_does(sglang):
    async def abort_all_requests():
        told.append("verl's")

    told, sglang.abort_all_requests = [], abort_all_requests
    del sglang.tokenizer_manager.is_pause_cond
    engine("sglang").pause(sglang)
    assert told == ["verl's"]
    assert not engine("sglang").abort(sglang, "any")


def test_sglang_aborts_a_request_that_it_runs_and_leaves_others_to_be_cancelled(sglang):
    manager, abort = sglang.tokenizer_manager, engine("sglang").abort
    manager.rid_to_state = {"running": True, "other": True}
    assert abort(sglang, "running")
    assert manager.aborts == ["running"]
    assert not abort(sglang, "unknown")
    manager.is_pause = True
    assert not abort(sglang, "other"), "it may wait for the end of the pause"
    assert manager.aborts == ["running"]
