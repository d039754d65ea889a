"""Compares estimates without telemetry with rollouts of known seconds, and with measurements of this project's A/B runs."""

import json
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from rl_accel.plan.command import plan
from rl_accel.telemetry.aggregates import POLL_SECONDS, Rollouts, estimate
from rl_accel.telemetry.logs import read_log
from rl_accel.telemetry.profile import read_run
from rl_accel.telemetry.profile_report import profile
from rl_accel.telemetry.savings import NOTICING, WAITING, find_savings
from rl_accel.telemetry.stage_clock import read_kept

DATA, KEPT = Path(__file__).parent / "data", Path(__file__).parents[1] / "plan"
V1 = "training/off_policy/trajectory_staleness/mean"
UNEXPLAINED = "waiting that no length explains"


def logged(tokens, seconds, polls=True, storing=0.03):
    """The metrics of a step whose responses have ``tokens`` and whose rollout is done after ``seconds``."""
    gen = np.ceil(seconds / POLL_SECONDS) * POLL_SECONDS + storing if polls else seconds
    lengths = {"mean": fmean(tokens), "max": max(tokens), "clip_ratio": np.mean(np.array(tokens) == max(tokens))}
    metrics = {
        "timing_s/gen": gen,
        "timing_s/step": gen + 1.0,
        "timing_s/update_actor": 1.0,
        "prompt_length/mean": 10.0,
    }
    metrics |= {f"response_length/{name}": float(value) for name, value in lengths.items()}
    return metrics | {"perf/total_num_tokens": sum(tokens) + 10.0 * len(tokens)} | ({V1: 0.0} if polls else {})


def lognormal(steps, seed, **how):
    rng = np.random.default_rng(seed)
    tokens = np.ceil(rng.lognormal(4, 1, (steps, 64)))
    seconds = 0.5 + 0.01 * tokens.max(axis=1) + rng.normal(0, 0.1, steps)
    return [logged(t.tolist(), s, **how) for t, s in zip(tokens, seconds, strict=True)], tokens, seconds


@pytest.mark.parametrize("seed", range(4))
def test_the_seconds_lost_to_polls_are_found_without_the_end_of_any_rollout(seed):
    steps, _, seconds = lognormal(40, seed, storing=0.5)
    estimated = estimate(Rollouts.of(steps, 4))
    assert estimated.storing == pytest.approx(0.5), "no poll: sampler does not save it"
    lost = fmean(step["timing_s/gen"] for step in steps) - 0.5 - seconds.mean()
    assert estimated.polling.low < lost < estimated.polling.high
    assert estimated.polling.mean == pytest.approx(lost, abs=0.2)
    assert estimated.pace.mean == pytest.approx(0.01, rel=0.15)
    assert estimated.unexplained.mean == 0


def test_a_trainer_that_does_not_poll_loses_nothing_and_idle_slots_follow_from_lengths():
    steps, tokens, seconds = lognormal(40, 0, polls=False)
    rollouts = Rollouts.of(steps, 4)
    estimated = estimate(rollouts)
    assert (rollouts.responses, estimated.polling.mean) == (64, 0)
    assert estimated.idle.mean == pytest.approx(1 - (0.5 + 0.01 * tokens.mean()) / seconds.mean(), abs=0.05)
    measured = [step | {"timing_s/agent_loop/generate_sequences/mean": 0.25 * step["timing_s/gen"]} for step in steps]
    assert estimate(Rollouts.of(measured, 4)).idle.mean == pytest.approx(0.75)


def test_lengths_that_fit_have_the_mean_the_longest_and_the_share_at_the_limit():
    rng = np.random.default_rng(0)
    tokens = np.minimum(np.ceil(rng.lognormal(5, 1, (60, 128))), 800)
    rollouts = Rollouts.of([logged(lengths.tolist(), 9.0) for lengths in tokens], 8)
    assert rollouts.limit == 800
    for shape in ("math16k", "code16k", "judge16k"):
        lengths = rollouts.lengths(shape, 0.3)
        drawn = lengths.lengths(range(60 * 16), 8, rng).reshape(60, 128)
        assert lengths.tokens.mean() == pytest.approx(tokens.mean(), rel=0.05)
        assert drawn.max(axis=1).mean() == pytest.approx(tokens.max(axis=1).mean(), rel=0.05)
        assert (lengths.tokens == 800).mean() == pytest.approx((tokens == 800).mean(), abs=0.01)


def test_a_step_that_is_drawn_twice_is_no_limit():
    steps, tokens, _ = lognormal(8, 0)
    rollouts, rng = Rollouts.of(steps, 4), np.random.default_rng(0)
    samples = [rollouts.drawn(rng) for _ in range(20)]
    assert any((sample.longest == tokens.max()).sum() > 1 for sample in samples)
    assert {sample.limit for sample in samples} == {np.inf}


def test_too_few_steps_and_weights_of_other_steps_are_no_basis():
    steps, *_ = lognormal(5, 0)
    assert Rollouts.of(steps[:3], 4) is None
    assert Rollouts.of([{name: v for name, v in step.items() if "length" not in name} for step in steps], 4) is None
    stale = estimate(Rollouts.of([step | {V1: 1.0} for step in steps], 4))
    assert (stale.tail, stale.polling.mean) == (None, 0)


def seconds_of(folder, name="step", warmup=2):
    return fmean(step[f"timing_s/{name}"] for step in list(read_log(folder / "metrics.jsonl").values())[warmup:])


@pytest.mark.parametrize("recipe", ["ab_tail", "ab_vllm"])
def test_tail_batching_comes_first_and_saves_what_the_kept_runs_saved(recipe, tmp_path):
    kept, log = KEPT / recipe / "stock", tmp_path / "metrics.jsonl"
    responses = read_kept(kept / "rl_accel_telemetry.jsonl")
    with log.open("w") as file:
        for step, estimated in read_log(kept / "metrics.jsonl").items():
            stock = {name: value for name, value in estimated.items() if not name.startswith("rl_accel/")}
            data = logged([response.tokens for response in responses[step]], 1.0) | stock
            print(json.dumps({"step": step, "data": data}), file=file)
    run = read_run(log, group=4)
    best = find_savings(run)[0]
    assert (best.name, best.advice) == (WAITING, "+rl_accel.tail_batching.enable=True")
    estimated = estimate(Rollouts.of([run.metrics[step] for step in run.steps], 4))
    training = sum(run.stages[name] for name in ("old_log_prob", "adv", "update_actor"))
    saved = estimated.tail.mean + estimated.polling.mean + training * (1 - estimated.trained.mean)
    assert saved == pytest.approx(seconds_of(kept) - seconds_of(KEPT / recipe / "tail"), rel=0.25)


@pytest.mark.parametrize(
    ("log", "first", "feature", "saved", "responses"),
    [
        ("ppo_stock", NOTICING, "sampler", 0.96, 1),  # rl_accel/sampler/seconds_saved of the accelerated arm
        ("tail_stock", WAITING, "tail_batching", 8.23, 4),  # seconds of gen, stock less tail
        ("code_fixed", UNEXPLAINED, "reward_timeout", 10.2, 4),  # seconds of a step, fixed less adaptive
    ],
)
def test_the_feature_that_an_ab_measured_comes_first_with_its_saving(log, first, feature, saved, responses, invoke):
    best = find_savings(read_run(DATA / f"{log}.jsonl", group=responses))[0]
    assert (best.name, best.advice) == (first, f"+rl_accel.{feature}.enable=True")
    assert best.gain.mean == pytest.approx(saved, rel=0.25)
    assert best.gain.low < saved < best.gain.high
    output = invoke(profile, DATA / f"{log}.jsonl", "--responses", responses, "--no-picture")
    assert f"Largest saving: {first}" in output
    assert "verl's file logger" in output
    assert "no telemetry" in output


def test_where_nothing_waits_nothing_is_advised(tmp_path, invoke):
    steps = [logged([500.0] * 64, 5.0, polls=False) for _ in range(8)]
    lines = (" - ".join(f"{name}:{value}" for name, value in step.items()) for step in steps)
    (tmp_path / "train.log").write_text("".join(f"step:{n} - {line}\n" for n, line in enumerate(lines)))
    output = invoke(profile, tmp_path, "--no-picture", "--responses", 4)
    assert "verl's console, 8 steps, no telemetry" in output
    assert "Nothing of the pack would shorten a step of this run by more than can be told." in output


def test_a_plan_needs_no_telemetry_and_says_what_it_rests_on(tmp_path, invoke):
    words = ("--draws", 6, "--rounds", 8, "--out", tmp_path)
    output = invoke(plan, DATA / "tail_stock.jsonl", "--responses", 4, *words)
    assert "16 prompts of 4 responses on 1 replica." in output
    assert "36 fits of published shapes to the mean, the longest and the share at the limit of 23 batches" in output
    assert "Best of the pack: tail_batching" in output
    assert "does not say how many responses a prompt has: give --responses" in invoke(
        plan, DATA / "tail_stock.jsonl", *words, code=None
    )
