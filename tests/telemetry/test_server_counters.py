"""Preemptions of a step are differences; whatever makes a difference doubtful makes it unknown."""

import re
from pathlib import Path

import pytest

from rl_accel.telemetry import server_counters
from rl_accel.telemetry.server_counters import COUNTERS, Counters, Reading, ask_endpoints, parse

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


@pytest.mark.parametrize(
    "after",
    [
        servers(9, incarnation="two"),
        servers(1, incarnation="one"),
        {"other": Reading(9, "one")},
        servers(5, 5, incarnation="one"),
        {},
    ],
)
def test_a_server_that_was_started_anew_or_is_new_is_unknown(after):
    assert taken(servers(4, incarnation="one"), after)[1] is None


@pytest.mark.parametrize(
    ("engine", "differences"), [("vllm", [0, 28, 26, None]), ("sglang", [0, 5])], ids=["vllm", "sglang"]
)
def test_pages_that_the_engines_made_themselves_give_the_counts_that_are_known(engine, differences):
    """The first lines of a file say how its pages were made, a line before each page what is known of it."""
    _, *parts = re.split(r"^# page: (\w+)\n", (DATA / f"{engine}_metrics.txt").read_text(), flags=re.MULTILINE)
    known = [None if word == "unknown" else int(word) for word in parts[::2]]
    readings = [parse(text, COUNTERS[engine]) for text in parts[1::2]]
    assert [reading and reading.preemptions for reading in readings] == known
    assert all(reading.incarnation for reading in readings if reading) == (engine == "vllm")
    assert taken(*({"server": reading} for reading in readings)) == differences


def test_counters_in_prometheus_text_are_added_up_over_labels():
    text = """# HELP vllm:num_preemptions_total Cumulative number of preemptions
# TYPE vllm:num_preemptions_total counter
process_start_time_seconds 1.7e+09
vllm:num_preemptions_total{engine="0",model_name="a b}"} 3.0
vllm:num_preemptions_total{engine="1",model_name="m"} 4.0
vllm:num_preemptions_created{engine="0"} 1.7e+09
"""
    assert parse(text, VLLM) == Reading(7, "1700000000.0")
    assert parse("vllm:num_preemptions 2\n", VLLM) == Reading(2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sglang:num_retracted_reqs 4\n",
        "sglang:realtime_tokens_total 9.0\nvllm:generation_tokens_total 9.0\n",
        *(f"vllm:num_preemptions_total{value}\n" for value in (" NaN", " x", " -1", "{")),
    ],
)
def test_text_without_the_counter_is_unknown(text):
    assert parse(text, VLLM) is None


def line(rank, value, **labels):
    """A line of SGLang's counter."""
    labels = {"model_name": "a } b", "tp_rank": rank, **labels}
    written = ",".join(f'{label}="{text}"' for label, text in labels.items())
    return f"sglang:num_retracted_requests_total{{{written}}} {value}\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (line(0, 3.0) + line(1, 3.0), 3),
        (line(0, 3.0) + line(1, 2.0), 3),
        (line(0, 3.0, dp_rank=0) + line(1, 3.0, dp_rank=0) + line(2, 4.0, dp_rank=1) + line(3, 4.0, dp_rank=1), 7),
        ('sglang:realtime_tokens_total{mode="decode"} 9.0\n', 0),
        ('sglang:realtime_tokens_total{mode="decode"} 9.0\n' + line(0, "NaN"), None),
        ("sglang:num_retracted_reqs 0.0\nsglang:num_paused_reqs 0.0\n", None),
    ],
    ids=["ranks", "a rank is late", "engines of a server", "nothing yet", "not a number", "older than the counter"],
)
def test_ranks_of_one_engine_count_once_and_a_counter_that_has_not_counted_is_zero(text, found):
    reading = parse(text, SGLANG)
    assert (reading and reading.preemptions) == found


def test_servers_that_do_not_say_are_named_in_one_line_and_once(caplog, monkeypatch):
    monkeypatch.setattr(server_counters, "_warned", set())
    urls = {f"s{port}": f"http://127.0.0.1:{port}" for port in (1, 2, 3)}
    for _ in range(2):
        assert ask_endpoints(urls, SGLANG) == dict.fromkeys(urls)
    (record,) = caplog.records
    assert "preemptions are unknown, http://127.0.0.1:1/metrics: " in record.getMessage()
    assert record.getMessage().endswith(", and 2 other servers")


def test_only_servers_are_read():
    with pytest.raises(ValueError, match="must begin with http"):
        server_counters.fetch("file:///etc/hostname")
