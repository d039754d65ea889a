"""Servers are asked where their engine says how often they preempt; of an engine that nobody has added nothing is known."""

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
