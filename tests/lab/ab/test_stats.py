import math

import pytest

from rl_accel.lab.ab import stats
from rl_accel.lab.ab.recipe import Metrics
from rl_accel.lab.ab.stats import RunData, differences, measured_steps

NAMES = Metrics(stages=["gen", "adv"], warmup_steps=2)


def run(arm, times, seed=0, **more):
    """A run whose steps take ``times`` = [(gen, adv, step), ...], with further metrics as lists."""
    steps = {}
    for index, (gen, adv, step) in enumerate(times):
        row = {"timing_s/gen": gen, "timing_s/adv": adv, "timing_s/step": step}
        steps[index + 1] = row | {name: values[index] for name, values in more.items()}
    return RunData(arm, seed, steps)


def rows_of(*runs):
    return {row["stage"]: row for row in stats.stage_table(runs, ["stock", "fast"], "stock", NAMES)}


def test_stage_times_leave_out_warm_up_and_the_rest_is_other():
    slow = run("stock", [(99, 99, 999)] * 2 + [(1, 4, 6), (2, 4, 7), (3, 4, 11)])
    fast = run("fast", [(88, 88, 888)] * 2 + [(1, 1, 3), (2, 1, 4), (3, 1, 8)])
    rows = rows_of(slow, fast)
    means = [(stage, row["arms"]["stock"]["mean"]) for stage, row in rows.items()]
    assert means == [("gen", 2), ("adv", 4), ("other", 2), ("step", 8)]
    assert (rows["adv"]["ratios"]["fast"]["ratio"], rows["adv"]["ratios"]["fast"]["saved_s"]) == (4, 3)
    assert rows["step"]["arms"]["stock"] == {"mean": 8, "steps": 3}
    assert rows["step"]["ratios"]["fast"]["ratio"] == 8 / 5
    assert rows["step"]["ratios"]["fast"]["low"] is None  # three pairs say nothing about noise
    assert "stock" not in rows["step"]["ratios"]


def test_a_step_has_its_validation_which_takes_no_time_in_others():
    times = [(1, 1, 3)] * 4
    base = run("stock", times, **{"timing_s/testing": [0, 0, 4, 6]})
    fast = run("fast", times)
    del base.steps[3]["timing_s/testing"]
    rows = {row["stage"]: row for row in stats.stage_table([base, fast], ["stock", "fast"], "stock", Metrics())}
    means = {stage: row["arms"]["stock"]["mean"] for stage, row in rows.items()}
    assert means == {"gen": 1, "adv": 1, "testing": 3, "other": 1, "step": 6}
    assert rows["step"]["ratios"]["fast"]["ratio"] == 2


def test_the_interval_holds_the_ratio_and_widens_with_noise():
    steady, noisy = [1 + 0.001 * (i % 5) for i in range(40)], [1 + 0.3 * (i % 5) for i in range(40)]

    def interval(seconds):
        base = run("stock", [(s, 0, 2 * s) for s in seconds])
        other = run("fast", [(s, 0, s) for s in reversed(seconds)])
        return rows_of(base, other)["step"]["ratios"]["fast"]

    calm, rough = interval(steady), interval(noisy)
    assert calm["low"] <= calm["ratio"] <= calm["high"]
    assert calm["pairs"] == 38
    assert rough["high"] - rough["low"] > 10 * (calm["high"] - calm["low"])
    assert calm == interval(steady)  # the same data give the same report


def test_only_steps_measured_in_both_arms_of_a_seed_are_paired():
    base = [run("stock", [(1, 1, 2)] * 5, seed=0), run("stock", [(1, 1, 8)] * 5, seed=1)]
    step = rows_of(*base, run("fast", [(1, 1, 1)] * 4, seed=0))["step"]
    assert step["ratios"]["fast"] == {"ratio": 2, "low": None, "high": None, "pairs": 2, "saved_s": 1}
    assert step["arms"]["stock"]["steps"] == 6


def test_a_stage_that_an_arm_lacks_or_that_takes_no_time_has_no_ratio():
    base = RunData("stock", 0, {s: {"timing_s/step": 2.0, "timing_s/gen": 1.0} for s in range(1, 6)})
    rows = rows_of(base, RunData("fast", 0, {s: {"timing_s/step": 1.0} for s in range(1, 6)}))
    assert "adv" not in rows
    assert (rows["gen"]["ratios"], rows["step"]["ratios"]["fast"]["ratio"]) == ({}, 2)
    rows = rows_of(run("stock", [(1, 1, 2)] * 8), run("fast", [(1, 0, 1)] * 8))
    assert rows["adv"]["ratios"]["fast"]["ratio"] is None


def test_measured_are_steps_after_the_warm_up_never_without_the_last_and_no_validation_before_training():
    for steps, measured in ((5, [3, 4, 5]), (3, [3]), (2, [2]), (1, [1]), (0, [])):
        assert measured_steps(run("a", [(1, 1, 2)] * steps), NAMES) == measured
    data = RunData("a", 0, {0: {"val/score": 1.0}, 1: {"timing_s/step": 1.0}, 2: {"timing_s/step": 1.0}})
    assert measured_steps(data, Metrics(warmup_steps=0)) == [1, 2]


def test_first_differences_come_in_the_order_of_the_steps():
    times = [(1, 1, 2)] * 4
    base = run("stock", times, **{"critic/score/mean": [1, 2, 3, 4], "actor/grad_norm": [1.0, 2.0, 4.0, 8.0]})
    other = run("fast", times, **{"critic/score/mean": [1, 2, 3, 5], "actor/grad_norm": [1.0, 2.0, 4.1, 9.0]})
    grad, score = differences(base, other)["rows"]
    assert (grad["metric"], grad["step"]) == ("actor/grad_norm", 3)
    assert grad["abs"] == pytest.approx(0.1)
    assert (score["metric"], score["step"], score["baseline"], score["arm"]) == ("critic/score/mean", 4, 4, 5)


def test_metrics_that_two_equal_trainings_share_are_compared_and_times_are_not():
    base = run("stock", [(1, 1, 2)], **{"critic/score/mean": [1.0], "rollout_corr/kl": [0.0], "actor/loss": [1.0]})
    other = run("fast", [(9, 9, 9)], **{"critic/score/mean": [1.0], "rollout_corr/kl": [1e-9], "actor/loss": [1.0]})
    result = differences(base, other)
    assert (result["metrics_compared"], len(result["rows"])) == (3, 1)
    free = ["timing_s/gen", "timing_per_token_ms/gen", "perf/throughput", "actor/perf/max_memory_allocated_gb"]
    free += ["rl_accel/gae/seconds", "perf/mfu/actor"]
    assert stats.compared([*free, "actor/pg_loss"]) == ["actor/pg_loss"]


def test_nan_equals_nan_a_missing_value_differs_and_steps_of_one_run_alone_are_not_compared():
    def rows(ours, base=(math.nan, math.nan)):
        return differences(*(run("a", [(1, 1, 2)] * len(values), a=values) for values in (base, ours)))["rows"]

    assert rows([math.nan, math.nan]) == []
    (row,) = rows([math.nan, 1.0])
    assert row["step"] == 2
    base = run("stock", [(1, 1, 2)] * 2, a=[math.nan, math.nan])
    (row,) = differences(base, run("fast", [(1, 1, 2)] * 2))["rows"]
    assert (row["step"], row["arm"], row["abs"]) == (1, None, None)
    assert rows([1, 1], base=[1, 1, 1]) == []


@pytest.mark.parametrize("is_v1", [False, True])
def test_the_seconds_of_a_step_hold_its_validation_whether_verl_counts_it_in_the_step_or_not(is_v1):
    metrics = {"timing_s/gen": 5.0, "timing_s/testing": 4.0, "timing_s/step": 10.0}
    if is_v1:
        metrics |= {"timing_s/step": 6.0, "training/off_policy/trajectory_staleness/mean": 0.0}
    assert stats.wall_seconds(metrics, Metrics()) == 10.0
