"""Tests the report's section about rollouts, on metrics, rollout files and ledgers in the form of real runs."""

import json

import pytest

from rl_accel.lab.ab import report
from rl_accel.lab.ab.stats import KINDS, ledger_counts

LEDGER = "checkpoints/tail_batching/ledger.jsonl"
ROUNDS = {"short": 1.0, "long": 4.0}


def metrics(gen, reward, kind=None, generated=0, wasted=0):
    values = {"timing_s/gen": gen, "timing_s/step": gen + 1, "critic/score/mean": reward}
    if kind is None:
        return values
    ours = {f"{name}_round": float(name == kind) for name in KINDS}
    ours |= {"tokens_generated": generated, "tokens_wasted": wasted}
    return values | {f"rl_accel/tail_batching/{name}": value for name, value in ours.items()}


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def summarise(make_runs, tmp_path):
    """Summarise runs, with their files; returns what the summary says of rollouts, and the checks by name."""

    def make(runs, files=None, recipe=None, **wanted):
        keys = {"rollout": {"report": True, **wanted}, "metrics": {"warmup_steps": 0}, **(recipe or {})}
        its_recipe, results, data = make_runs(runs, files, **keys)
        summary = report.summarise(its_recipe, tmp_path, results, len(runs), data)
        reward = [row for row in summary["convergence"]["rows"] if row["axis"] == "steps"]
        return summary["rollout"] | {"reward": reward}, {check["name"]: check for check in summary["checks"]}

    return make


STOCK = [metrics(4.0, 0.5), metrics(5.0, 0.6), metrics(3.0, 0.7), metrics(4.0, 0.8)]
OURS = [metrics(ROUNDS[k], r, k, 100, w) for k, r, w in [("short", 0.5, 40)] * 3 + [("long", 0.8, 0)]]
RUNS = {"accelerated-seed0": OURS, "stock-seed0": STOCK}
ONE = {"stock-seed0": STOCK}
BOTH = ONE | {"accelerated-seed0": STOCK}


def test_seconds_by_kind_the_ratio_of_means_and_the_share_wasted(summarise):
    section, _ = summarise(RUNS)
    stock, ours = section["arms"]
    assert stock["kinds"] == {"all": {"steps": 4, "seconds": 4.0}}
    assert ours["kinds"] == {"short": {"steps": 3, "seconds": 1.0}, "long": {"steps": 1, "seconds": 4.0}}
    assert ours["ratio"] == pytest.approx(4.0 / 1.75)
    assert ours["low"] < ours["ratio"] < ours["high"]
    assert ours["wasted"] == pytest.approx(120 / 400)
    assert (stock["ratio"], stock["wasted"]) == (None, None)


def test_what_an_engine_counts_goes_before_what_tail_batching_reports_and_lost_prompts_are_judged(summarise):
    def counted(lost, wasted, step):
        extra = {"tokens_generated": 100, "tokens_wasted": wasted, "prompts_lost": lost}
        return step | {f"rollout/{name}": float(value) for name, value in extra.items()}

    stock = [counted(lost, 20, metrics(2.0, 0.5)) for lost in (4, 8)]
    ours = [counted(0, 30, metrics(1.0, 0.5, "short", generated=90, wasted=1)) for _ in range(2)]
    runs = {"stock-seed0": stock, "accelerated-seed0": ours}
    section, checks = summarise(runs, ledger(["1:1", "1:2", "1:3", "1:4"]), prompts_lost={"accelerated": 0, "stock": 5})
    assert [(row["wasted"], row["lost"]) for row in section["arms"]] == [(0.2, 8.0), (0.3, 0.0)]
    assert checks["prompts_lost"]["status"] == "red"
    assert checks["prompts_lost"]["detail"].startswith("stock 8, wanted 5")


@pytest.mark.parametrize(
    ("runs", "wanted", "check", "status", "detail"),
    [
        (RUNS, {"faster": 2.0}, "rollout_faster", "green", "accelerated 2.29x, wanted 2.00x"),
        (RUNS, {"faster": 2.5}, "rollout_faster", "red", ""),
        (RUNS, {"wasted_tokens": 0.3}, "wasted_tokens", "green", ""),
        (RUNS, {"wasted_tokens": 0.29}, "wasted_tokens", "red", "accelerated 30.0%, wanted 29.0%"),
        (BOTH, {"wasted_tokens": 0.3}, "wasted_tokens", "red", "accelerated: not measured"),
        (ONE, {"wasted_tokens": 0.3}, "wasted_tokens", "skipped", ""),
        ({"accelerated-seed0": OURS}, {"faster": 2.0}, "rollout_faster", "skipped", "stock was not run"),
    ],
)
def test_speed_and_waste_are_judged_where_both_were_measured(summarise, runs, wanted, check, status, detail):
    _, checks = summarise(runs, **{name: {"accelerated": value} for name, value in wanted.items()})
    assert checks[check]["status"] == status
    assert not detail or checks[check]["detail"] == detail


def rewards(*finals):
    ours = {f"accelerated-seed{i}": [metrics(1.0, r) for r in (0.5, 0.6, 0.7, last)] for i, last in enumerate(finals)}
    return {f"stock-seed{i}": STOCK for i in range(len(finals))} | ours


FEW = {"extra-seed0": [metrics(1.0, reward) for reward in (0.5, 0.6, 0.7, 0.1)]}
"""An arm with one seed, which does not keep others from being judged."""


@pytest.mark.parametrize(
    ("finals", "bound", "more", "status"),
    [
        ((0.8, 0.81, 0.79), 0.05, {}, "green"),
        ((0.8, 0.81, 0.79), 0.02, {}, "red"),  # the interval is wider than that
        ((0.9, 0.91, 0.89), 0.05, {}, "red"),
        ((0.9, 0.91, 0.89), 0.05, FEW, "red"),
        ((0.8, 0.81), 0.05, {}, "skipped"),
    ],
)
def test_the_final_reward_must_be_the_same_within_an_interval(summarise, finals, bound, more, status):
    recipe = {"arms": {"stock": {}, "accelerated": {}, "extra": {"seeds": [0]}}, "seeds": [*range(len(finals))]}
    section, checks = summarise(rewards(*finals) | more, recipe=recipe, same_reward=bound)
    assert checks["same_reward"]["status"] == status
    assert "extra" not in checks["same_reward"]["detail"]
    assert section["reward"][0]["difference"] == pytest.approx(sum(finals) / len(finals) - 0.8)


def ledger(*steps):
    """The files of a run whose steps trained these prompts."""
    rows = [{"step": step, "trained": trained} for step, trained in enumerate(steps, 1)]
    return {"accelerated-seed0": {LEDGER: lines(rows)}}


def test_in_a_ledger_a_rejected_prompt_is_not_missing_and_half_a_line_of_a_killed_run_is_left_out(summarise, tmp_path):
    rows = [{"step": 1, "trained": {"1:1": 7, "1:3": 8, "1:4": 2, "2:2": 0}, "rejected": {"1:2": 3}}]
    rows.append({"step": 2, "trained": {"2:1": 1, "1:5": 0, "2:3": 5, "2:4": 6}})
    files = {"accelerated-seed0": {LEDGER: lines(rows)}}
    section, checks = summarise(RUNS, files)
    assert checks["ledger"]["status"] == "green"
    epochs = [(e["epoch"], e["prompts"], e["once"], e["rejected"]) for e in section["ledgers"][0]["epochs"]]
    assert epochs == [(1, 5, 4, 1), (2, 4, 4, 0)]
    path = tmp_path / "accelerated-seed0" / LEDGER
    path.write_text(path.read_text() + '{"step": 3, "tr\n3\n')
    assert ledger_counts(path, 4)["epochs"][0]["once"] == 4


@pytest.mark.parametrize(
    ("steps", "fault"),
    [
        ([["1:1", "1:3", "1:4", "1:5"]], "1 missing"),
        ([["1:1", "1:2", "1:3", "1:4"], ["1:2", "1:5", "1:6", "1:7"]], "1 again"),
        ([["1:1", "1:2", "1:3", "2:1"], ["2:2", "2:3", "2:4", "3:1"]], "epoch 1: 3 of 4 prompts trained once, 1 mis"),
        ([["1:1", "1:2", "1:3"]], "steps [1] are no whole batches"),
        (None, "accelerated-seed0: tail batching left no ledger"),
    ],
)
def test_a_ledger_with_a_prompt_lost_or_trained_twice_or_no_ledger_is_red(summarise, steps, fault):
    _, checks = summarise(RUNS, steps and ledger(*steps))
    assert checks["ledger"]["status"] == "red"
    assert fault in checks["ledger"]["detail"]


def test_a_run_without_any_of_it_has_an_empty_part(summarise):
    section, checks = summarise({"stock-seed0": [{"timing_s/step": 1.0}]})
    assert (section["arms"][0]["seconds"], section["ledgers"]) == (None, [])
    assert "ledger" not in checks
