"""Tests reading logs of verl and slime: lines of the file logger, and consoles in every state."""

import contextlib
import io
import json
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from verl.utils.logger import LocalLogger

from rl_accel.telemetry.logs import merged, parse_log_line, read_console, read_log
from rl_accel.telemetry.readers import read

WORDS = st.text(st.sampled_from("abz/_@-.19"), min_size=1, max_size=12).filter(lambda word: word[0].isalpha())
NUMBERS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.integers(-(10**6), 10**9),
    st.floats(-1e6, 1e6).map(np.float64),
    st.integers(0, 99).map(np.int32),
)
METRICS = st.dictionaries(WORDS, NUMBERS, min_size=1, max_size=12)

NAMES = [f"critic/metric_{number}/mean" for number in range(20)]
NAMES += ["actor/entropy", "val-core/my data/acc/mean@1", "response_length/mean", "timing_s/gen", "timing_s/step"]
STEPS = [(step, {name: step + place / 8 for place, name in enumerate(NAMES)}) for step in (1, 2, 12)]
BAR = "Training Progress:   1%|▏         | 1/435 [01:04<7:46:00, 64.47s/it]"
RAY = "(TaskRunner pid=3165) "


def console(value="{}"):
    for step, metrics in STEPS:
        numbers = " - ".join(f"{name}:{value.format(number)}" for name, number in metrics.items())
        yield f"{RAY}step:{step} - {numbers}"
        yield BAR
        yield f"(WorkerDict pid=9, ip=10.0.0.1) loaded step: 3 of {step} - done"
        yield ""


def records(lines):
    return list(read_console(f"{line}\n" for line in lines))


@pytest.mark.parametrize(
    "lines",
    [
        [*console()],
        [*console("np.float64({})")],
        [*console("tensor({}, device='cuda:0')")],
        [f"\x1b[36m{line}\x1b[0m" for line in console()],
        [f"\x1b]0;top\x07\x1b[?25l{line}\x1b(B\x1b[m\x1b[?25h".replace(RAY, "") for line in console()],
        [line.replace(RAY, "") for line in console()],
        [line.replace(RAY, f"[pod/x] 10:00:01 {RAY}") for line in console()],
        [f"{line} - note:3.12.1 - name:tiny" if " step:" in line else line for line in console()],
        [f"{line} [repeated 3x across cluster]" if " step:" in line else line for line in console()],
        [f"{BAR}{line}{BAR}\r" for line in console()],
        [line.replace("critic/metric_7", f"critic/me{BAR}tric_7") for line in console()],
        [line.replace("metric_3/mean:", f"metric_3/mean:\r{BAR}\r") for line in console()],
        [" ".join(line for line in console() if line.startswith(RAY))],
        ["\r".join(console())],
    ],
)
def test_a_console_has_the_metrics_of_each_step(lines):
    assert records(lines) == STEPS


def test_steps_that_other_output_cuts_are_counted_in_one_note(tmp_path):
    lines = [*console()]
    lines[4] = lines[4].replace("critic/metric_7", "critic/me(WorkerDict pid=9) loaded\ntric_7")
    (tmp_path / "train.log").write_text("\n".join(lines) + "\n")
    log = read(str(tmp_path))
    assert len(log.steps[2]) == 7
    assert [note.startswith("1 of 3 steps are left out: they have no timing_s/step") for note in log.notes] == [True]


@pytest.mark.parametrize("cut", [str, str.rstrip], ids=["as it is", "without trailing spaces"])
@pytest.mark.parametrize("prefix", ["", RAY])
def test_lines_that_a_terminal_has_wrapped_are_joined(cut, prefix):
    def without_spaces(steps):  # where a row ends at a space of a name, that may be gone
        return [(step, {name.replace(" ", ""): value for name, value in metrics.items()}) for step, metrics in steps]

    for width in range(70, 250, 3):
        lines = (line.replace(RAY, prefix) for line in console("np.float64({})"))
        rows = [cut(line[at : at + width]) for line in lines for at in range(0, len(line), width)]
        assert without_spaces(records(rows)) == without_spaces(STEPS), width


@pytest.mark.parametrize("rows", ["step:3 - a:1 - timing_s/step:12", "step:3 - a:1 - timing_s/st\rep:12"])
def test_the_last_metric_of_a_line_without_an_end_may_be_cut_off(rows):
    assert list(read_console([rows])) == [(3, {"a": 1.0})]


@pytest.mark.parametrize("prefix", ["", RAY])
def test_what_is_printed_after_a_step_is_no_part_of_its_last_metric(prefix):
    printed = ["1", "0.5", "-1", "inf", "e", "12"]
    steps = [(step, {"a/x": step * 1.5, "critic/score/mean": 0.25 + step}) for step in range(95, 101)]
    lines = [f"step:{step} - " + " - ".join(f"{name}:{value}" for name, value in row.items()) for step, row in steps]
    pairs = [row for pair in zip(lines, printed, strict=True) for row in pair]
    assert records(f"{prefix}{row}" for row in pairs) == steps
    assert records([lines[0], "7"]) == steps[:1]


@pytest.mark.parametrize("prefix", ["", RAY])
def test_a_printed_response_that_looks_like_a_step_is_none(prefix):
    lines = [f"{prefix}{line}" for line in ("step:1 - total:1", "so step:2 - total:12", "step:2 - total:3 apples")]
    workers = []
    rows = [line for step in console() for line in (*lines, step)]
    assert list(read_console((f"{row}\n" for row in rows), workers)) == STEPS
    assert len(workers) == 1
    assert records(lines[:1]) == [(1, {"total": 1.0})], "without any step of verl it may be a step of another logger"


def test_the_name_of_a_metric_may_hold_colons():
    assert records(["step:3 - val/hf:math/acc:-0.5 - b:1e-06"]) == [(3, {"val/hf:math/acc": -0.5, "b": 1e-6})]


@pytest.mark.parametrize(
    ("again", "restarts", "values"),
    [
        ([(1, "a"), (2, "a")], [1], {1: {"a": 9.0}, 2: {"a": 9.0}}),
        ([(3, "a")], [3], {1: {"a": 1.0}, 2: {"a": 2.0, "val/x": 2.0}, 3: {"a": 9.0}}),
        ([(2, "val/x"), (3, "a")], [3], {1: {"a": 1.0}, 2: {"a": 2.0, "val/x": 9.0}, 3: {"a": 9.0}}),
    ],
    ids=["from the start", "resumed", "resumed with a validation first"],
)
def test_the_later_start_of_a_run_wins_and_steps_that_it_has_not_reached_are_dropped(tmp_path, again, restarts, values):
    first = [(step, {name: float(step)}) for step in range(1, 6) for name in ("a", "val/x")[: 1 + (step % 2 == 0)]]
    second = [(step, {name: 9.0}) for step, name in again]
    assert merged([*first, *second]) == (values, restarts)
    path = tmp_path / "log"
    path.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in [*first, *second]))
    assert read_log(path) == values


@pytest.mark.parametrize(
    "line",
    ["", "null", '{"step": Infinity, "data": {}}', '{"step": 1, "data": {"a": 1' + "0" * 400 + "}}", "[" * 100_000],
)
def test_a_line_that_is_no_record_is_skipped(line):
    assert parse_log_line(line.encode()) is None


def test_of_a_record_only_numbers_are_kept():
    line = '{"step": 1, "data": {"a": 0, "nan": null, "text": "x", "flag": true, "list": [1]}}'
    step, numbers = parse_log_line(line)
    assert math.isnan(numbers.pop("nan"))
    assert (step, numbers) == (1, {"a": 0.0})


@given(
    steps=st.lists(METRICS.map(lambda metrics: {"training/epoch": 0, **metrics}), min_size=1, max_size=4),
    prefix=st.sampled_from(["", RAY, "(main_task pid=9, ip=10.0.0.1) "]),
    colour=st.booleans(),
)
def test_whatever_the_console_logger_of_verl_writes_is_read_back_equal(steps, prefix, colour):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for number, metrics in enumerate(steps):
            LocalLogger().log(metrics, number)
    lines = [f"{prefix}{line}" for line in out.getvalue().splitlines()]
    result = dict(records(f"\x1b[36m{line}\x1b[0m" if colour else line for line in lines))
    assert result == {number: {name: float(value) for name, value in row.items()} for number, row in enumerate(steps)}


@given(
    steps=st.lists(METRICS, min_size=1, max_size=4),
    prefix=st.sampled_from(["", "(RayTrainGroup pid=1) "]),
    width=st.sampled_from([80, 200, 10**9]),
    is_pretty=st.booleans(),
)
def test_whatever_slime_logs_is_read_back_equal(tmp_path_factory, steps, prefix, width, is_pretty):
    log = tmp_path_factory.mktemp("slime") / "train.log"
    steps = [{f"perf/{name}": value for name, value in metrics.items()} for metrics in steps]
    lines = [f"{prefix}[t] x.py:1 - perf {number}: {values}" for number, values in enumerate(steps)]
    rows = [line[at : at + width] for line in lines for at in range(0, len(line), width)]
    text = "\n".join(rows) + "\n"
    log.write_text(
        text.replace(": {'", ": {\n '").replace(", '", ",\n '").replace("}\n", "\n}\n") if is_pretty else text
    )
    wanted = {number: {name: float(value) for name, value in values.items()} for number, values in enumerate(steps)}
    assert read(str(log)).steps == wanted


def test_runs_that_share_a_console_are_said_and_a_restart_is_none_of_them(tmp_path):
    def log(*processes):
        lines = [f"(TaskRunner pid={process}) step:{n} - a:1\n" for n, process in enumerate(processes)]
        (tmp_path / "x.log").write_text("".join(lines))
        return read(str(tmp_path)).notes

    assert log(1, 1, 2, 2) == []
    (note,) = log(1, 2, 1, 2)
    assert "several processes log steps in turns ((TaskRunner pid=1), (TaskRunner pid=2))" in note


@pytest.mark.parametrize("line", ["\n", "[2026-01-01] INFO\n", f"{BAR}\n", f"{' ' * 20_000}\n", f"{'A ' * 20_000}[\n"])
def test_lines_of_others_after_a_step_take_no_time(line):
    lines = [f"step:3 - a:1 - timing_s/step:12.5 - {' - '.join(f'm{n}:{n}' for n in range(100))}\n"]
    count = max(1, 200_000 // len(line))
    began = time.process_time()
    ((step, values),) = read_console([*lines, *([line] * count)])
    assert (step, values["m99"], len(values)) == (3, 99.0, 102)
    assert time.process_time() - began < 2.0
