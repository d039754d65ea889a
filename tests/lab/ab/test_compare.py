"""Tests ``rl-accel compare`` by its command line, on runs in folders of other launchers."""

import json
import math

import numpy as np
import pytest

from rl_accel.lab.ab.compare import compare

REWARD = "critic/score/mean"
ARMS = {"stock": 0.5, "tail": 0.5, "async": 0.3}
"""Gain of the reward, by arm."""


@pytest.fixture
def call(invoke, tmp_path, monkeypatch):
    """``call(words...)`` runs the command; returns its output and its summary."""
    monkeypatch.setenv("COLUMNS", "250")

    def run(*words):
        output = invoke(compare, *words, "--out", tmp_path / "out")
        return output, json.loads((tmp_path / "out" / "summary.json").read_text())

    return run


@pytest.fixture
def write(tmp_path):
    """``write(name, gain, steps)`` writes a run of verl with its own noise and returns its folder."""

    def make(name, gain=0.5, steps=60, noise=0.0, **more):
        rng = np.random.default_rng(sum(map(ord, name)))
        level, lines = rng.normal(0, noise), []
        for step in range(1, steps + 1):
            data = {REWARD: 0.2 + (gain + level) * min(step / 40, 1), "timing_s/step": 6.0, "timing_s/gen": 4.0, **more}
            lines.append(json.dumps({"step": step, "data": data}) + "\n")
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(lines))
        return folder

    return make


def rows_of(summary, axis="steps"):
    rows = [row for row in summary["convergence"]["rows"] if row["axis"] == axis and row["metric"] == REWARD]
    return {row["arm"]: row for row in rows}


def test_runs_of_two_arms_that_are_equal(call, write):
    stock, tail = ([write(f"{arm}-seed{seed}", noise=0.002) for seed in range(8)] for arm in ("stock", "tail"))
    output, summary = call(*stock, "--against", *tail, "--margin", "5%", "--batch-size", 16)
    axes = ("steps", "prompts", "minutes")
    assert {rows_of(summary, axis)["tail"]["answer"] for axis in axes} == {"equal within the margin"}
    assert "tail and stock, critic/score/mean against training steps: equal within the margin" in output
    assert "5% of stock's gain; 8 seeds, paired" in output
    assert "stock-seed0: verl's file logger, steps 1 to 60" in output
    assert "seconds and hours compare only what ran on equal GPUs" in output
    page = (next(iter(stock)).parent / "out" / "report.html").read_text()
    assert "Did it change learning?" in page
    assert "No check is red" not in page, "nothing was checked"


def test_three_arms_of_which_the_first_is_the_baseline(call, write):
    runs = {arm: [write(f"{arm}/seed{seed}", gain, noise=0.001) for seed in range(4)] for arm, gain in ARMS.items()}
    _, summary = call(*runs["stock"], "--against", *runs["tail"], "--against", *runs["async"], "--margin", "10%")
    answers = {arm: row["answer"] for arm, row in rows_of(summary).items()}
    assert answers == {"tail": "equal within the margin", "async": "different"}
    assert summary["recipe"]["baseline"] == "stock"


def test_unequal_lengths_restarts_and_missing_metrics_are_said(call, write, tmp_path):
    stock = [write(f"stock-seed{seed}") for seed in range(3)]
    tail = [write(f"tail-seed{seed}", 0.48 + seed / 50, steps=50 if seed else 60) for seed in range(3)]
    again = write("again", steps=60)
    lines = (again / "metrics.jsonl").read_text().splitlines(keepends=True)
    (again / "metrics.jsonl").write_text("".join(lines[30:55]))
    log = tail[0] / "metrics.jsonl"
    log.write_text(log.read_text().replace('"timing_s/step": 6.0, ', "", 1))
    validated = json.loads(lines[-1]) | {"data": {"val-core/gsm8k/acc/mean@1": 0.5}}
    with (stock[1] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(validated) + "\n")
    output, summary = call(f"{stock[0]}, {again}", *stock[1:], "--against", *tail)
    assert "the run began again at step 31: what was logged before from there on is left out" in output
    assert "50 of 60 training steps" in output
    assert "val-core/gsm8k/acc/mean@1 is not in" in output
    assert "minutes of training are not known of tail-seed0, which did not log timing_s/step of every step" in output
    assert "prompts trained are not known of all runs of stock, all runs of tail, which did not tell" in output
    row = rows_of(summary)["tail"]
    assert (row["end"], row["answer"]) == (50, "not enough runs")


def test_one_seed_is_never_equal_and_runs_without_a_known_seed_are_not_paired(call, write):
    output, summary = call(write("stock-seed0"), "--against", write("tail-seed0", gain=0.501))
    assert rows_of(summary)["tail"]["answer"] == "not enough runs"
    assert "nothing is decided below 3 seeds of each" in output
    output, summary = call(write("same/stock-seed0"), "--against", write("same/tail-seed0"))
    assert rows_of(summary)["tail"]["answer"] == "identical"
    assert "tail and stock, seed 0: critic/score/mean is identical in all 60 steps" in output

    stock, tail = ([write(f"{arm}_{name}", noise=0.001) for name in "xyz"] for arm in ("stock", "tail"))
    output, summary = call(*stock, "--against", *tail)
    assert rows_of(summary)["tail_x"]["paired"] is False
    assert "3 and 3 runs, not paired" in output
    assert "stock_x: its runs pair with none" in output


def test_what_changed_in_the_data_comes_from_metrics_telemetry_and_ledgers(call, write):
    stock = write("stock-seed0", **{"response_length/mean": 100, "response_length/clip_ratio": 0.1})
    more = {"training/off_policy/trajectory_staleness/mean": 0.5, "rl_accel/tail_batching/short_round": 1.0}
    tail = write("tail-seed0", **{"response_length/mean": 80, "rl_accel/reward_timeout/killed": 2}, **more)
    (tail / "checkpoints/tail_batching").mkdir(parents=True)
    ledger = [{"step": 1, "trained": {"1:1": 0, "1:2": 1}}, {"step": 2, "trained": {"1:2": 1}, "rejected": {"1:3": 2}}]
    (tail / "checkpoints/tail_batching/ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ledger))
    rows = [[0, 0.0, 1.0, 1.0, 1.0, tokens, "s", "completed"] for tokens in (10, 20, 30)]
    rows.append([0, 0.0, None, None, 1.0, 999, "s", "cancelled"])
    (tail / "checkpoints/rl_accel_telemetry.jsonl").write_text(json.dumps({"step": 1, "responses": rows}))
    output, summary = call(stock, "--against", tail)
    data = summary["data"]
    assert data["mean length of a response"] == {"stock": 100, "tail": 80}
    assert data["share cut at the limit"] == {"stock": pytest.approx(0.1)}
    assert (data["rewards killed a step"], data["staleness, mean"]) == ({"tail": 2}, {"tail": 0.5})
    assert data["tokens of a response, p50"] == {"tail": 20}
    (ledger,) = summary["rollout"]["ledgers"]
    assert (ledger["run"], [ledger["epochs"][0][key] for key in ("once", "again", "rejected")]) == (
        "tail-seed0",
        [1, 1, 1],
    )
    assert "What changed in the data" in output


def test_slime_has_its_own_names(call, tmp_path):
    for arm in ("stock", "tail"):
        for seed in range(3):
            lines = []
            for step in range(20):
                metrics = {"rollout/raw_reward": step / 20, "perf/step_time": 2.0, "perf/train_time": 0.5}
                lines.append(f"[t] x.py:1 - perf {step}: {metrics | {'perf/train_wait_time': 1.5}}")
            (tmp_path / f"{arm}-seed{seed}.log").write_text("\n".join(lines))
    runs = [[tmp_path / f"{arm}-seed{seed}.log" for seed in range(3)] for arm in ("stock", "tail")]
    _, summary = call(*runs[0], "--against", *runs[1], "--batch-size", 4)
    (row,) = (row for row in summary["convergence"]["rows"] if row["axis"] == "prompts")
    assert (row["metric"], row["end"], row["answer"]) == ("rollout/raw_reward", 80, "identical")
    stages = {row["stage"]: row["arms"]["stock"]["mean"] for row in summary["stages"]}
    assert stages == {"train_wait_time": 1.5, "train_time": 0.5, "other": 0, "step_time": 2.0}


@pytest.mark.parametrize(
    ("folders", "arms"),
    [
        (["a/stock-seed0", "b/stock-seed0"], ["a/stock-seed0", "b/stock-seed0"]),
        (["A/seed0", "B/seed0"], ["A", "B"]),
        (["L26_v1", "run-7_tail-3"], ["L26_v1", "run-7_tail"]),
    ],
    ids=["of one name", "a seed alone", "a number that is no seed"],
)
def test_folders_give_arms_their_names(call, write, tmp_path, monkeypatch, folders, arms):
    monkeypatch.chdir(tmp_path)
    for folder in folders:
        write(folder)
    _, summary = call(folders[0], "--against", folders[1])
    assert [*summary["recipe"]["arms"]] == arms
    assert set(rows_of(summary)) == {arms[1]}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["{a}", "{b}"], "stock-seed0 --against {b}"),
        (["{a}", "--agianst", "{b}"], "No such option: --agianst (did you mean --against?)"),
        (["--against", "{b}"], "write {b} --against RUN"),
        (["{a}", "--against", "nowhere"], "nowhere does not exist"),
        (["{a}", "--against", "{b}", "--reward", "critic/scores/mean"], "did you mean critic/score/mean?"),
        (["{a}", "--against", "{b}", "--margin", "wide"], "metrics.margin wants"),
        (["{a}, ", "--against", "{b}"], "wants a path before and after each comma, found an empty one"),
        (["{a}", "--against", ""], "wants a path before and after each comma, found an empty one"),
        (["{a}", "--against", "{slime}"], "stock: no run logged rollout/raw_reward; --reward names"),
    ],
)
def test_wrong_input_is_one_line_that_names_it(invoke, write, tmp_path, words, wanted):
    slime = tmp_path / "slime.log"
    slime.write_text("rollout 0: {'rollout/raw_reward': 0.5}\n")
    places = {"a": write("stock-seed0"), "b": write("tail-seed0"), "slime": slime}
    assert wanted.format(**places) in invoke(
        compare, *(word.format(**places) for word in words), "--out", tmp_path / "out", code=None
    )
    assert not (tmp_path / "out" / "summary.json").exists()


@pytest.mark.slow
def test_it_says_of_the_arms_of_an_ab_what_the_ab_said(recipe_file, call_ab, call, tmp_path):
    arms = {"stock": {"overrides": ["adv=0.4"]}, "accelerated": {"overrides": ["adv=0.1", "part_at=3"]}}
    recipe = recipe_file(arms=arms, seeds=[0, 1, 2], metrics={"warmup_steps": 1, "margin": "0.01"})
    call_ab(recipe, "--out", tmp_path / "ab")
    said = json.loads((tmp_path / "ab" / "summary.json").read_text())
    runs = [[tmp_path / "ab" / f"{arm}-seed{seed}" for seed in range(3)] for arm in arms]
    _, result = call(*runs[0], "--against", *runs[1])
    busy = [line for line in said["headline"] if "busy" in line or "check" in line]
    assert result["headline"] == [line for line in said["headline"] if line not in busy]
    assert "equal within the margin (difference +0.001" in " ".join(result["headline"])
    for key in ("stages", "rollout", "differences", "curves", "data"):
        assert result[key] == said[key], key
    assert result["convergence"]["rows"] == said["convergence"]["rows"]
    assert math.isclose(rows_of(result)["accelerated"]["difference"], 0.001, rel_tol=1e-6)


@pytest.mark.parametrize("odd", ["NaN", "Infinity", "-Infinity"])
def test_a_step_without_finite_seconds_is_left_out(call, write, odd):
    base, ours = write("a"), write("b")
    log = ours / "metrics.jsonl"
    lines = log.read_text().splitlines()
    lines[10] = lines[10].replace('"timing_s/step": 6.0', f'"timing_s/step": {odd}')
    log.write_text("\n".join(lines))
    output, summary = call(base, "--against", ours)
    (row,) = [row for row in summary["stages"] if row["stage"] == "step"]
    assert row["arms"]["b"] == {"mean": 6.0, "steps": 57}
    assert "minutes of training are not known of b-run0" in output


def test_runs_of_one_step_are_not_compared_and_it_is_said(call, write):
    output, _ = call(write("a", steps=1), "--against", write("b", steps=1))
    assert f"{REWARD} of b is not compared: a run has fewer than two values until the shortest run ends" in output


@pytest.mark.parametrize("trainer", ["timing_s/generate_async", "fully_async/trainer/idle_ratio"])
def test_a_trainer_that_saves_after_its_step_has_no_negative_rest(call, write, trainer):
    base, ours = (write(name, **{trainer: 9.0, "timing_s/save_checkpoint": 50.0}) for name in "ab")
    _, summary = call(base, "--against", ours)
    means = {row["stage"]: row["arms"]["a"]["mean"] for row in summary["stages"]}
    assert means == {"gen": 4.0, "other": 2.0, "step": 6.0}
