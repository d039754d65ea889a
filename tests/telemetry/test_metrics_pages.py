"""Pages that vLLM and SGLang made themselves (their first lines say how): the number that is known of each is found."""

import re
from pathlib import Path

import pytest

from rl_accel.telemetry.server_counters import COUNTERS, Counters, parse

DATA = Path(__file__).parent / "data"


def pages(engine):
    """The pages of a file, each with what is known of it; None: nothing is."""
    _, *parts = re.split(r"^# page: (\w+)\n", (DATA / f"{engine}_metrics.txt").read_text(), flags=re.MULTILINE)
    known = [None if word == "unknown" else int(word) for word in parts[::2]]
    return list(zip(known, parts[1::2], strict=True))


@pytest.mark.parametrize(
    ("engine", "differences"), [("vllm", [0, 28, 26, None]), ("sglang", [0, 5])], ids=["vllm", "sglang"]
)
def test_counts_and_differences_are_those_that_are_known(engine, differences):
    names = COUNTERS[engine]
    found = pages(engine)
    readings = [parse(text, names) for _, text in found]
    assert [reading and reading.preemptions for reading in readings] == [known for known, _ in found]
    assert all(reading.incarnation for reading in readings if reading) == (engine == "vllm")

    texts = [text for _, text in found]
    counters = Counters(lambda: {"server": parse(texts.pop(0), names)})
    assert [counters.take() for _ in found] == differences


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
    reading = parse(text, COUNTERS["sglang"])
    assert (reading and reading.preemptions) == found


def test_vllm_without_its_counter_is_unknown_whatever_else_is_there():
    text = "sglang:realtime_tokens_total 9.0\nvllm:generation_tokens_total 9.0\n"
    assert parse(text, COUNTERS["vllm"]) is None
