"""What the report says of rollouts, from metrics, dumps and ledgers of a kind that real runs write."""

import json

import pytest

from rl_accel.lab.ab import report
from rl_accel.lab.ab.checks import run_checks
from rl_accel.lab.ab.convergence import converge
from rl_accel.lab.ab.recipe import load
from rl_accel.lab.ab.runner import RunResult
from rl_accel.lab.ab.stats import KINDS, RunData, ledger_counts, length_distribution, rollout_summary
from rl_accel.telemetry.stage_clock import read_log

ROUNDS = {"short": 1.0, "long": 4.0}


def metrics(gen, reward, kind=None, generated=0, wasted=0):
    found = {"timing_s/gen": gen, "timing_s/step": gen + 1, "critic/score/mean": reward}
    if kind is None:
        return found
    ours = {f"{name}_round": float(name == kind) for name in KINDS}
    ours |= {"queue_length": 3.0, "tokens_generated": generated, "tokens_wasted": wasted}
    if kind == "short":
        ours |= {"accepted_tokens_mean": 10.0, "cancelled_tokens_mean": 16.0}
    return found | {f"rl_accel/tail_batching/{name}": value for name, value in ours.items()}


@pytest.fixture
def summarise(recipe_file, tmp_path):
    """Summarise runs given as ``"arm-seed0" -> list of metrics``; returns the summary and a function that judges it."""

    def make(runs, ledgers=None, outputs=None, recipe=None, **wanted):
        keys = {"rollout": {"report": True, **wanted}, "metrics": {"warmup_steps": 0}, **(recipe or {})}
        recipe = load(recipe_file(**keys))
        data, results = [], []
        for name, steps in runs.items():
            arm, seed = name.split("-seed")
            command = ["p", "data.train_batch_size=32", "data.train_batch_size=4"]
            data.append(RunData(arm, int(seed), dict(enumerate(steps, 1)), command, tmp_path / name))
            results.append(RunResult(arm, int(seed), len(steps), "f", command, {}, "done", 0))
            (tmp_path / name / "rollouts").mkdir(parents=True)
            lines = [json.dumps({"output": text}) for text in (outputs or {}).get(name, [])]
            (tmp_path / name / "rollouts" / "1.jsonl").write_text("".join(f"{line}\n" for line in lines))
            if ledgers and name in ledgers:
                path = tmp_path / name / recipe.rollout.ledger
                path.parent.mkdir(parents=True)
                path.write_text("".join(json.dumps(line) + "\n" for line in ledgers[name]))
        arms = list(dict.fromkeys(run.arm for run in data))
        found = rollout_summary(recipe, data, arms)
        convergence = converge(data, arms, recipe.baseline, recipe.metrics)
        found["reward"] = [row for row in convergence["rows"] if row["axis"] == "steps"]
        checks = run_checks(recipe, results, data, [], found, convergence, tmp_path, len(runs))
        return found, {check.name: check for check in checks}

    return make


STOCK = [metrics(4.0, 0.5), metrics(5.0, 0.6), metrics(3.0, 0.7), metrics(4.0, 0.8)]
OURS = [metrics(ROUNDS[k], r, k, 100, w) for k, r, w in [("short", 0.5, 40)] * 3 + [("long", 0.8, 0)]]


def test_seconds_by_kind_and_the_ratio_of_means(summarise):
    found, _ = summarise({"stock-seed0": STOCK, "accelerated-seed0": OURS})
    stock, ours = found["arms"]
    assert stock["kinds"] == {"all": {"steps": 4, "seconds": 4.0}}
    assert ours["kinds"] == {"short": {"steps": 3, "seconds": 1.0}, "long": {"steps": 1, "seconds": 4.0}}
    assert ours["ratio"] == pytest.approx(4.0 / 1.75)
    assert ours["low"] < ours["ratio"] < ours["high"]
    assert stock["ratio"] is None
    assert ours["wasted"] == pytest.approx(120 / 400)
    assert stock["wasted"] is None
    assert (ours["accepted"], ours["cancelled"]) == (10.0, 16.0)


def test_what_an_engine_counts_goes_before_what_tail_batching_reports_and_lost_prompts_are_judged(summarise):
    def counted(lost, wasted, step):
        extra = {"tokens_generated": 100, "tokens_wasted": wasted, "prompts_lost": lost}
        return step | {f"rollout/{name}": float(value) for name, value in extra.items()}

    stock = [counted(lost, 20, metrics(2.0, 0.5)) for lost in (4, 8)]
    ours = [counted(0, 30, metrics(1.0, 0.5, "short", generated=90, wasted=1)) for _ in range(2)]
    ledgers = {"accelerated-seed0": ledger(["1:1", "1:2", "1:3", "1:4"])}
    found, checks = summarise(
        {"stock-seed0": stock, "accelerated-seed0": ours}, ledgers, prompts_lost={"accelerated": 0, "stock": 5}
    )
    assert [(row["wasted"], row["lost"]) for row in found["arms"]] == [(0.2, 8.0), (0.3, 0.0)]
    assert checks["prompts_lost"].status == "red"
    assert checks["prompts_lost"].detail.startswith("stock 8, wanted 5")


def test_series_hold_kinds_and_queues(summarise):
    found, _ = summarise({"stock-seed0": STOCK, "accelerated-seed0": OURS})
    series = found["series"]["accelerated-seed0"]
    assert series["kind"] == ["short"] * 3 + ["long"]
    assert series["seconds"] == [1.0, 1.0, 1.0, 4.0]
    assert series["queue"] == [3.0] * 4
    assert found["series"]["stock-seed0"]["queue"] == [None] * 4


def test_lengths_are_those_of_the_dumps(summarise):
    found, _ = summarise({"stock-seed0": STOCK}, outputs={"stock-seed0": ["abc", "a", ""]})
    lengths = found["arms"][0]["lengths"]
    assert (lengths["responses"], lengths["mean"], lengths["quantiles"][0], lengths["quantiles"][-1]) == (
        3,
        4 / 3,
        0,
        3,
    )


def test_speed_and_waste_turn_red(summarise):
    runs = {"stock-seed0": STOCK, "accelerated-seed0": OURS}
    _, good = summarise(runs, faster={"accelerated": 2.0}, wasted_tokens={"accelerated": 0.3})
    assert (good["rollout_faster"].status, good["wasted_tokens"].status) == ("green", "green")
    assert good["rollout_faster"].detail == "accelerated 2.29x, wanted 2.00x"


def test_speed_and_waste_that_are_missed_turn_red(summarise):
    runs = {"stock-seed0": STOCK, "accelerated-seed0": OURS}
    _, bad = summarise(runs, faster={"accelerated": 2.5}, wasted_tokens={"accelerated": 0.29})
    assert (bad["rollout_faster"].status, bad["wasted_tokens"].status) == ("red", "red")
    assert bad["wasted_tokens"].detail == "accelerated 30.0%, wanted 29.0%"


def test_an_arm_that_was_not_measured_is_red_and_one_left_out_is_not(summarise):
    _, found = summarise({"stock-seed0": STOCK, "accelerated-seed0": STOCK}, wasted_tokens={"accelerated": 0.3})
    assert found["wasted_tokens"].detail == "accelerated: not measured"


def test_an_arm_that_was_left_out_is_skipped(summarise):
    _, found = summarise({"stock-seed0": STOCK}, wasted_tokens={"accelerated": 0.3})
    assert found["wasted_tokens"].status == "skipped"


def test_without_the_baseline_there_is_no_ratio_to_miss(summarise):
    _, found = summarise({"accelerated-seed0": OURS}, faster={"accelerated": 2.0})
    assert (found["rollout_faster"].status, found["rollout_faster"].detail) == ("skipped", "stock was not run")


def rewards(*finals):
    return {f"stock-seed{i}": STOCK for i in range(len(finals))} | {
        f"accelerated-seed{i}": [metrics(1.0, reward) for reward in (0.5, 0.6, 0.7, final)]
        for i, final in enumerate(finals)
    }


@pytest.mark.parametrize(
    ("finals", "bound", "status"),
    [
        ((0.8, 0.81, 0.79), 0.05, "green"),
        ((0.8, 0.81, 0.79), 0.02, "red"),  # the interval is wider than that
        ((0.9, 0.91, 0.89), 0.05, "red"),
        ((0.8, 0.81), 0.05, "skipped"),
    ],
)
def test_the_final_reward_must_be_the_same_within_an_interval(summarise, finals, bound, status):
    found, checks = summarise(rewards(*finals), same_reward=bound)
    assert checks["same_reward"].status == status
    (reward,) = found["reward"]
    assert reward["difference"] == pytest.approx(sum(finals) / len(finals) - 0.8)
    if len(finals) > 2:
        # t(0.975, 2) = 4.303; the finals are 0.01 apart, so the standard error is 0.01 / sqrt(3)
        assert reward["high"] - reward["low"] == pytest.approx(2 * 4.3027 * 0.01 / 3**0.5, rel=1e-3)


def test_an_arm_with_too_few_seeds_does_not_keep_others_from_being_judged(summarise):
    more = {"extra-seed0": [metrics(1.0, reward) for reward in (0.5, 0.6, 0.7, 0.1)]}
    arms = {"stock": {}, "accelerated": {}, "extra": {"seeds": [0]}}
    _, checks = summarise(rewards(0.9, 0.91, 0.89) | more, recipe={"arms": arms, "seeds": [0, 1, 2]}, same_reward=0.05)
    assert checks["same_reward"].status == "red"
    assert "extra" not in checks["same_reward"].detail


def ledger(*steps):
    return [{"step": step, "trained": trained} for step, trained in enumerate(steps, 1)]


def test_a_ledger_in_which_every_prompt_is_trained_once(summarise):
    exact = ledger(["1:2", "1:1", "1:3", "1:5"], ["2:1", "1:4", "2:3", "2:2"])
    found, checks = summarise({"accelerated-seed0": OURS, "stock-seed0": STOCK}, {"accelerated-seed0": exact})
    assert [(e["epoch"], e["prompts"], e["once"]) for e in found["ledgers"][0]["epochs"]] == [(1, 5, 5), (2, 3, 3)]
    assert checks["ledger"].status == "green"


@pytest.mark.parametrize(
    ("steps", "fault"),
    [
        ([["1:1", "1:3", "1:4", "1:5"]], "1 missing"),
        ([["1:1", "1:2", "1:3", "1:4"], ["1:2", "1:5", "1:6", "1:7"]], "1 again"),
        (
            [["1:1", "1:2", "1:3", "2:1"], ["2:2", "2:3", "2:4", "3:1"]],
            "epoch 1: 3 of 4 prompts trained once, 1 missing",
        ),
        ([["1:1", "1:2", "1:3"]], "steps [1] are no whole batches"),
    ],
)
def test_a_ledger_with_a_prompt_lost_or_trained_twice_is_red(summarise, steps, fault):
    _, checks = summarise({"accelerated-seed0": OURS, "stock-seed0": STOCK}, {"accelerated-seed0": ledger(*steps)})
    assert checks["ledger"].status == "red"
    assert fault in checks["ledger"].detail


def test_a_rejected_prompt_is_not_missing(summarise):
    lines = [{"step": 1, "trained": {"1:1": 7, "1:3": 8, "1:4": 2, "1:5": 0}, "rejected": {"1:2": 3}}]
    found, checks = summarise({"accelerated-seed0": OURS, "stock-seed0": STOCK}, {"accelerated-seed0": lines})
    assert checks["ledger"].status == "green"
    assert found["ledgers"][0]["epochs"][0]["rejected"] == 1


def test_a_run_with_rounds_but_without_a_ledger_is_red(summarise):
    _, checks = summarise({"accelerated-seed0": OURS, "stock-seed0": STOCK})
    assert (checks["ledger"].status, checks["ledger"].detail) == (
        "red",
        "accelerated-seed0: tail batching left no ledger",
    )


def test_half_a_line_of_a_killed_run_is_left_out(summarise, tmp_path):
    runs = {"accelerated-seed0": OURS, "stock-seed0": STOCK}
    summarise(runs, {"accelerated-seed0": ledger(["1:1", "1:2", "1:3", "1:4"])}, {"stock-seed0": ["abc"]})
    for file in (*tmp_path.glob("*/rollouts/1.jsonl"), *tmp_path.glob("*/checkpoints/*/ledger.jsonl")):
        file.write_text(file.read_text() + '{"output": "a')
        file.write_text(file.read_text() + "\n3\n")
    for path in tmp_path.glob("*/checkpoints/*/ledger.jsonl"):
        assert ledger_counts(path, 4)["epochs"][0]["once"] == 4
    assert length_distribution(tmp_path.glob("stock-seed0/rollouts/*.jsonl"))["responses"] == 1


def test_a_run_without_any_of_it_has_an_empty_part(summarise):
    found, checks = summarise({"stock-seed0": [{"timing_s/step": 1.0}]})
    assert found["arms"][0]["seconds"] is None
    assert found["arms"][0]["lengths"] is None
    assert found["ledgers"] == []
    assert "ledger" not in checks


def test_an_asynchronous_arm_is_not_predicted_from_the_telemetry_of_the_baseline(recipe_file, repo):
    asynchronous = {"overrides": ["trainer.v1.trainer_mode=colocate_async"]}
    keys = {"arms": {"stock": {}, "async": asynchronous}, "rollout": {"report": True}, "metrics": {"warmup_steps": 2}}
    recipe = load(recipe_file(**keys))
    folder = repo / "tests" / "plan" / "ab_vllm" / "stock"
    steps = read_log(folder / "metrics.jsonl")
    runs = [RunData("stock", 0, steps, [], folder), RunData("async", 0, steps)]
    rows = report.summarise(recipe, folder, folder, [], 0, runs)["rollout"]["arms"]
    predicted = {row["arm"]: row["predicted"] for row in rows}
    assert predicted["stock"] > 0
    (stock,) = (row for row in rows if row["arm"] == "stock")
    assert stock["predicted_low"] < stock["predicted"] < stock["predicted_high"]
    assert predicted["async"] is None
