"""Preemptions come from counters of the servers; where one cannot be read the number is unknown, never zero."""

import http.server
import threading

import pytest

pytest.importorskip("ray")

from rl_accel.integrations.verl.telemetry.preemptions import ATTEMPTS, Preemptions
from rl_accel.telemetry.server_counters import COUNTERS, counter_in

VLLM = """# HELP vllm:num_preemptions_total Cumulative number of preemptions
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="a } b"} 3.0
vllm:num_preemptions_total{engine="1",model_name="m"} 4.0 1700000000000
vllm:num_preemptions_created{engine="0"} 1.7e9
"""


def test_differences_between_steps_are_added_up_over_servers():
    values = {"a": 5.0, "b": 1.0}
    counters = Preemptions("any", values.get)
    assert counters.take(["a", "b"]) == 6.0, "servers start with the trainer, and so do their counters"
    values.update(a=7.0)
    assert counters.take(["a", "b"]) == 2.0
    assert counters.take(["a", "b"]) == 0.0
    values.update(a=1.0)
    assert counters.take(["a", "b"]) == 1.0, "a server that was started again"


def test_one_unknown_counter_makes_the_number_unknown():
    values = {"a": 5.0, "b": None}
    counters = Preemptions("any", values.get)
    assert counters.take(["a", "b"]) is None
    values.update(b=2.0)
    assert counters.take(["a", "b"]) == 2.0
    assert counters.take([]) is None


def test_servers_that_never_answer_are_not_asked_for_ever():
    asked = []
    counters = Preemptions("any", asked.append)
    assert [counters.take(["a", "b"]) for _ in range(9)] == [None] * 9
    assert len(asked) == 2 * ATTEMPTS


@pytest.mark.parametrize(
    ("engine", "text", "found"),
    [
        ("vllm", VLLM, 7.0),
        ("vllm", "vllm:num_preemptions_total 2.0\n", 2.0),
        ("vllm", "vllm:num_requests_running 2.0\n", None),
        ("vllm", "", None),
        ("vllm", "vllm:num_preemptions_total NaN\n", None),
        ("sglang", 'sglang:num_retracted_requests_total{tp_rank="0"} 9\n', 9.0),
        ("sglang", 'sglang:num_retracted_reqs{tp_rank="0"} 9\n', None),
    ],
)
def test_what_a_metrics_page_says(engine, text, found):
    assert counter_in(text, COUNTERS[engine]) == found


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(VLLM.encode())

    def log_message(self, *args):
        pass


def test_a_server_is_asked_over_http_and_one_that_is_gone_is_unknown():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_address[1]}"
        assert Preemptions("vllm").take([address]) == 7.0
        assert Preemptions("trtllm").take([address]) is None
        server.shutdown()
    assert Preemptions("vllm").take([address]) is None
