"""Tests readers on real files of TensorBoard, W&B, verl's file logger and slime's console."""

import gzip
import json
import math
import os
import shutil
import sys

import numpy as np
import pytest

from rl_accel.errors import RlAccelError
from rl_accel.lab.ab.compare import compare
from rl_accel.plan.command import plan
from rl_accel.plan.profile_report import profile
from rl_accel.telemetry.logs import merged
from rl_accel.telemetry.profile import read_run
from rl_accel.telemetry.readers import read

REWARD = "critic/score/mean"


def metrics(step):
    """Enough to cross the blocks of W&B's file."""
    return {REWARD: step / 10, "timing_s/step": 2.0, **{f"some/rather/long/name/of/a/metric/{n}": n for n in range(40)}}


def write_verl(path, steps):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"step": step, "data": metrics(step)}) + "\n" for step in steps))
    return path


def test_a_log_of_verl_lies_beside_other_lines_of_json_and_two_are_refused_by_name(tmp_path):
    write_verl(tmp_path / "project" / "run.jsonl", range(1, 4))
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "1.jsonl").write_text('{"input": "a", "output": "b", "step": 1}\n')
    (tmp_path / "rl_accel_telemetry.jsonl").write_text('{"step": 1, "responses": []}\n')
    run_log = read(str(tmp_path))
    assert (run_log.source, list(run_log.steps)) == ("verl's file logger", [1, 2, 3])
    assert run_log.steps[2] == metrics(2)
    log = tmp_path / "project" / "run.jsonl"
    log.write_text("\nno record\n" + log.read_text() + '{"step": 3, "da')
    assert read(str(log)).steps == run_log.steps, "lines that are no records are left out"

    write_verl(tmp_path / "other" / "metrics.jsonl", [1])
    several = r"holds several runs, wanted one of .*other/metrics\.jsonl, .*project/run\.jsonl"
    with pytest.raises(RlAccelError, match=several):
        read(str(tmp_path))


def test_several_starts_of_a_run_are_one_of_which_the_later_wins_and_a_late_validation_is_none(tmp_path):
    first, second = write_verl(tmp_path / "1.jsonl", range(1, 8)), tmp_path / "2.jsonl"
    second.write_text("".join(json.dumps({"step": step, "data": {REWARD: 9.0}}) + "\n" for step in (5, 6)))
    log = read(str(first), str(second))
    assert log.restarts == [5]
    assert [values[REWARD] for values in log.steps.values()] == [0.1, 0.2, 0.3, 0.4, 9.0, 9.0]
    assert "timing_s/step" not in log.steps[5], "what the first start logged of it is of other weights"
    records = [(1, {"a": 1.0}), (1, {"val": 2.0}), (2, {"a": 2.0}), (3, {"a": 3.0})]
    records += [(2, {"val": 5.0}), (3, {"train/x": 1})]
    assert merged(records) == ({1: {"a": 1.0, "val": 2.0}, 2: {"a": 2.0, "val": 5.0}, 3: {"a": 3.0}}, [])


def test_a_path_may_hold_commas(tmp_path, invoke):
    """As hydra names the folders of a sweep."""
    folder = tmp_path / "lr=1,n=2"
    folder.mkdir()
    log = write_verl(folder / "m.jsonl", range(1, 4))
    assert list(read(str(log)).steps) == [1, 2, 3]
    shutil.copytree(folder, tmp_path / "lr=1,n=4")
    assert "Report: " in invoke(compare, folder, "--against", tmp_path / "lr=1,n=4", "--out", tmp_path / "out")


def test_tensorboard_as_verl_writes_it_and_again_after_a_restart(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    for steps, offset in ((range(1, 13), 0.0), (range(9, 11), 50.0)):
        writer = tensorboard.SummaryWriter(str(tmp_path / "log"), filename_suffix=f".{offset:02.0f}")
        for step in steps:
            writer.add_scalar(REWARD, step + offset, step)
            writer.add_scalar("train/loss", step, 4 * step)  # of slime: optimizer steps
            writer.add_scalar("rollout/raw_reward", math.nan if step == 2 else 1.0, step)
        writer.add_text("val/generations", "text is no metric", 3)
        writer.close()
    log = read(str(tmp_path))
    assert (log.source, log.restarts) == ("TensorBoard", [9])
    assert [values[REWARD] for values in log.steps.values()] == [1, 2, 3, 4, 5, 6, 7, 8, 59, 60]
    assert math.isnan(log.steps[2]["rollout/raw_reward"])
    assert {name for values in log.steps.values() for name in values} == {REWARD, "rollout/raw_reward"}
    file = sorted(tmp_path.glob("log/*"))[0]
    file.write_bytes(file.read_bytes()[:-20])  # as a killed run leaves it
    assert 1 < len(read(str(file)).steps) <= 12


def test_a_csv_of_a_history_is_a_run_one_of_a_chart_wants_the_name_of_a_run_and_a_step_may_be_a_metric(tmp_path):
    history = tmp_path / "history.csv"
    history.write_text(f",_step,_timestamp,{REWARD},val/x\n0,1,17.5,0.5,\n1,2,18.5,0.25,0.75\n")
    assert read(str(history)).steps == {1: {REWARD: 0.5}, 2: {REWARD: 0.25, "val/x": 0.75}}

    chart = tmp_path / "chart.csv"
    columns = [f'"{run} - {REWARD}{part}"' for run in ("stock-0", "tail-0") for part in ("", "__MIN", "__MAX")]
    rows = ['1,"0.5","0.5","0.5","0.7","0.7","0.7"', '2,"0.6","0.6","0.6","","",""']
    chart.write_text("\n".join([",".join(['"Step"', *columns]), *rows]) + "\n")
    log = read(f"{chart}:stock-0")
    assert {step: values[REWARD] for step, values in log.steps.items()} == {1: 0.5, 2: 0.6}
    assert {step: values[REWARD] for step, values in read(f"{chart}:tail-0").steps.items()} == {1: 0.7}
    for name in (str(chart), f"{chart}:tail-9"):
        with pytest.raises(RlAccelError, match=r"wants a column .* one run, or .*csv:RUN .*found Step, stock-0 -"):
            read(name)
    (tmp_path / "h.csv").write_text(f"training/global_step,{REWARD}\n3,0.5\n4,0.75\n")
    assert {step: values[REWARD] for step, values in read(str(tmp_path / "h.csv")).steps.items()} == {3: 0.5, 4: 0.75}
    (tmp_path / "h.csv").write_text(f"Step,{REWARD},name\n1,0.5,a\n2,oops,b\n3,0.75,c\n")
    assert read(str(tmp_path / "h.csv")).steps == {1: {REWARD: 0.5}, 3: {REWARD: 0.75}}, "only the cell is left out"
    (tmp_path / "h.csv").write_text(f"Step,exp:1 - {REWARD},exp:2 - {REWARD}\n1,0.5,0.6\n")
    assert read(f"{tmp_path / 'h.csv'}:exp:2").steps == {1: {REWARD: 0.6}}


def test_the_console_of_slime(tmp_path):
    head = "[2026-01-01 10:00:00] train_metric_utils.py:136 -"
    lines = [
        "some other line {'a': 1}",
        "{'a': 1} perf 7: {'perf/b'",
        f"{head} perf 0: {{'rollout/response_len/mean': 12.5, 'rollout/truncated_ratio': np.float64(0.25)}}",
        f"(RayTrainGroup pid=1) {head} rollout 0: {{'rollout/raw_reward': 0.5, 'rollout/kl': nan}}",
        f"{head} eval 1: {{'eval/aime': 0.25}}",
        f"{head} rollout 2: {{'rollout/raw_reward'",
    ]
    (tmp_path / "train.log").write_text("\n".join(lines))
    log = read(str(tmp_path))
    first = {"rollout/response_len/mean": 12.5, "rollout/truncated_ratio": 0.25, "rollout/raw_reward": 0.5}
    assert (log.source, log.steps) == ("slime's console", {0: first, 1: {"eval/aime": 0.25}})
    (tmp_path / "slurm-1.txt").write_text("\n".join(lines))
    assert read(str(tmp_path / "slurm-1.txt")).steps == log.steps, "any name will do for a file"


@pytest.mark.parametrize("end", ["", " [repeated 3x across cluster]", "\x1b[0m", "Rollout: 3%|2| 1/2 [00:01<00:01]"])
def test_an_odd_value_in_slime_s_console_costs_no_other_value(tmp_path, end):
    odd = ["-nan", "-inf", "[1, 2.5]", "'text'", "None", "tensor([1., 2.])", "{'b': 1}", "<A at 0x7f>"]
    plain = ["1", "np.int64(1)", "tensor(1., device='cuda:0', grad_fn=<MeanBackward0>)", "array(1.)", "1e0"]
    shown = ", ".join(f"'a/{index}': {value}" for index, value in enumerate([*plain, *odd, "-1e-05"]))
    (tmp_path / "train.log").write_text(f"\x1b[36mperf 3: {{{shown}}}{end}\n")
    assert read(str(tmp_path)).steps == {3: {**{f"a/{index}": 1.0 for index in range(len(plain))}, "a/13": -1e-05}}


def test_slime_is_profiled_as_verl_is(tmp_path, invoke):
    lines = ["  rollout_batch_size .............. 8", "  n_samples_per_prompt ............ 4"]
    rng = np.random.default_rng(0)
    for step in range(12):
        tokens = np.ceil(rng.lognormal(5, 1, 32))
        seconds = 1.0 + 0.02 * tokens.max()
        lengths = {"rollout/response_len/mean": tokens.mean(), "rollout/response_len/max": tokens.max()}
        times = {"perf/train_wait_time": seconds, "perf/train_time": 2.0, "perf/step_time": seconds + 2.0}
        lines.append(f"x.py:1 - perf {step}: {lengths | {'rollout/truncated_ratio': 0, 'perf/rollout_time': seconds}}")
        lines.append(f"x.py:1 - perf {step}: {times | {'perf/actor_train_time': 2.0}}")
    (tmp_path / "slime.log").write_text("\n".join(lines))
    assert read(str(tmp_path)).batch == (8, 4)
    run = read_run(tmp_path)
    assert (run.stages["update_actor"], run.stages["other"]) == (2.0, pytest.approx(0))
    output = invoke(profile, tmp_path, "--no-picture")
    assert "slime's console, 12 steps, no telemetry" in output
    assert "by tail_batching, with rl-accel slime-config." in output


def test_slime_s_own_count_of_responses_and_a_given_number_tell_the_batch(tmp_path):
    lines = []
    for rollout in range(3):
        lines.append(f"x.py:1 - perf {rollout}: {{'perf/step_time': 9.0}}")
        for update in range(2):
            train = {"train/loss": 0.1, "train/global_batch_size": 256, "train/step": 2 * rollout + update}
            lines.append(f"x.py:2 - step {2 * rollout + update}: {train}")
    (tmp_path / "train.log").write_text("\n".join([*lines, ""]))
    log = read(str(tmp_path))
    assert (log.steps[2], log.responses, log.batch) == ({"perf/step_time": 9.0}, 512, (None, None))
    for given in ((None, 8), (64, None)):
        log.given = given
        assert log.batch == (64, 8)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("train.log", b"", "it is empty"),
        ("train.log", b"\x7fELF\0\0step:1 - a:1\n", "it is binary"),
        ("train.log", b"{'loss': 0.5}\n", "wanted what verl or slime printed"),
        ("m.jsonl", "{}".encode("utf-16"), "it is binary: wanted plain text in UTF-8"),
        ("m.jsonl.gz", gzip.compress(b"{}", mtime=0), "it is compressed"),
        ("train.log", b"[rlvr_pipeline.py (512)] [INFO] pipeline step 3 finished\n", "it is a log of ROLL"),
        ("train.log", b"Episode [1/20]: 3%\n{'timing/make_experience': 50.0}", "it is a log of OpenRLHF"),
        ("train.log", b"{'completions/mean_length': 700.0, 'step_time': 11.4}", "it is a log of TRL"),
        ("train.log", b"\x1b[37m(AReaL)\x1b[0m Train step 1/570 done.", "it is a log of AReaL"),
        ("m.json", b'{"timing/train/total_step_time": {"0": 100.0}}', "it is a log of NeMo-RL"),
        ("metrics/gen", b"1700000000001 104.5 1\n", "it is a metric of MLflow"),
        ("wandb-summary.json", b'{"_step": 7, "_runtime": 3, "timing_s/step": 2.5}', "export the run's history as CSV"),
        ("run-1.wandb", b":W&B\xbe\xe1\0", "export the run's history as CSV"),
        ("abc-json.log", b'{"log":"perf 1: {\\"a\\": 1}\\n","stream":"stdout"}', "give what the container printed"),
    ],
)
def test_a_file_of_another_kind_is_told_what_it_is_in_one_line(tmp_path, invoke, name, content, reason):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    for place in (path, tmp_path):
        with pytest.raises(RlAccelError, match=f"^[^\n]* holds no metrics of verl or slime[^\n]*{reason}[^\n]*$"):
            read(str(place))
    for words in ([profile, path], [compare, path, "--against", path], [plan, path]):
        assert reason in invoke(*words, code=None)


def test_a_large_log_has_a_progress_bar(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("rl_accel.telemetry.readers._LARGE", 10)
    monkeypatch.setenv("FORCE_COLOR", "1")
    path = write_verl(tmp_path / "m.jsonl", range(1, 4))
    assert read(str(path)).steps[2] == metrics(2)
    assert "m.jsonl" in capsys.readouterr().err


def test_nothing_to_read_says_what_is_wanted_and_a_missing_package_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(RlAccelError, match="does not exist"):
        read(str(tmp_path / "absent"))
    with pytest.raises(RlAccelError, match="'' wants a path before and after each comma"):
        read("", str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RlAccelError, match="pipe is no regular file, such as a pipe"):
        read(str(tmp_path / "pipe"))
    with pytest.raises(RlAccelError, match="holds no metrics of verl or slime; wanted"):
        read(str(tmp_path))
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    with pytest.raises(RlAccelError, match=r"to read it, pip install tensorboard$"):
        read(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"", r"h\.csv is no CSV file"),
        (b'Step,a\n1,2\n"unclosed\n', r"h\.csv is no CSV file"),
        (bytes(range(128, 256)), r"h\.csv is no CSV file \('utf-8' codec"),
        (f"Step;{REWARD}\n1;0,5\n".encode(), r"wants a column .* found Step;"),
    ],
)
def test_a_csv_of_another_form_is_named_in_one_line(tmp_path, content, wanted):
    (tmp_path / "h.csv").write_bytes(content)
    with pytest.raises(RlAccelError, match=f"^[^\n]*{wanted}"):
        read(str(tmp_path / "h.csv"))
    with pytest.raises(RlAccelError, match="holds no metrics"):  # only a CSV that is named is read
        read(str(tmp_path))
