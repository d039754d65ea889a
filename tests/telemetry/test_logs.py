"""Tests reading logs of verl: files of the file logger, and consoles in every state."""

import contextlib
import io
import json
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

NAMES = ("actor/entropy", "val-core/my data/acc/mean@1", "critic/vf_loss", "response_length/mean", "timing_s/gen")
NAMES += ("timing_s/step", "perf/throughput")
STEPS = [(step, {name: step + place / 8 for place, name in enumerate(NAMES)}) for step in (1, 2, 12)]
BETWEEN = "Training Progress:   1%|▏         | 1/435 [01:04<7:46:00, 64.47s/it]"


def console(value="{}"):
    for step, metrics in STEPS:
        numbers = " - ".join(f"{name}:{value.format(number)}" for name, number in metrics.items())
        yield f"(TaskRunner pid=3165) step:{step} - {numbers}"
        yield BETWEEN
        yield f"(WorkerDict pid=9, ip=10.0.0.1) loaded step: 3 of {step} - done"
        yield ""


def records(lines):
    return list(read_console(f"{line}\n" for line in lines))


@pytest.mark.parametrize(
    "lines",
    [
        [*console()],
        [*console("np.float64({})")],
        [f"\x1b[36m{line}\x1b[0m" for line in console()],
        [
            f"\x1b]0;top\x07\x1b[?25l{line}\x1b(B\x1b[m\x1b[?25h".replace("(TaskRunner pid=3165) ", "")
            for line in console()
        ],
        [line.replace("(TaskRunner pid=3165) ", "") for line in console()],
        [f"{line} - note:3.12.1 - name:tiny" if "step:" in line else line for line in console()],
        [*console("tensor({}, device='cuda:0')")],
    ],
    ids=["Ray's prefix", "numpy", "colours", "cursor and title", "plain", "values that are no numbers", "tensors"],
)
def test_a_console_has_the_metrics_of_each_step(lines):
    assert records(lines) == STEPS


@pytest.mark.parametrize(
    "foreign",
    [
        " [repeated 3x across cluster]",
        "\x1b[32m [repeated 3x across cluster] (Ray deduplicates logs: https://docs.ray.io)\x1b[0m",
        BETWEEN,
        f" {BETWEEN}",
        BETWEEN.removeprefix("Training Progress:"),
        "(WorkerDict pid=9) INFO:2026-01-01 12:00:00 - loading - 3:1",
    ],
)
def test_text_of_others_behind_metrics_or_between_two_rows_of_them_is_left_out(foreign):
    assert records(f"{line}{foreign}" if " step:" in line else line for line in console()) == STEPS
    for row in (foreign, f"\n{foreign.strip()}"):
        halves = [line.replace(" - timing_s/step", f"{row}\n - timing_s/step") for line in console()]
        assert records("\n".join(halves).split("\n")) == STEPS


@pytest.mark.parametrize(
    "rows", ["step:3 - a:1 - timing_s/step:12", "step:3 - a:1 -\ntiming_s/step:12", "step:3 - a:1 - timing_s/st\nep:12"]
)
def test_the_last_metric_of_a_line_without_an_end_may_be_cut_off(rows):
    assert list(read_console(rows.splitlines(keepends=True))) == [(3, {"a": 1.0})]
    whole = [*f"{rows}3.4\n".splitlines(keepends=True), "(WorkerDict pid=1) half a"]
    assert list(read_console(whole)) == [(3, {"a": 1.0, "timing_s/step": 123.4})]


def wrapped(lines, width):
    """The rows of ``lines`` on a terminal of ``width`` columns."""
    return [line[at : at + width] for line in lines for at in range(0, len(line), width)]


@pytest.mark.parametrize("cut", [str, str.rstrip], ids=["as it is", "without trailing spaces"])
def test_lines_that_a_terminal_has_wrapped_anywhere_are_joined(cut):
    def without_spaces(steps):  # where a row ends at a space of a name, that may be gone
        return [(step, {name.replace(" ", ""): value for name, value in metrics.items()}) for step, metrics in steps]

    for width in range(40, 240):
        rows = wrapped(console("np.float64({})"), width)
        assert without_spaces(records(map(cut, rows))) == without_spaces(STEPS), width
        if cut is str:  # of tensors, the names and numbers of metrics at least
            steps_read = records(wrapped(console("tensor({}, device='cuda:0')"), width))
            assert [(step, len(values)) for step, values in steps_read] == [
                (step, len(values)) for step, values in STEPS
            ], width


def test_timers_of_2024_are_those_of_today_and_add_up_to_the_step():
    (record,) = records(["step:3 - timing/gen:4.0 - timing/update_actor:2.5 - critic/score/mean:nan"])
    assert record[0] == 3
    timed = {name: value for name, value in record[1].items() if "timing" in name}
    assert timed == {"timing_s/gen": 4.0, "timing_s/update_actor": 2.5, "timing_s/step": 6.5}


def test_the_name_of_a_metric_ends_at_its_last_colon():
    (row,) = records(["step:3 - val/hf:math/acc:-0.5 - b:1e-06"])
    assert row == (3, {"val/hf:math/acc": -0.5, "b": 1e-6})


def test_a_log_is_read_as_what_it_is(tmp_path):
    path = tmp_path / "output.log"
    path.write_text("\r".join(console()))
    assert list(read(str(path)).steps.items()) == STEPS, "a progress bar ends lines with a carriage return"
    path.write_text("\n".join(json.dumps({"step": step, "data": metrics}) for step, metrics in STEPS))
    assert list(read_log(path).items()) == STEPS
    path.write_text(BETWEEN)
    assert read_log(path) == {}
    first = '{"step": 1, "data": {"a": 0, "nan": null, "text": "x", "flag": true, "list": [1]}}'
    path.write_text(f'{{"step": 2, "data": {{"c": 1}}}}\n{first}\n{{"step": 2, "data": {{"b": 5}}}}\n')
    steps = read_log(path)
    assert np.isnan(steps[1].pop("nan"))
    assert list(steps.items()) == [(1, {"a": 0.0}), (2, {"c": 1.0, "b": 5.0})], "what is no number is left out"


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


def in_rows(text, width, prefix, colour):
    """The lines of ``text`` as Ray and a terminal of ``width`` columns leave them."""
    rows = wrapped([f"{prefix}{line}" for line in text.splitlines()], width)
    return [f"\x1b[36m{row}\x1b[0m\n" if colour else f"{row}\n" for row in rows]


@given(
    steps=st.lists(METRICS.map(lambda metrics: {"training/epoch": 0, **metrics}), min_size=1, max_size=4),
    width=st.one_of(st.just(10**9), st.integers(60, 200)),
    prefix=st.sampled_from(["", "(TaskRunnerV1 pid=4951) ", "(main_task pid=9, ip=10.0.0.1) "]),
    colour=st.booleans(),
)
def test_whatever_the_console_logger_of_verl_writes_is_read_back_equal(steps, width, prefix, colour):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        for number, metrics in enumerate(steps):
            LocalLogger().log(metrics, number)
    result = dict(read_console(in_rows(out.getvalue(), width, prefix, colour)))
    assert result == {number: {name: float(value) for name, value in row.items()} for number, row in enumerate(steps)}


@given(steps=st.lists(METRICS, min_size=1, max_size=4), prefix=st.sampled_from(["", "(RayTrainGroup pid=1) "]))
def test_whatever_slime_logs_is_read_back_equal(tmp_path_factory, steps, prefix):
    log = tmp_path_factory.mktemp("slime") / "train.log"
    steps = [{f"perf/{name}": value for name, value in metrics.items()} for metrics in steps]
    log.write_text("".join(f"{prefix}[t] x.py:1 - perf {number}: {values}\n" for number, values in enumerate(steps)))
    wanted = {number: {name: float(value) for name, value in values.items()} for number, values in enumerate(steps)}
    assert read(str(log)).steps == wanted


def test_runs_that_share_a_console_are_said_and_a_restart_is_none_of_them(tmp_path):
    def log(*processes, prefix=""):
        lines = [f"{prefix}(TaskRunner pid={process}) step:{n} - a:1\n" for n, process in enumerate(processes)]
        (tmp_path / "x.log").write_text("".join(lines))
        return read(str(tmp_path)).notes

    assert log(1, 1, 2, 2) == []
    assert log(1, 2, 1, 2, prefix="[pod/x] 10:00:01 ") == log(1, 2, 1, 2)
    (note,) = log(1, 2, 1, 2)
    assert "several processes log steps in turns ((TaskRunner pid=1), (TaskRunner pid=2))" in note


@pytest.mark.parametrize("prefix", ["", "(TaskRunner pid=3165) "])
def test_a_printed_response_that_looks_like_a_step_is_none(prefix):
    lines = [f"{prefix}{line}" for line in ("step:1 - total:1", "so step:2 - total:12", "step:2 - total:3 apples")]
    workers = []
    rows = [line for step in console() for line in (*lines, step)]
    assert list(read_console((f"{row}\n" for row in rows), workers)) == STEPS
    assert len(workers) == 1
    assert records(lines[:1]) == [(1, {"total": 1.0})], "without any step of verl it may be a step of another logger"


@pytest.mark.parametrize(
    "between", [" ", f" {BETWEEN}   ", " (TaskRunner pid=3165) ", " [repeated 3x across cluster] "]
)
def test_two_steps_in_one_line_are_two(between):
    steps = [line for line in console() if " step:" in line and line.startswith("(TaskRunner")]
    joined = between.join(line.removeprefix("(TaskRunner pid=3165) ") for line in steps)
    assert records([joined]) == STEPS
    assert records([f"(TaskRunner pid=3165) {joined}"]) == STEPS
    assert records(["step:1 - timing_s/step:12 - perf/step:3 - a/my step:4 - b:1"]) == [
        (1, {"timing_s/step": 12.0, "perf/step": 3.0, "a/my step": 4.0, "b": 1.0})
    ]


@pytest.mark.parametrize("prefix", ["", "(TaskRunner pid=1) "])
def test_a_number_that_is_printed_after_a_step_is_no_part_of_its_last_metric(prefix):
    printed = ["1", "0.5", "1.0", "-1", "inf", "e", "12", "0"]
    steps = [(step, {"a": step * 1.5, "critic/score/mean": 0.25 + step}) for step in range(95, 103)]
    lines = [f"step:{step} - " + " - ".join(f"{name}:{value}" for name, value in row.items()) for step, row in steps]
    pairs = [row for pair in zip(lines, printed, strict=True) for row in pair]
    assert records([f"{prefix}{row}" for row in [*pairs, "a line that is longer than any of those of a step"]]) == steps


def test_a_number_after_the_only_step_is_no_part_of_a_line_that_no_terminal_is_wide_enough_for():
    metrics = {f"critic/metric_{number}/mean": number / 4 for number in range(60)} | {"z": 1.5}
    line = "step:1 - " + " - ".join(f"{name}:{value}" for name, value in metrics.items())
    assert records([line, "7"]) == [(1, metrics)]


def test_after_the_last_row_of_a_step_numbers_are_of_others():
    (number, metrics), *_ = STEPS
    rows = wrapped([next(console())], 90)
    assert len(rows) > 1
    assert len(rows[-1]) < 45
    assert records([*rows, "7", "8"]) == [(number, metrics)]


@pytest.mark.parametrize(
    "line", ["\n", "[2026-01-01] INFO\n", f"{BETWEEN}\n", f"{' ' * 20_000}\n", f"{'A ' * 20_000}[\n", "AA AA: x [\n"]
)
def test_lines_of_others_after_a_step_take_no_time(line):
    lines = [f"step:3 - a:1 - timing_s/step:12.5 - {' - '.join(f'm{n}:{n}' for n in range(100))}\n"]
    count = max(1, 200_000 // len(line))
    began = time.process_time()
    ((step, values),) = read_console([*lines, *([line] * count)])
    assert (step, values["m99"], len(values)) == (3, 99.0, 102)
    assert time.process_time() - began < 2.0
