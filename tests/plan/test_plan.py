"""Tests ``rl-accel plan``: fitting known engines, pricing of options, and the command."""

import json
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_accel.errors import RlAccelError
from rl_accel.features import TailBatchingFlags
from rl_accel.plan import answers
from rl_accel.plan.answers import PLAIN, Option, answer, options_of, rounds_of
from rl_accel.plan.command import conclusion_lines, plan
from rl_accel.plan.fit import Fit, fit_engine
from rl_accel.plan.setup import Setup, setup_of
from rl_accel.rollout.simulation import Cluster, EngineModel
from rl_accel.rollout.workload import Lengths
from rl_accel.telemetry import stage_clock
from rl_accel.telemetry.profile import read_run
from rl_accel.telemetry.stage_clock import FILE_NAME, ResponseTimes

REAL = Path(__file__).parent
LENGTHS = "--lengths lengths.jsonl"
published = runpy.run_path(str(REAL.parents[1] / "docs" / "published_table.py"))["published"]
ENGINE = EngineModel({1: 0.010, 64: 0.030})
TRAINING = {"update_actor": 5.0}
SETUP = Setup(16, 4, 2, EngineModel({1: 0.01, 64: 0.015}), published(2048), TRAINING, 2.0)
TIGHT = {"slots": 12, "cache_tokens": 2500}
TIGHTER = EngineModel({1: 0.010, 12: 0.016}, **TIGHT)
"""Requests wait, and are preempted."""
EQUAL = Setup(16, 4, 2, EngineModel({1: 0.01}), Lengths(np.full(100, 500), 0.0), TRAINING)
WITHOUT_TELEMETRY = {"step": 1, "data": {"timing_s/step": 2.0, "timing_s/gen": 1.0}}


def simulated(setup, rounds, seed, **more):
    """Outcome of ``rounds`` rollouts of ``setup``."""
    return Option("", "", setup, **more).simulate(rounds, seed)


def options_by_name(setup):
    return {option.name: option for option in options_of(setup)}


def responses_of(lengths, engine=ENGINE, at_once=64):
    """What telemetry would note of a step of one server, to which so many are sent at once: prompts of four responses each."""
    cluster, began, ends = Cluster(engine, 1), {}, {}
    while len(ends) < len(lengths):
        for n in range(len(began), min(len(ends) + at_once, len(lengths))):
            began[n] = cluster.now
            cluster.launch([n], [lengths[n]])
        if ended := cluster.happen():
            ends[ended.id] = cluster.now
    return [
        ResponseTimes(f"p{n // 4}", began[n], ends[n], ends[n] + 0.1, ends[n] + 0.1, lengths[n], "s0")
        for n in range(len(lengths))
    ]


def steps_of(count, engine=ENGINE):
    """Steps of 64 responses whose lengths have a long tail."""
    rng = np.random.default_rng(0)
    return [responses_of(np.maximum(rng.lognormal(5, 1, 64), 1).astype(int).tolist(), engine) for _ in range(count)]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of eight steps with telemetry."""
    folder, rng, lines = tmp_path_factory.mktemp("run"), np.random.default_rng(0), []
    for step in range(1, 9):
        responses = responses_of(published(1024).lengths(range(16), 4, rng).ravel().tolist())
        gen = 2 * np.ceil(max(r.rewarded for r in responses) / 2) + 0.02
        numbers = stage_clock.completion(responses) | stage_clock.generation(responses, gen)
        data = {"timing_s/step": gen + 4.0, "timing_s/gen": gen, "timing_s/update_actor": 3.0}
        data |= {f"rl_accel/telemetry/{name}": value for name, value in numbers.items()}
        lines.append(json.dumps({"step": step, "data": data}) + "\n")
        stage_clock.keep(folder / "checkpoints" / FILE_NAME, step, responses)
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.parametrize(("engine", "known", "most"), [(ENGINE, {}, 50), (TIGHTER, TIGHT, 12)])
def test_an_engine_is_found_again_from_what_it_did(engine, known, most):
    steps = steps_of(12, engine)
    fit = fit_engine(steps, **known)
    for running in (1, 4, most):
        assert float(fit.engine.seconds(running)) == pytest.approx(float(engine.seconds(running)), rel=1e-4), running
    assert fit.start_seconds == pytest.approx(0.0, abs=1e-6)
    assert fit.error < 1e-5
    assert fit.responses == 12 * 64
    assert not known or fit_engine(steps).error > 0.3, "without knowing how many run at once"


def test_requests_that_begin_later_and_some_of_many_are_fitted_and_too_few_are_refused(monkeypatch):
    lengths = [100, 200, 300, 400, 150, 250, 350, 450, 120, 220, 320, 420, 80, 180, 280, 380]
    assert fit_engine([responses_of(lengths, at_once=8)]).error < 0.01
    monkeypatch.setattr("rl_accel.plan.fit._MAX_RESPONSES", 200)
    fit = fit_engine(steps_of(12))
    assert fit.responses == 4 * 64
    assert float(fit.engine.seconds(16)) == pytest.approx(float(ENGINE.seconds(16)), rel=1e-4)
    with pytest.raises(RlAccelError, match="wants 16 responses with tokens and times, found 4"):
        fit_engine([responses_of([5, 6, 7, 8])])


def test_a_run_becomes_a_setup(run_dir):
    setup, _ = setup_of(read_run(run_dir), {})
    assert (setup.prompts, setup.responses, setup.replicas, setup.poll_seconds) == (16, 4, 1, 2.0)
    assert (setup.training_seconds, setup.other_seconds) == (3.0, pytest.approx(1.0))
    measured = read_run(run_dir).stages["gen"]
    assert simulated(setup, 20, 0).rollout_seconds == pytest.approx(measured, rel=0.15)


def test_a_step_is_its_stages_and_a_rollout_is_noticed_at_the_next_look():
    assert (SETUP.noticed(3.1), replace(SETUP, poll_seconds=0.0).noticed(3.1)) == (4.0, 3.1)
    prediction = simulated(SETUP, 5, 0)
    noticed = [2 * np.ceil(p.metrics.rollout_seconds / 2) for p in rounds_of(SETUP, PLAIN, 5, 0)]
    assert prediction.rollout_seconds == pytest.approx(np.mean(noticed))
    assert prediction.step_seconds > prediction.rollout_seconds + 2


def test_prompts_that_still_wait_are_owed_a_long_round():
    rounds = rounds_of(SETUP, TailBatchingFlags(), 4, 0)
    assert [played.metrics.kind for played in rounds] == ["short"] * 4
    assert rounds[-1].metrics.queue_length == 16
    assert answers.steady(rounds, 16, lambda played: 1.0 + (played.metrics.kind == "long")) == pytest.approx(1.0)
    rounds = rounds_of(SETUP, TailBatchingFlags(), 9, 0)
    longs = [played.metrics.kind for played in rounds].count("long")
    owed = rounds[-1].metrics.queue_length / 16
    share = answers.steady(rounds, 16, lambda played: float(played.metrics.kind == "long"))
    assert share == pytest.approx((longs + owed) / (9 + owed))


def test_with_a_tail_tail_batching_is_best_of_equal_gains_the_simplest_and_without_a_tail_nothing():
    _, *results = answer(SETUP, options_of(SETUP), draws=6, rounds=8)
    tails = answers.best_of(results)
    assert tails.option.name.startswith("tail_batching")
    more = replace(
        tails, option=replace(tails.option, name="with more"), ratio=replace(tails.ratio, mean=tails.ratio.mean * 1.01)
    )
    much_more = replace(more, ratio=replace(tails.ratio, mean=tails.ratio.mean * 1.1))
    assert answers.best_of([tails, more]) is tails
    assert answers.best_of([tails, much_more]) is much_more
    _, *results = answer(EQUAL, options_of(EQUAL), draws=3, rounds=5)
    assert answers.best_of(results) is None
    assert all(priced.is_nothing for priced in results)


def test_equal_draws_give_equal_answers():
    first, again = (answer(SETUP, options_of(SETUP), draws=1, rounds=5) for _ in range(2))
    assert [found.outcome for found in again] == [found.outcome for found in first]


def test_the_command_on_a_run(run_dir, tmp_path, invoke, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = invoke(plan, run_dir / "metrics.jsonl", "--draws", "6", "--rounds", "8")
    assert "Fitted to 384 responses" in output
    assert "Best of the pack: " in output
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["schema"] == "rl_accel.plan/4"
    assert {"sampler", "tail_batching 1.25 / 1"} <= {row["name"] for row in document["answers"]}


@pytest.mark.parametrize(
    ("error", "preemptions", "cache", "warning"),
    [(0.1, 0.0, {}, None), (3.0, 0.0, {}, "trust"), (0.1, 7.0, {}, "cache"), (0.1, 7.0, {"cache_tokens": 5000}, None)],
)
def test_a_plan_says_if_its_engine_is_far_off_or_the_size_of_its_cache_unknown(error, preemptions, cache, warning):
    setup = replace(SETUP, engine=replace(SETUP.engine, **cache))
    fit = Fit(SETUP.engine, 0.0, error, 100)
    lines = list(conclusion_lines(setup, fit, answer(SETUP, [], 1, 5), preemptions))
    assert lines[0].startswith("Do not trust this plan: the fitted engine is 300% off") == (warning == "trust")
    assert any("--cache-tokens" in line for line in lines) == (warning is not None), "either asks for it"


def test_the_command_on_lengths_and_a_given_engine(tmp_path, invoke):
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text("".join(json.dumps({"prompt": n // 2, "tokens": 10 + n}) + "\n" for n in range(8)))
    batch = "--prompts 1 --responses 2 --replicas 2 --draws 1 --rounds 5 --step-seconds 1:0.01,64:0.02"
    output = invoke(plan, "--lengths", lengths, *batch.split(), "--out", tmp_path)
    assert "A decoding step takes 10 ms with 1, 20 ms with 64 running requests." in output
    assert json.loads((tmp_path / "plan.json").read_text())["engine"]["step_seconds"] == {"1": 0.01, "64": 0.02}


@pytest.mark.slow
@pytest.mark.parametrize("of", ["ab_tail", "ab_vllm"])
def test_a_plan_from_the_telemetry_of_stock_predicts_the_run_with_tail_batching(of):
    """Kept arms of `make ab-tail` and of `make ab-vllm`."""
    setup, _ = setup_of(read_run(REAL / of / "stock"), {})
    stock, tail = answer(setup, [answers.tail_option(setup, *answers.RATIOS[0])], draws=10, rounds=20)
    saved = read_run(REAL / of / "stock").step_seconds - read_run(REAL / of / "tail").step_seconds
    assert tail.saved.low < saved < tail.saved.high
    assert tail.saved.mean == pytest.approx(saved, rel=0.15)
    for arm, found in (("stock", stock), ("tail", tail)):
        assert found.outcome.step_seconds == pytest.approx(read_run(REAL / of / arm).step_seconds, rel=0.1), arm


@pytest.mark.parametrize("of", ["slime", "verl"])
def test_a_log_without_response_times_has_its_lengths_and_a_bound_and_options_come_first(tmp_path, invoke, of):
    names = ("response_length/mean", "response_length/max", "timing_s/gen", "timing_s/step")
    if of == "slime":
        names = ("rollout/response_len/mean", "rollout/response_len/max", "perf/rollout_time", "perf/step_time")
    lines = []
    for step, mean in enumerate((2000.0, 2500.0, 3000.0)):
        metrics = dict(zip(names, (mean, 8000.0, 80.0, 100.0), strict=True))
        text = f"x.py:1 - perf {step}: {metrics}"
        if of == "verl":
            text = f"step:{step} - " + " - ".join(f"{name}:{value}" for name, value in metrics.items())
        lines.append(text)
    (tmp_path / "train.log").write_text("\n".join([*lines, ""]))
    output = invoke(plan, tmp_path, *["--prompts", "64", "--responses", "8", "--out"], tmp_path / "plan", "--warmup", 0)
    assert "64 prompts of 8 responses; response lengths: mean 2,500 tokens, longest 8,000" in output
    assert "tail_batching would save at most 55 s of generation (55% of 100 s), a bound" in output
    assert ("+rl_accel" in output) == (of == "verl"), "slime has no such words"
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (LENGTHS, "--lengths needs --prompts, --responses, --replicas, --step-seconds as well"),
        ("", "give LOG, or --lengths"),
        (f"{LENGTHS} --step-seconds fast", "wants seconds of a step by running requests"),
        (f"{LENGTHS} --step-seconds 1:inf", "must be finite times above 0 by numbers of running requests from 1"),
        (f"{LENGTHS} --step-seconds 0:0.1", "wants seconds of a step by running requests"),
        (f"{LENGTHS} --other-seconds nan", "wants a finite number, found nan"),
        ("{without}/metrics.jsonl", "+rl_accel.telemetry.enable=True"),
        ("{asynchronous}", "wanted a run whose rollouts end with their step, found responses of older weights"),
    ],
)
def test_wrong_input_is_named_in_one_line(run_dir, tmp_path, invoke, words, error):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(WITHOUT_TELEMETRY) + "\n")
    log = (run_dir / "metrics.jsonl").read_text()
    (tmp_path / "async").mkdir()
    (tmp_path / "async" / "m.jsonl").write_text(
        log.replace('"timing_s/gen"', '"timing_s/generate_async": 1, "timing_s/gen"')
    )
    words = words.format(run=run_dir, asynchronous=tmp_path / "async", without=tmp_path)
    assert error in invoke(plan, *words.split(), code=None)


def test_options_of_slime_are_in_its_own_words():
    setup = replace(SETUP, is_slime=True, poll_seconds=0.0)
    how = {name: option.how for name, option in options_by_name(setup).items()}
    wanted = "rl-accel slime-config --enable tail_batching --set tail_batching.prompt_ratio="
    assert how["tail_batching 1.25 / 1"] == f"{wanted}1.25 --set tail_batching.response_ratio=1.0"
    assert not any("+rl_accel" in words or "actor_rollout_ref" in words for words in how.values())


def test_a_plan_from_rollouts_that_slime_saved_speaks_of_slime(tmp_path, invoke):
    rng = np.random.default_rng(0)
    samples = [{"group_index": n // 4, "response_length": int(rng.lognormal(5, 1)) + 1} for n in range(64)]
    torch.save({"rollout_id": 0, "samples": samples}, tmp_path / "0.pt")
    batch = ["--prompts", 8, "--responses", 4, "--replicas", 1, "--step-seconds", "1:0.01,32:0.02"]
    output = invoke(plan, "--lengths", tmp_path, *batch, "--draws", 1, "--rounds", 5, "--out", tmp_path / "out")
    assert "rl-accel slime-config --enable tail_batching" in output
    assert "+rl_accel" not in output
