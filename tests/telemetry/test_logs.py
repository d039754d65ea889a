"""Logs of verl as its users have them: files of the file logger, and consoles in every state."""

import json

import pytest

from rl_accel.telemetry.logs import merged, parse_log_line, read_console, read_log
from rl_accel.telemetry.readers import read

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
        [line.replace("(TaskRunner pid=3165) ", "") for line in console()],
        [f"{line} - note:3.12.1 - name:tiny" if "step:" in line else line for line in console()],
        [*console("tensor({}, device='cuda:0')")],
    ],
    ids=["Ray's prefix", "numpy", "colours", "plain", "values that are no numbers", "tensors"],
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


@pytest.mark.parametrize("cut", [str, str.rstrip], ids=["as it is", "without trailing spaces"])
def test_lines_that_a_terminal_has_wrapped_anywhere_are_joined(cut):
    def without_spaces(steps):  # where a row ends at a space of a name, that may be gone
        return [(step, {name.replace(" ", ""): value for name, value in metrics.items()}) for step, metrics in steps]

    for width in range(40, 240):
        rows = [line[at : at + width] for line in console("np.float64({})") for at in range(0, len(line), width)]
        assert without_spaces(records(map(cut, rows))) == without_spaces(STEPS), width


def test_timers_of_2024_are_those_of_today_and_add_up_to_the_step():
    (record,) = records(["step:3 - timing/gen:4.0 - timing/update_actor:2.5 - critic/score/mean:nan"])
    assert record[0] == 3
    timed = {name: value for name, value in record[1].items() if "timing" in name}
    assert timed == {"timing_s/gen": 4.0, "timing_s/update_actor": 2.5, "timing_s/step": 6.5}


def test_the_name_of_a_metric_ends_at_its_last_colon():
    (found,) = records(["step:3 - val/hf:math/acc:-0.5 - b:1e-06"])
    assert found == (3, {"val/hf:math/acc": -0.5, "b": 1e-6})


def test_a_log_is_read_as_what_it_is(tmp_path):
    path = tmp_path / "output.log"
    path.write_text("\r".join(console()))
    assert list(read(str(path)).steps.items()) == STEPS, "a progress bar ends lines with a carriage return"
    path.write_text("\n".join(json.dumps({"step": step, "data": metrics}) for step, metrics in STEPS))
    assert list(read_log(path).items()) == STEPS
    path.write_text(BETWEEN)
    assert read_log(path) == {}


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
