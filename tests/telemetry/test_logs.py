"""Logs of verl as its users have them: files of the file logger, and consoles in every state."""

import json

import pytest

from rl_accel.telemetry.logs import read_console, read_log

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


@pytest.mark.parametrize(
    "lines",
    [
        [*console()],
        [*console("np.float64({})")],
        [f"\x1b[36m{line}\x1b[0m" for line in console()],
        [line.replace("(TaskRunner pid=3165) ", "") for line in console()],
        [f"{line} - note:3.12.1 - name:tiny" if "step:" in line else line for line in console()],
    ],
    ids=["Ray's prefix", "numpy", "colours", "plain", "values that are no numbers"],
)
def test_a_console_has_the_metrics_of_each_step(lines):
    assert list(read_console(lines)) == STEPS


@pytest.mark.parametrize("cut", [str, str.rstrip], ids=["as it is", "without trailing spaces"])
def test_lines_that_a_terminal_has_wrapped_anywhere_are_joined(cut):
    def without_spaces(steps):  # where a row ends at a space of a name, that may be gone
        return [(step, {name.replace(" ", ""): value for name, value in metrics.items()}) for step, metrics in steps]

    for width in range(40, 240):
        rows = [line[at : at + width] for line in console("np.float64({})") for at in range(0, len(line), width)]
        assert without_spaces(read_console(map(cut, rows))) == without_spaces(STEPS), width


def test_timers_of_2024_are_those_of_today_and_add_up_to_the_step():
    (record,) = read_console(["step:3 - timing/gen:4.0 - timing/update_actor:2.5 - critic/score/mean:nan"])
    assert record[0] == 3
    timed = {name: value for name, value in record[1].items() if "timing" in name}
    assert timed == {"timing_s/gen": 4.0, "timing_s/update_actor": 2.5, "timing_s/step": 6.5}


def test_the_name_of_a_metric_ends_at_its_last_colon():
    (found,) = read_console(["step:3 - val/hf:math/acc:-0.5 - b:1e-06"])
    assert found == (3, {"val/hf:math/acc": -0.5, "b": 1e-6})


def test_a_log_is_read_as_what_it_is(tmp_path):
    path = tmp_path / "output.log"
    path.write_text("\r".join(console()))
    assert list(read_log(path).items()) == STEPS, "a progress bar ends lines with a carriage return"
    path.write_text("\n".join(json.dumps({"step": step, "data": metrics}) for step, metrics in STEPS))
    assert list(read_log(path).items()) == STEPS
    path.write_text(BETWEEN)
    assert read_log(path) == {}
