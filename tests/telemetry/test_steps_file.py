"""Steps are kept a line each, and a resumed run replaces what it does again."""

import math

import pytest

from rl_accel.telemetry.stage_clock import CANCELLED, Response
from rl_accel.telemetry.steps_file import Step, StepsFile, read, read_log

RESPONSES = [
    Response("first", 1000.0, 1002.5, 1003.0, 1003.25, 25, "b"),
    Response("second", 1000.5, None, None, 1004.0, None, None, CANCELLED),
    Response("first", 1000.25, 1001.0, 1001.5, 1001.5, 7, "a"),
]


def step(number, responses=()):
    return Step(number, {"gen": 3.0, "other": 1.0}, 64, None, True, responses)


def keep(path, *numbers):
    file = StepsFile(path)
    for number in numbers:
        file.add(step(number))


def test_what_is_kept_is_read_back_with_times_since_the_first_response(tmp_path):
    path = tmp_path / "deeper" / "steps.jsonl"
    StepsFile(path).add(step(3, RESPONSES))
    (found,) = read(path).values()
    assert (found.step, found.stages, found.slots, found.preemptions) == (3, {"gen": 3.0, "other": 1.0}, 64, None)
    assert found.responses == [
        Response("0", 0.0, 2.5, 3.0, 3.25, 25, "b"),
        Response("1", 0.5, None, None, 4.0, None, None, CANCELLED),
        Response("0", 0.25, 1.0, 1.5, 1.5, 7, "a"),
    ]


def test_a_run_that_begins_again_drops_the_steps_it_does_again(tmp_path):
    path = tmp_path / "steps.jsonl"
    keep(path, 1, 2, 3, 4)
    with path.open("a") as file:
        file.write('{"step": 5, "sta')  # the process was killed
    keep(path, 3, 4)
    assert [line.split(",")[0] for line in path.read_text().splitlines()] == [f'{{"step":{n}' for n in (1, 2, 3, 4)]
    keep(path, 1)
    assert list(read(path)) == [1]


@pytest.mark.parametrize("line", ["", "{", "[]", '{"step": 2}', '{"step": "x"}', "null"])
def test_lines_that_are_not_whole_are_left_out(tmp_path, line):
    path = tmp_path / "steps.jsonl"
    keep(path, 1)
    with path.open("a") as file:
        file.write(line + "\n")
    assert list(read(path)) == [1]


def test_null_is_nan_and_what_is_no_number_is_left_out(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "data": {"nan": null, "text": "x", "flag": true, "list": [1], "n": 3}}\n')
    metrics = read_log(path)[1]
    assert sorted(metrics) == ["n", "nan"]
    assert math.isnan(metrics["nan"])


def test_records_of_one_step_are_merged_in_step_order(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 2, "data": {"a": 1}}\n{"step": 1, "data": {"a": 0}}\n{"step": 2, "data": {"b": 5}}\n')
    assert list(read_log(path).items()) == [(1, {"a": 0.0}), (2, {"a": 1.0, "b": 5.0})]
