"""verl's servers are asked where they say how often they preempt."""

import http.server
import threading
from types import SimpleNamespace

import pytest

from rl_accel.integrations.verl.server_counters import read_servers
from rl_accel.telemetry.server_counters import Reading


@pytest.fixture
def endpoint():
    """A server whose ``/metrics`` is ``page.text``, 404 if it is None."""
    page = SimpleNamespace(text=None)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/metrics" and page.text is not None else 404)
            self.end_headers()
            self.wfile.write((page.text or "").encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page.address = f"127.0.0.1:{server.server_port}"
    yield page
    server.shutdown()
    server.server_close()


def test_endpoints_are_read_and_those_that_are_off_are_unknown_and_named_once(endpoint, monkeypatch, caplog):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    for _ in range(2):
        assert read_servers("vllm", [endpoint.address]) == {endpoint.address: None}
    assert caplog.text.count(f"preemptions are unknown, http://{endpoint.address}/metrics: HTTP Error 404") == 1
    endpoint.text = "vllm:num_preemptions_total 5\n"
    assert read_servers("vllm", [endpoint.address]) == {endpoint.address: Reading(5)}
    endpoint.text = "sglang:num_retracted_requests_total 6\n"
    found = read_servers("sglang", [endpoint.address, "127.0.0.1:1"])
    assert found == {endpoint.address: Reading(6), "127.0.0.1:1": None}
    assert read_servers("trtllm", [endpoint.address]) == {endpoint.address: None}, "nobody knows its counter"
