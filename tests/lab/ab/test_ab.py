"""Tests ``rl-accel ab`` from outside, with real processes and signals, by the files that it leaves."""

import io
import json
import signal
from pathlib import Path

import pytest
from rich.console import Console

from rl_accel.lab.ab.progress import ProgressView
from rl_accel.lab.ab.recipe import RunPlan
from rl_accel.lab.ab.runner import only_writer


def pids(out: Path) -> list[Path]:
    return sorted(out.glob("*/*pid"))


def leftovers(tmp_path: Path) -> list[Path]:
    """The folders for Ray that the runs of this test were given and that still exist."""
    logs = [log.read_text() for log in tmp_path.glob("**/train.log")]
    return [path for log in logs if (path := Path(log.split("ray tmpdir ")[1].split()[0])).exists()]


def summary_of(out):
    return json.loads((out / "summary.json").read_text())


@pytest.fixture
def hanging(recipe_file, start_ab, tmp_path, wait_for):
    """``hanging(stubborn, step)`` starts the command on a trainer that hangs at ``step``; returns it once that is reached."""

    def start(stubborn, step, **arms):
        arms = {"stock": {"overrides": [f"hang_at={step}", f"stubborn={stubborn}"]}, **arms}
        process = start_ab(recipe_file(arms=arms), "--out", tmp_path / "out")
        metrics = tmp_path / "out" / "stock-seed0" / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") == step - 1, f"step {step}")
        return process

    return start


@pytest.mark.slow
def test_arms_run_after_prepare_and_the_report_compares_them(recipe_file, start_ab, tmp_path):
    checks = {"identical": ["critic/score/mean"], "faster": {"adv": 3, "step": 1.1}, "reward_gain": 0.1}
    made = "import os, pathlib; pathlib.Path('made').write_text(os.environ['A'])"
    path = recipe_file(checks=checks, prepare=["python", "-c", made], env={"A": "x", "B": "${seed}"})
    process = start_ab(path, "--out", tmp_path / "out")
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert (path.parent / "made").read_text() == "x", "prepare runs in the folder of the recipe"
    assert "accelerated and stock, seed 0: critic/score/mean is identical in all 8 steps" in output
    assert f"Report: {tmp_path / 'out' / 'report.html'}" in output
    summary = summary_of(tmp_path / "out")
    assert (summary["schema"], summary["ok"]) == ("rl_accel.ab/3", True)
    done = [(run["name"], run["status"], run["steps_done"]) for run in summary["runs"]]
    assert done == [("stock-seed0", "done", 8), ("accelerated-seed0", "done", 8)]
    assert {check["status"] for check in summary["checks"]} == {"green"}
    assert leftovers(tmp_path) == []
    log = (tmp_path / "out" / "stock-seed0" / "train.log").read_text()
    assert len(log.split("ray tmpdir ")[1].split()[0]) < 40, "Ray's sockets need a short path"
    assert "address None" in log


@pytest.mark.slow
def test_parting_arms_are_red_and_runs_are_kept_reported_again_or_overwritten_as_asked(recipe_file, call_ab, tmp_path):
    out, arms = tmp_path / "out", {"stock": {}, "accelerated": {"overrides": ["part_at=5"]}}
    checks = {"identical": ["critic/score/mean"]}
    recipe = recipe_file(arms=arms, checks=checks)
    output = call_ab(recipe, "--out", out, code=1)
    assert "critic/score/mean parts at step 5" in output
    assert "Red checks: identical." in output

    (out / "report.html").unlink()
    call_ab("--report-only", out, code=1)
    assert "parts at step 5" in (out / "report.html").read_text()
    lenient = recipe_file(arms=arms, checks=checks | {"warn_only": ["identical"]})
    assert "red (warning only)" in call_ab(lenient, "--report-only", out)

    run = out / "stock-seed0" / "run.json"
    kept = run.read_text()
    assert "already holds stock-seed0" in call_ab(recipe, "--out", out, "--arms", "stock", code=None)
    assert run.read_text() == kept
    output = call_ab(recipe, "--out", out, "--arms", "stock", "--seeds", "0,4", "--steps", 2, "--overwrite")
    assert run.read_text() != kept
    runs = summary_of(out)["runs"]
    assert [(run["name"], run["steps_done"]) for run in runs] == [("stock-seed0", 2), ("stock-seed4", 2)]
    assert "seed=4" in runs[1]["command"]


def test_two_calls_for_one_folder_notice_each_other(recipe_file, call_ab, tmp_path):
    plan = RunPlan("stock", 0, 8, tmp_path / "stock-seed0", ())
    with only_writer(plan):
        output = call_ab(recipe_file(), "--out", tmp_path, "--overwrite", code=None)
    assert f"{tmp_path / 'stock-seed0'}: another rl-accel ab is writing this run" in output
    assert list(tmp_path.glob("*/run.json")) == []


def test_waiting_for_the_trainer_is_said_and_is_no_training(monkeypatch):
    monkeypatch.setattr("rl_accel.lab.ab.progress._PLAIN_EVERY_S", -1.0)
    console = Console(record=True, file=io.StringIO(), width=200)
    plan = RunPlan("stock", 0, 8, Path("stock-seed0"), ())
    view = ProgressView(console, [plan], "critic/score/mean")
    view.started(plan)
    view.tick(plan)
    view.step(plan, 1, {})
    view.ended(plan, "done", 90.0, 60.0)
    text = console.export_text()
    assert "stock-seed0: waiting for Ray and the trainer, 0 s" in text
    assert "90 s, of which 60 s until the first step had ended" in text


@pytest.mark.slow
def test_each_failed_arm_says_why_and_resume_repeats_it_alone(recipe_file, call_ab, tmp_path):
    out = tmp_path / "out"
    arms = {"stock": {"overrides": ["fail_at=4", "log=<the last words>"]}, "accelerated": {}}
    faults = {"broken": "broken=yes", "silent": "silent=yes", "short": "steps=2"}
    arms |= {arm: {"overrides": [fault]} for arm, fault in faults.items()}
    output = call_ab(recipe_file(arms=arms), "--out", out, code=1)
    for message in (
        "stock-seed0 failed: exit code 1 at step 3",
        "the trainer gave up at step 4",
        "broken-seed0 failed: exit code 1 at step 0",
        "an override that nobody knows",
        "silent-seed0 failed: no training step in metrics.jsonl: trainer.logger must include file",
        "short-seed0 failed: ended by itself at step 2 of 8",
    ):
        assert message in output
    summary = summary_of(out)
    assert [run["status"] for run in summary["runs"]] == ["failed", "done", "failed", "failed", "failed"]
    assert summary["curves"]["critic/score/mean"]["stock-seed0"]["steps"] == [1, 2, 3]
    html = (out / "report.html").read_text()
    assert "the trainer gave up at step 4" in html
    assert "&lt;the last words&gt;" in html

    pid = out / "accelerated-seed0" / "pid"
    first = pid.read_text()
    output = call_ab(recipe_file(arms={"stock": {}, "accelerated": {}}), "--out", out, "--resume")
    assert "accelerated-seed0: kept from an earlier call" in output
    assert pid.read_text() == first
    assert (out / "stock-seed0" / "metrics.jsonl").read_text().count("\n") == 8
    other = recipe_file(arms={"accelerated": {"overrides": ["adv=2"]}}, baseline="")
    assert "kept" not in call_ab(other, "--out", out, "--resume"), "another command is another run"
    assert pid.read_text() != first


@pytest.mark.slow
def test_an_arm_that_takes_too_long_is_stopped(recipe_file, call_ab, tmp_path, gone):
    arms = {"stock": {"overrides": ["hang_at=3"]}}
    output = call_ab(recipe_file(arms=arms, timeout_s=3), "--out", tmp_path / "out", code=1)
    assert "at step 2" in output
    assert json.loads((tmp_path / "out" / "stock-seed0" / "run.json").read_text())["status"] == "timeout"
    assert all(gone(pid) for pid in pids(tmp_path / "out"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.full) for number in (signal.SIGINT, signal.SIGHUP))],
)
def test_a_stop_signal_ends_the_run_and_keeps_what_was_measured(hanging, tmp_path, gone, number):
    out, process = tmp_path / "out", hanging("yes", 4, accelerated={})
    process.send_signal(number)
    output, _ = process.communicate()
    assert process.returncode == 128 + number, output
    assert [gone(pid) for pid in pids(out)] == [True, True]
    assert leftovers(tmp_path) == []
    (run,) = summary_of(out)["runs"]
    assert (run["status"], run["steps_done"], run["exit_code"]) == ("interrupted", 3, 128 + signal.SIGTERM)
    assert "1 of 2 runs were not started" in output
    assert (out / "report.html").exists()


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_a_deaf_trainer(hanging, tmp_path, gone):
    process = hanging("deaf", 2)
    process.send_signal(signal.SIGINT)
    with pytest.raises(Exception, match="timed out"):
        process.wait(2)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 128 + signal.SIGINT
    assert gone(tmp_path / "out" / "stock-seed0" / "pid")


@pytest.mark.slow
def test_a_killed_runner_takes_its_run_along_and_its_report_can_be_rebuilt(hanging, call_ab, tmp_path, wait_for, gone):
    out, process = tmp_path / "out", hanging("yes", 3)
    process.kill()
    process.communicate()
    assert len(pids(out)) == 2
    wait_for(lambda: all(gone(pid) for pid in pids(out)), "the run to end with its runner")
    wait_for(lambda: leftovers(tmp_path) == [], "the removal of Ray's folder")
    assert "stock-seed0: interrupted" in call_ab("--report-only", out, code=1)
    assert summary_of(out)["curves"]["critic/score/mean"]["stock-seed0"]["steps"] == [1, 2]


def test_a_failed_prepare_starts_no_run_and_shows_its_log(recipe_file, call_ab, tmp_path):
    path = recipe_file(prepare=["python", "-c", "raise SystemExit('no data here')"])
    output = call_ab(path, "--out", tmp_path / "out", code=1)
    assert "prepare failed with exit code 1" in output
    assert "no data here" in output
    assert not (tmp_path / "out" / "stock-seed0").exists()


def test_dry_run_prints_the_commands_and_writes_nothing(recipe_file, call_ab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = call_ab(recipe_file(env={"A": "b c"}, overrides=["at=${run_dir}"]), "--dry-run")
    assert "go to out/toy" in output, "without --out results go to a folder named after the recipe"
    run = tmp_path / "out" / "toy" / "stock-seed0"
    assert "# stock-seed0\nA='b c' " in output
    assert f"at={run} seed=0 steps=8 adv=0.4" in output
    assert not (tmp_path / "out").exists()


def test_an_arm_whose_module_is_absent_is_left_out_with_a_line(recipe_file, call_ab, tmp_path):
    arms = {"stock": {}, "here": {"needs": "json"}, "absent": {"needs": "no_such_module"}}
    output = call_ab(recipe_file(arms=arms), "--out", tmp_path / "out", "--dry-run")
    assert "arm absent is left out: there is no module no_such_module" in output
    assert "# here-seed0" in output
    assert "# absent-seed0" not in output


@pytest.mark.slow
def test_each_run_may_be_a_job_of_its_own_and_the_report_has_them_all(recipe_file, call_ab, tmp_path):
    prepare = ["python", "-c", "open('prepared.txt', 'a').write('once ')"]
    arms = {"stock": {}, "broken": {"overrides": ["fail_at=1"]}}
    path = recipe_file(steps=1, prepare=prepare, arms=arms)
    out = tmp_path / "out"
    output = call_ab(path, "--out", out, "--only", "stock-seed7", code=None)
    assert "--only wants one of prepare, stock-seed0, broken-seed0, found 'stock-seed7'" in " ".join(output.split())
    call_ab(path, "--out", out, "--only", "prepare")
    assert list(out.glob("*/run.json")) == []
    call_ab(path, "--out", out, "--only", "broken-seed0", "--resume", code=1)
    assert "1 of 2 runs were not started" in call_ab("--report-only", out, code=1)
    job = (path, "--out", out, "--only", "stock-seed0", "--resume", "--ray-address", "10.0.0.1:6379")
    call_ab(*job)
    assert "kept from an earlier call" in call_ab(*job), "a job that is submitted again"
    assert (path.parent / "prepared.txt").read_text() == "once "
    call_ab("--report-only", out, code=1)
    runs = {run["name"]: run for run in summary_of(out)["runs"]}
    assert {name: run["status"] for name, run in runs.items()} == {"stock-seed0": "done", "broken-seed0": "failed"}
    assert runs["stock-seed0"]["env"]["RAY_ADDRESS"] == "10.0.0.1:6379"


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (1, ["{recipe}", "--out", "{recipe}/out"], "Not a directory"),
        (2, [], "give RECIPE, or --report-only DIR"),
        (None, ["absent.yaml", "--out", "{out}"], "cannot read the recipe absent.yaml"),
        (None, ["{recipe}", "--out", "{out}", "--arms", "stok"], "did you mean stock?"),
        (2, ["{recipe}", "--out", "{out}", "--seeds", "a"], "wants whole numbers separated by commas, found 'a'"),
        (2, ["{recipe}", "--out", "{out}", "--steps", "0"], "0 is not in the range"),
        (2, ["{recipe}", "--out", "{out}", "--resume", "--overwrite"], "exclude each other"),
        (None, ["--report-only", "{folder}"], "holds no A/B"),
    ],
)
def test_wrong_use_is_said_in_words(recipe_file, call_ab, tmp_path, code, arguments, message):
    known = {"recipe": recipe_file(), "out": tmp_path / "out", "folder": tmp_path}
    output = call_ab(*(word.format(**known) for word in arguments), code=code)
    assert message in " ".join(output.split())
    assert "Traceback" not in output
