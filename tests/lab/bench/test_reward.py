"""Tests ``bench reward``: programs are as published, sums are correct, and wrong results turn it red."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from rl_accel.lab.bench import reward as bench
from rl_accel.lab.bench.reward import PolicyResults, Program, WrongResult
from rl_accel.reward.execution import ExecutionResult
from rl_accel.reward.sandbox import Case

pytestmark = pytest.mark.slow

TINY = ["--responses", "6", "--epochs", "2", "--scale", "0.03"]


@pytest.fixture
def tiny(monkeypatch):
    for name, value in {"PROMPTS": 3, "BATCH": 3, "CONDITIONS": ("quiet",), "CALLS": 50}.items():
        monkeypatch.setattr(bench, name, value)


def drawn(**changes):
    size = {"prompts": 100, "responses": 16, "epochs": 4, "batch": 20, "scale": 1.0, "spread": 0.3}
    return bench.workload(**{**size, **changes})


def test_the_workload_is_as_published_the_same_for_the_same_seed_and_all_its_times_are_scaled():
    shares = (0.126, 0.609, 0.89, 0.9405)
    assert [bench.published_seconds(share / 0.9495) for share in shares] == pytest.approx([0.185, 0.361, 0.833, 2.264])
    assert 2.79 < bench.published_seconds(0.995) < 29.0
    batches = drawn(responses=64)
    everything = [response for batch in batches for response in batch]
    assert len(batches) == 20
    assert {len(batch) for batch in batches} == {20 * 64}
    hanging = sum(response.seconds is None for response in everything) / len(everything)
    assert hanging == pytest.approx(bench.HANGING, abs=1e-4)
    assert not any(response.correct and response.seconds is None for response in everything)
    ending = sorted(response.seconds for response in everything if response.seconds is not None)
    assert ending[len(ending) // 2] == pytest.approx(0.31, abs=0.03)
    assert sum(2 < seconds <= 30 for seconds in ending) / len(everything) == pytest.approx(0.009, abs=0.006)
    assert sum(response.correct for response in everything) / len(everything) == pytest.approx(0.6, abs=0.02)

    assert drawn(seed=1) == drawn(seed=1) != drawn(seed=2)
    full, scaled = ([r.seconds for batch in drawn(scale=scale) for r in batch] for scale in (1.0, 0.1))
    assert scaled == pytest.approx([seconds and seconds * 0.1 for seconds in full])


def made_up(hanging, limit):
    drawn = (("p", True, 1.0), ("p", True, 5.0), ("p", False, 1.0), ("q", False, None))
    batch = [Program(prompt, "", correct, seconds) for prompt, correct, seconds in drawn]
    slow = ExecutionResult("passed", wall=5.0)
    if limit < 5:
        slow = ExecutionResult("timeout", wall=limit, waited=1.0, reason="cpu limit")
    results = [ExecutionResult("passed", wall=1.0), slow, ExecutionResult("wrong", wall=1.0)]
    return batch, [*results, ExecutionResult("timeout", wall=hanging, reason="wall limit")]


def test_the_sums():
    batch, fixed = made_up(30.0, 30.0)
    _, early = made_up(4.0, 4.0)
    arms = {
        "fixed": PolicyResults([*fixed, *fixed], [40.0, 42.0]),
        "adaptive": PolicyResults([*fixed, *early], [40.0, 1.0]),
    }
    arms["adaptive"].counts.update({"timeouts_full": 1.0})
    rows = bench.summarise([batch, batch], arms)
    fixed, ours = rows["fixed"], rows["adaptive"]
    assert (fixed["seconds"], ours["seconds"], ours["times_less"]) == (74.0, 37.0 + 10.0, 74.0 / 47.0)
    assert (ours["own_seconds"], ours["own_times_less"]) == (46.0, 74.0 / 46.0)
    assert (fixed["step_s"], ours["step_s"]) == (41.0, 20.5)
    assert (fixed["wrongly_killed"], ours["wrongly_killed"], ours["correct"]) == (0, 1, 4)
    assert (fixed["struck"], ours["struck"]) == ({"wall": 2}, {"wall": 2, "cpu": 1})
    assert (fixed["full_budget"], ours["full_budget"], ours["timeouts"]) == (0, 1, 3)


def test_the_goal_is_called_met_only_where_the_sample_can_decide():
    for verdict, samples in {
        "too few to tell": [(0, 33), (1, 33), (0, 1400), (2, 1000)],
        "met": [(0, 1600), (1, 10_000)],
        "NOT met": [(2, 100), (3, 1000), (21, 10_000)],
    }.items():
        for killed, correct in samples:
            assert bench.kill_verdict(killed, correct) == verdict, (killed, correct)


def test_a_verdict_that_was_not_earned_is_named():
    unearned = ((True, 1.0, "wrong"), (True, 1.0, "killed"), (False, 1.0, "passed"), (False, None, "error"))
    for correct, seconds, found in unearned:
        with pytest.raises(WrongResult, match=f"found {found}"):
            bench.require_expected_verdicts([Program("p", "", correct, seconds)], [ExecutionResult(found)])


def test_a_tiny_run_prints_a_table_and_writes_files(tiny, tmp_path):
    output = CliRunner().invoke(bench.bench_reward, [*TINY, "--out", str(tmp_path / "deep")]).output
    assert "correct: all verdicts of 72 executions" in output, output
    assert "waits for a processor; goal 3" in output
    document = json.loads((tmp_path / "deep" / "reward.json").read_text())
    fixed, ours = (document["found"]["quiet"]["arms"][name] for name in ("fixed", "adaptive"))
    assert fixed["executions"] == ours["executions"] == 36
    assert document["policies"]["fixed"]["min_correct"] > 10**6
    assert document["policies"]["adaptive"]["maximum"] == pytest.approx(0.9)
    assert 0 < fixed["full_budget"] == fixed["timeouts"]


def test_a_policy_that_kills_correct_answers_is_red(tiny, monkeypatch, invoke):
    real = bench.policies

    def hasty(scale):
        ours = replace(real(scale)["adaptive"], slack=0.0, minimum=0.0, maximum=0.002)
        return {**real(scale), "adaptive": ours}

    monkeypatch.setattr(bench, "policies", hasty)
    assert "goal at most 0.2%: NOT met" in invoke(bench.bench_reward, *TINY, code=1)


def test_no_number_stands_beside_a_wrong_verdict(tiny, monkeypatch, invoke):
    monkeypatch.setattr(bench, "CASE", Case("stdin", "", "43"))
    output = invoke(bench.bench_reward, *TINY, code=1)
    assert "WRONG: wanted passed" in output
    assert "no numbers" in output
    assert "times less" not in output
