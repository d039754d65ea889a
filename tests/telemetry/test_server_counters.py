"""Tests that preemptions of a step are differences of counters, and unknown if a difference is doubtful."""

import re
from pathlib import Path

import pytest

from rl_accel.telemetry import server_counters
from rl_accel.telemetry.server_counters import COUNTERS, Counters, Reading, ask_endpoints, preemptions_in

DATA = Path(__file__).parent / "data"
VLLM, SGLANG = COUNTERS["vllm"], COUNTERS["sglang"]


def taken(*readings):
    """What successive calls return when the servers say this."""
    return list(map(Counters().take, readings))


def servers(*counts, incarnation=""):
    return {f"s{i}": None if c is None else Reading(c, incarnation) for i, c in enumerate(counts)}


def test_readings_become_differences_over_all_servers_and_are_unknown_where_one_does_not_say():
    assert taken(servers(3, 4), servers(5, 4), servers(5, 4)) == [7, 2, 0], "the first since the start"
    assert taken(servers(1, 1), servers(2, None), servers(3, 3), servers(3, 4)) == [2, None, None, 1]


def test_a_server_that_was_started_anew_or_is_new_is_unknown():
    anew = servers(9, incarnation="two"), servers(1, incarnation="one")
    for after in (*anew, {"other": Reading(9, "one")}, servers(5, 5, incarnation="one"), {}):
        assert taken(servers(4, incarnation="one"), after)[1] is None, after


@pytest.mark.parametrize(("engine", "differences"), [("vllm", [0, 28, 26, None]), ("sglang", [0, 5])])
def test_pages_that_the_engines_made_themselves_give_the_counts_that_are_known(engine, differences):
    """The first lines of a file say how its pages were made, a line before each page what is known of it."""
    _, *parts = re.split(r"^# page: (\w+)\n", (DATA / f"{engine}_metrics.txt").read_text(), flags=re.MULTILINE)
    known = [None if word == "unknown" else int(word) for word in parts[::2]]
    readings = [preemptions_in(text, COUNTERS[engine]) for text in parts[1::2]]
    assert [reading and reading.preemptions for reading in readings] == known
    assert all(reading.incarnation for reading in readings if reading) == (engine == "vllm")
    assert taken(*({"server": reading} for reading in readings)) == differences


PROMETHEUS = """# HELP vllm:num_preemptions_total Cumulative number of preemptions
# TYPE vllm:num_preemptions_total counter
process_start_time_seconds 1.7e+09
vllm:num_preemptions_total{engine="0",model_name="a b}"} 3.0
vllm:num_preemptions_total{engine="1",model_name="m"} 4.0
vllm:num_preemptions_created{engine="0"} 1.7e+09
"""


def line(rank, value, **labels):
    """A line of SGLang's counter."""
    labels = {"model_name": "a } b", "tp_rank": rank, **labels}
    written = ",".join(f'{label}="{text}"' for label, text in labels.items())
    return f"sglang:num_retracted_requests_total{{{written}}} {value}\n"


@pytest.mark.parametrize(
    ("counter", "text", "found"),
    [
        (VLLM, PROMETHEUS, Reading(7, "1700000000.0")),
        (VLLM, "vllm:num_preemptions 2\n", Reading(2)),
        (VLLM, "", None),
        (VLLM, "sglang:realtime_tokens_total 9.0\nvllm:generation_tokens_total 9.0\n", None),
        *((VLLM, f"vllm:num_preemptions_total{value}\n", None) for value in (" NaN", " x", " -1", "{")),
        (SGLANG, line(0, 3.0) + line(1, 2.0), Reading(3)),  # a rank is late
        (SGLANG, "".join(line(rank, 3.0 + rank // 2, dp_rank=rank // 2) for rank in range(4)), Reading(7)),
        (SGLANG, 'sglang:realtime_tokens_total{mode="decode"} 9.0\n' + line(0, "NaN"), None),
        (SGLANG, "sglang:num_retracted_reqs 0.0\nsglang:num_paused_reqs 0.0\n", None),  # older than the counter
    ],
)
def test_a_page_tells_its_count_or_is_unknown(counter, text, found):
    assert preemptions_in(text, counter) == found


def test_servers_that_do_not_say_are_named_in_one_line_and_once(caplog, monkeypatch):
    monkeypatch.setattr("rl_accel.log._warned", set())
    urls = {f"s{port}": f"http://127.0.0.1:{port}" for port in (1, 2, 3)}
    for _ in range(2):
        assert ask_endpoints(urls, SGLANG) == dict.fromkeys(urls)
    (record,) = caplog.records
    assert "preemptions are unknown, http://127.0.0.1:1/metrics: " in record.getMessage()
    assert record.getMessage().endswith(", and 2 other servers")


def test_a_server_without_the_counter_is_told_which_setting_makes_it_count(caplog, monkeypatch):
    monkeypatch.setattr("rl_accel.log._warned", set())
    monkeypatch.setattr(server_counters, "fetch_page", lambda url: "")
    caplog.set_level("INFO", logger="rl_accel")
    assert ask_endpoints({"s": "http://x"}, server_counters.COUNTERS["vllm"]) == {"s": None}
    (record,) = caplog.records
    assert "actor_rollout_ref.rollout.disable_log_stats=False" in record.getMessage()
    assert record.levelname == "INFO", "a healthy run of verl's defaults has no warning"


def test_only_servers_are_read():
    with pytest.raises(ValueError, match="must begin with http"):
        server_counters.fetch_page("file:///etc/hostname")
