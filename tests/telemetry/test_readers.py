"""Tests readers on real files of TensorBoard, W&B, verl's file logger and slime's console."""

import gzip
import json
import math
import os
import re
import shutil
import sys

import numpy as np
import pytest

from rl_accel.errors import RlAccelError
from rl_accel.lab.ab.compare import compare
from rl_accel.lab.ab.runner import GrowingLog
from rl_accel.plan.command import plan
from rl_accel.telemetry.logs import merged
from rl_accel.telemetry.profile import read_run
from rl_accel.telemetry.profile_report import profile
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


def test_a_log_that_grows_gives_each_complete_line_once_and_counts_lines_that_are_no_records(tmp_path):
    log = GrowingLog(tmp_path / "m.jsonl")
    assert log.read() == []
    with log.path.open("wb", buffering=0) as file:
        file.write(b'{"step": 1, "data": {"a": 1.5}}\n{"step": 2, "da')
        assert [log.read(), log.read()] == [[(1, {"a": 1.5})], []]
        file.write(b'ta": {"a": 2}}\n')
        assert (log.read(), log.bad_lines) == ([(2, {"a": 2.0})], 0)
        file.write(b'nonsense\n[1]\n{"step": 1}\n{"step": "x", "data": {}}\n{"step": 3, "data": {"a": 1}}\n')
    assert (log.read(), log.bad_lines) == ([(3, {"a": 1.0})], 4)


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
    assert not any("damaged" in note for note in log.notes)
    file = sorted(tmp_path.glob("log/*"))[0]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    file.write_bytes(data)
    log = read(str(file))
    assert 1 < len(log.steps) < 12
    assert re.search(f"{re.escape(str(file))}: [\\d,]+ bytes are damaged or cut off", log.notes[-1])


@pytest.mark.slow
def test_wandb_offline_as_verl_and_slime_call_it_and_as_a_killed_run_leaves_it(tmp_path):
    wandb = pytest.importorskip("wandb")
    settings = wandb.Settings(console="off", x_disable_stats=True, silent=True)
    config = {"data": {"train_batch_size": 16, "seed": 7}}
    verl, slime = tmp_path / "verl", tmp_path / "slime"
    run = wandb.init(project="p", name="n", mode="offline", dir=str(verl), config=config, settings=settings)
    others = {"val/generations": "a text", "a/nan": math.nan, "of": {"one": 1.0, "two": {"three": 3.0}}}
    for step in range(31):
        run.log(metrics(step) | others | ({"only/here": 3.0} if step == 7 else {}), step=step)
    run.finish()
    config = {"rollout_batch_size": 32, "seed": 3}
    run = wandb.init(project="p", mode="offline", dir=str(slime), config=config, settings=settings)
    for rollout in range(5):
        run.log({"rollout/raw_reward": rollout / 2, "rollout/step": rollout})
        run.log({"train/loss": 1.0, "train/step": 4 * rollout})
        run.log({"perf/step_time": 2.0, "rollout/step": rollout})
        run.log({"eval/aime": 0.5, "eval/step": rollout})
    run.finish()
    wandb.teardown()

    whole = {step: metrics(step) | {"of.one": 1.0, "of.two.three": 3.0} for step in range(31)}
    log = read(str(verl))
    assert (log.source, log.restarts) == ("W&B", [])
    assert log.steps == {**whole, 7: {**whole[7], "only/here": 3.0}}
    assert log.config["data"] == {"train_batch_size": 16, "seed": 7}

    log = read(str(slime))
    assert log.steps[3] == {"rollout/raw_reward": 1.5, "perf/step_time": 2.0, "eval/aime": 0.5}
    assert (log.config["seed"], log.config["rollout_batch_size"]) == (3, 32)

    (file,) = verl.glob("**/*.wandb")
    (tmp_path / "run-x.wandb").write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    cut = read(str(tmp_path / "run-x.wandb"))
    assert 5 < len(cut.steps) < 31
    assert cut.steps[5] == whole[5]
    assert (read(str(file)).notes, ["bytes are damaged" in note for note in cut.notes]) == ([], [True])
    data = bytearray(file.read_bytes())
    data[7 + 4 : 7 + 6] = b"\xff\x7f"  # the length of the first entry
    (tmp_path / "run-x.wandb").write_bytes(data)
    assert len(read(str(tmp_path / "run-x.wandb")).steps) > 5, "the next block is read"
    (tmp_path / "run-x.wandb").write_bytes(file.read_bytes().replace(b"only/here", b"only/\xffere"))  # no UTF-8
    assert read(str(tmp_path / "run-x.wandb")).steps == {step: values for step, values in whole.items() if step != 7}


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
    shown = ", ".join(f"'{index}': {value}" for index, value in enumerate([*plain, *odd, "-1e-05"]))
    (tmp_path / "train.log").write_text(f"\x1b[36mperf 3: {{{shown}}}{end}\n")
    assert read(str(tmp_path)).steps == {3: {**{str(index): 1.0 for index in range(len(plain))}, "13": -1e-05}}


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
    assert read(str(tmp_path)).batch() == (8, 4)
    run = read_run(tmp_path)
    assert (run.stages["update_actor"], run.stages["other"]) == (2.0, pytest.approx(0))
    assert run.estimate.pace.mean == pytest.approx(0.02, rel=0.05)
    output = invoke(profile, tmp_path, "--no-picture")
    assert "slime's console, 12 steps, no telemetry" in output
    assert "tail_batching, with rl-accel slime-config would save about" in output


def test_a_summary_of_wandb_is_the_last_step(tmp_path):
    (tmp_path / "files").mkdir()
    summary = {"_step": 7, "timing_s/step": 2.5, "val/generations": {"_type": "table-file"}}
    (tmp_path / "files" / "wandb-summary.json").write_text(json.dumps(summary))
    log = read(str(tmp_path))
    assert (str(log), log.steps) == (
        "W&B's rows in JSON, 1 step, no telemetry",
        {7: {"timing_s/step": 2.5}},
    )


@pytest.mark.parametrize(
    ("content", "defect"), [(b"", "is empty"), (b"\x7fELF\0\0step:1 - a:1\n", "is binary"), (b"{'loss': 0.5}\n", "")]
)
def test_a_file_without_metrics_is_refused_in_one_line(tmp_path, invoke, content, defect):
    path = tmp_path / "train.log"
    path.write_bytes(content)
    for words in ([profile, path], [compare, path, "--against", path], [plan, path]):
        with pytest.raises(RlAccelError, match=f"^[^\n]* holds no metrics of [^\n]*{defect}[^\n]*$"):
            words[0].main([str(word) for word in words[1:]], standalone_mode=False)


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
    wanted = "holds no metrics of verl's file logger, TensorBoard, W&B, a CSV of W&B, verl's"
    with pytest.raises(RlAccelError, match=wanted):
        read(str(tmp_path))
    for name, module, package in (
        ("events.out.tfevents.1", "tensorboard.backend.event_processing.event_file_loader", "tensorboard"),
        ("run-1.wandb", "wandb.proto.wandb_internal_pb2", "wandb"),
    ):
        (tmp_path / package).mkdir()
        (tmp_path / package / name).write_bytes(b"")
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(RlAccelError, match=f"to read it, pip install {package}$"):
            read(str(tmp_path / package))


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("h.csv", b"", r"h\.csv is no CSV file \(No columns to parse from file\)$"),
        ("h.csv", b'Step,a\n1,2\n"unclosed\n', r"is no CSV file \(Error tokenizing data\. .* inside string"),
        ("h.csv", bytes(range(128, 256)), r"is no CSV file \('utf-8' codec"),
        ("h.csv", "Step,a\n1,2\n".encode("utf-16"), r"no metrics of .*; .*h\.csv is in UTF-16: .*plain text in UTF-8$"),
        ("m.jsonl", "{}".encode("utf-16"), r"holds no metrics of .*m\.jsonl is in UTF-16: wanted plain"),
        ("m.jsonl.gz", gzip.compress(b"{}", mtime=0), r"no metrics of .*\.gz is compressed \(gzip\): wanted plain"),
    ],
)
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_file_that_is_no_text_is_named_in_one_line(tmp_path, name, content, wanted, is_folder):
    (tmp_path / name).write_bytes(content)
    if is_folder and name == "h.csv":
        wanted = "holds no metrics of"  # only a CSV that is named is read
    with pytest.raises(RlAccelError, match=f"^[^\n]*{wanted}"):
        read(str(tmp_path if is_folder else tmp_path / name))


def as_docker(line):
    return json.dumps({"log": f"{line}\n", "stream": "stdout", "time": "2026-01-01T00:00:00.1Z"}, separators=(",", ":"))


def test_a_console_in_docker_s_json_has_every_metric(tmp_path):
    verl = [f"\x1b[36m(TaskRunner pid=7)\x1b[0m step:{step} - a:1.5 - timing_s/step:{step}.25" for step in (1, 2)]
    slime = ["\x1b[36m(A pid=1)\x1b[0m [t] x.py:1 - perf 3: {'perf/step_time': 2.5, 'perf/a': \"'\"}"]
    (tmp_path / "abc-json.log").write_text("\n".join(map(as_docker, ["Training: 0%|  |\rhello", *verl])))
    assert read(str(tmp_path)).steps == {step: {"a": 1.5, "timing_s/step": step + 0.25} for step in (1, 2)}
    (tmp_path / "abc-json.log").write_text("\n".join(map(as_docker, slime)))
    assert read(str(tmp_path)).steps == {3: {"perf/step_time": 2.5}}


@pytest.mark.parametrize("size", [30, 10**6])
def test_a_console_of_kubernetes_or_of_a_collector_has_every_metric(tmp_path, size):
    """Kubernetes cuts long lines into parts."""
    verl = [f"(TaskRunner pid=7) step:{step} - a/mean:1.5 - timing_s/step:{step}.25" for step in (1, 2)]
    slime = ["(A pid=1) [t] x.py:1 - perf 3: {'perf/step_time': 2.5, 'perf/a': 1.25}"]

    def pieces(line):
        parts = [line[at : at + size] for at in range(0, len(line), size)]
        return [f"2026-11-28T10:00:00.1Z stdout {'P' if part is not parts[-1] else 'F'} {part}" for part in parts]

    log = tmp_path / "0.err"
    for lines, wanted in (
        (verl, {step: {"a/mean": 1.5, "timing_s/step": step + 0.25} for step in (1, 2)}),
        (slime, {3: {"perf/step_time": 2.5, "perf/a": 1.25}}),
    ):
        log.write_text("".join(f"{piece}\n" for line in lines for piece in pieces(line)))
        assert read(str(log)).steps == wanted
        for key in ("log", "message", "msg", "textPayload", "line"):
            log.write_text("".join(json.dumps({"time": "x", key: line, "pod": "a"}) + "\n" for line in lines))
            assert read(str(tmp_path)).steps == wanted


@pytest.mark.parametrize("name", ["metrics.json", "metrics", "metrics.log", "metrics.jsonl"])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["", "byte order mark"])
def test_the_file_of_verl_s_file_logger_may_have_any_name(tmp_path, monkeypatch, name, mark):
    from verl.utils.tracking import Tracking

    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / name))
    tracking = Tracking("p", "e", "file")
    for step in (1, 2, 3):
        tracking.log({**metrics(step), "of/numpy": np.float32(0.5)}, step)
    tracking.finish()
    (tmp_path / name).write_text(mark + (tmp_path / name).read_text(), encoding="utf-8")
    log = read(str(tmp_path / name))
    assert log.source == "verl's file logger"
    assert log.steps == {step: {**metrics(step), "of/numpy": 0.5} for step in (1, 2, 3)}


def test_a_link_to_a_log_is_no_other_run(tmp_path):
    write_verl(tmp_path / "runs" / "1.jsonl", range(1, 4))
    (tmp_path / "runs" / "latest.jsonl").symlink_to(tmp_path / "runs" / "1.jsonl")
    (tmp_path / "runs" / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    assert list(read(str(tmp_path)).steps) == [1, 2, 3]


def test_the_size_of_a_batch_is_never_that_of_another_run(tmp_path):
    for run, prompts, responses in (("a", 2, 16), ("b", 8, 4)):
        write_verl(tmp_path / f"{run}.jsonl", range(1, 4))
        line = f"data.train_batch_size={prompts} actor_rollout_ref.rollout.n={responses}"
        (tmp_path / f"{run}.log").write_text(f"python -m verl.trainer.main_ppo {line}\n")
    write_verl(tmp_path / "c.jsonl", range(1, 4))
    result = {run: read(str(tmp_path / f"{run}.jsonl")).batch() for run in "abc"}
    assert result == {"a": (2, 16), "b": (8, 4), "c": (None, None)}
    (tmp_path / "a.log").unlink()
    assert read(str(tmp_path / "a.jsonl")).batch() == (8, 4), "one console beside a log is taken for its own"


def test_the_size_of_a_batch_is_that_of_the_last_start_of_a_run(tmp_path):
    starts = [
        f"data.train_batch_size={prompts} actor_rollout_ref.rollout.n={responses}\n"
        + "".join(f"{'.' * 99_999}\nstep:{step} - timing_s/step:2.5\n" for step in range(1, 20))
        for prompts, responses in ((8, 4), (16, 2))
    ]
    (tmp_path / "both.log").write_text("".join(starts))
    (tmp_path / "first.log").write_text(starts[0])
    (tmp_path / "second.log").write_text(starts[1])
    assert read(str(tmp_path / "both.log")).batch() == (16, 2)
    assert read(str(tmp_path / "first.log"), str(tmp_path / "second.log")).batch() == (16, 2)
    assert read(str(tmp_path / "first.log")).batch() == (8, 4)


def test_a_log_of_optimizer_steps_alone_is_one_line(tmp_path, invoke):
    (tmp_path / "sft.log").write_text("step:1 - train/loss:0.5 - train/lr(1e-3):0.1\n")
    log = write_verl(tmp_path / "good.jsonl", range(1, 5))
    for command, *words in ((profile, tmp_path / "sft.log"), (compare, log, tmp_path / "sft.log", "--against", log)):
        said = invoke(command, *words, code=None)
        assert said.endswith("sft.log holds only metrics of optimizer steps, train/…; wanted those of training steps")


@pytest.mark.parametrize("cut", [str, str.rstrip], ids=["as it is", "without trailing spaces"])
def test_lines_of_slime_that_a_terminal_has_wrapped_are_joined(tmp_path, cut):
    lines, wanted = [], {}
    for step in range(3):
        first = (
            {"perf/nested": {"a": 1}} | {f"perf/metric_{n}": n + step / 8 for n in range(6)} | {"perf/last": {"a": {}}}
        )
        second = {"rollout/raw_reward": np.float64(step / 3), "rollout/object": "<A at 0x7f>"}
        head = f"(RayTrainGroup pid={step}) [2026-01-01 10:00:00] x.py:1 -"
        lines += [
            f"{head} perf {step}: {first}",
            f"{head} Timer train end",
            f"{head} rollout {step}: {second}",
            "plain",
        ]
        wanted[step] = {
            **{name: value for name, value in first.items() if "metric" in name},
            "rollout/raw_reward": step / 3,
        }
    for width in range(70, 330):
        rows = [cut(line[at : at + width]) for line in lines for at in range(0, len(line), width)]
        (tmp_path / "train.log").write_text("\n".join(rows) + "\n")
        assert read(str(tmp_path)).steps == wanted, width


def test_rows_of_wandb_in_json_are_read_and_those_of_rollouts_are_not(tmp_path):
    rows = [{"_step": step, "_timestamp": 1.5, "val/text": "_step", REWARD: step / 4} for step in (1, 2)]
    wanted = {1: {REWARD: 0.25}, 2: {REWARD: 0.5}}
    for name, text in (("a.jsonl", "\n".join(map(json.dumps, rows))), ("a.json", json.dumps(rows))):
        (tmp_path / name).write_text(text)
        assert (read(str(tmp_path / name)).source, read(str(tmp_path / name)).steps) == ("W&B's rows in JSON", wanted)
    (tmp_path / "1.jsonl").write_text('{"input": "a", "score": 1.0, "step": 1}\n')
    assert read(str(tmp_path)).steps == wanted
    (tmp_path / "a.jsonl").write_text('{"step": 1, "data": {"critic": {"score": 0.5}}}\n')
    with pytest.raises(RlAccelError, match="holds no metrics of verl's file logger"):
        read(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"Step;{REWARD}\n1;0.5\n", 0.5),
        (f"Step\t{REWARD}\n1\t0.5\n", 0.5),
        (f'Step,{REWARD},name\n1,0.5,"1,2 a"\n', 0.5),
        (f"Step;{REWARD}\n1;0,5\n", "wants numbers with a decimal point, found 0,5"),
        (f"Step;{REWARD}\n1;1,234\n", "wants numbers with a decimal point, found 1,234"),
        (f'Step,{REWARD}\n1,"12,75"\n', "wants numbers with a decimal point, found 12,75"),
        (f'Step,{REWARD}\n1,"0,500"\n', "wants numbers with a decimal point, found 0,500"),
        (f"Step,a - {REWARD},a - {REWARD}\n1,0.5,0.75\n", "metrics of one run"),
    ],
)
def test_a_csv_of_another_country_is_never_read_as_other_numbers(tmp_path, text, wanted):
    (tmp_path / "h.csv").write_text(text)
    if isinstance(wanted, float):
        assert read(str(tmp_path / "h.csv")).steps == {1: {REWARD: wanted}}
    else:
        with pytest.raises(RlAccelError, match=wanted):
            read(str(tmp_path / "h.csv"))


def test_a_csv_may_have_thousands_and_begin_with_the_newest_step(tmp_path):
    (tmp_path / "h.csv").write_text(f'Step,{REWARD}\n3,0.75\n2,"1,026.5"\n1,0.25\n')
    log = read(str(tmp_path / "h.csv"))
    assert (log.steps, log.restarts) == ({1: {REWARD: 0.25}, 2: {REWARD: 1026.5}, 3: {REWARD: 0.75}}, [])
