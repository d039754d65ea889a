"""Tests ``rl-accel plan``: fitting known engines, pricing of options, and the command."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rl_accel.errors import RlAccelError
from rl_accel.features import TAIL_BATCHING, TailBatchingFlags
from rl_accel.lab.ab.stats import RunData
from rl_accel.plan import answers
from rl_accel.plan.answers import PLAIN, Option, answer, options_of, rounds_of
from rl_accel.plan.command import Plan, plan
from rl_accel.plan.fit import Fit, fit_engine
from rl_accel.plan.predict import asynchronous_mode, flags_of_words, predict, words_of_run
from rl_accel.plan.setup import Setup, setup_of
from rl_accel.rollout.simulation import Cluster, EngineModel
from rl_accel.rollout.workload import Lengths, published
from rl_accel.telemetry import stage_clock
from rl_accel.telemetry.aggregates import Range
from rl_accel.telemetry.profile import read_run
from rl_accel.telemetry.stage_clock import FILE_NAME, ResponseTimes

REAL = Path(__file__).parent
AGGREGATES = REAL.parent / "telemetry" / "data" / "tail_stock.jsonl"
PUBLISHED, BATCH = "--lengths published:math16k", "--prompts 1 --responses 2 --replicas 2"
ENGINE = EngineModel({1: 0.010, 4: 0.011, 16: 0.015, 64: 0.030}, cached_token_seconds=2e-7, request_seconds=0.01)
TRAINING = {"update_actor": 5.0}
SETUP = Setup(16, 4, 2, EngineModel({1: 0.01, 64: 0.015}), published("math16k").limited(2048), TRAINING, 2.0)
TIGHT = {"slots": 12, "cache_tokens": 2500}
TIGHTER = EngineModel({1: 0.010, 12: 0.016}, 1e-6, 0.001, 0.010, 0.020, **TIGHT)
"""Requests wait, and are preempted."""
EQUAL = Setup(16, 4, 2, EngineModel({1: 0.01}), Lengths(np.full(100, 500), 0.0), TRAINING)
WITHOUT_TELEMETRY = {"step": 1, "data": {"timing_s/step": 2.0, "timing_s/gen": 1.0}}
ASYNC = {"command": ["trainer.v1.trainer_mode=sync", "trainer.v1.trainer_mode=colocate_async"]}


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
        responses = responses_of(published("math16k").limited(1024).lengths(range(16), 4, rng).ravel().tolist())
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
    for name in ("request_seconds", "response_seconds", "prompt_token_seconds"):
        assert getattr(fit.engine, name) == pytest.approx(getattr(engine, name), rel=1e-4, abs=1e-6), name
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
    flags = flags_of_words([])
    assert predict(setup, flags, 8, 5, 2)[0].rollout_seconds == pytest.approx(measured, rel=0.15)
    assert np.mean(setup.uneven) == pytest.approx(1.0, abs=0.1), "the engine of these steps is that of the fit"


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
    _, *results = answer(SETUP, options_of(SETUP), draws=3, rounds=5)
    tails = answers.best_of(results)
    assert tails.option.name.startswith("tail_batching")
    more = replace(tails, option=replace(tails.option, name="with more"), ratio=tails.ratio * 1.01)
    much_more = replace(more, ratio=tails.ratio * 1.1)
    assert answers.best_of([tails, more]) is tails
    assert answers.best_of([tails, much_more]) is much_more
    _, *results = answer(EQUAL, options_of(EQUAL), draws=3, rounds=5)
    assert answers.best_of(results) is None
    assert all(priced.is_nothing for priced in results if priced.option.ours)


def test_equal_draws_give_equal_answers_and_more_replicas_or_a_lower_limit_less_seconds():
    first, again = (answer(SETUP, options_of(SETUP), draws=1, rounds=5) for _ in range(2))
    assert [found.outcome for found in again] == [found.outcome for found in first]
    ratios = {found.option.name: found.ratio for found in first}
    assert ratios["twice the replicas"] > 1
    assert ratios["limit of 1,024 tokens"] > 1.2


def test_skip_zero_shortens_the_actor_update_and_nothing_else():
    stages = {"update_actor": 5.0, "old_log_prob": 1.0, "other": 2.0}
    setup = replace(SETUP, stages=stages, zero_shares=(0.4, 0.2))
    options = options_by_name(setup)
    without = {"": setup, " + sampler": "sampler", " + tail_batching": "tail_batching 1.25 / 1.25"}
    for (name, other), (draw, share) in itertools.product(without.items(), enumerate(setup.zero_shares)):
        before = options[other].simulate(5, draw) if name else simulated(setup, 5, draw)
        after = options[f"skip_zero{name}"].simulate(5, draw)
        assert after == replace(before, step_seconds=after.step_seconds), "the rollout is the same"
        training = before.step_seconds - before.rollout_seconds - stages["other"]
        assert before.step_seconds - after.step_seconds == pytest.approx(training * share * 5 / 6)
    both = options["skip_zero + tail_batching"]
    assert both.how == "+rl_accel.tail_batching.enable=True +rl_accel.skip_zero.enable=True"
    assert "skip_zero + sampler" not in options_by_name(replace(setup, poll_seconds=0.0))
    assert not any("skip_zero" in name for name in options_by_name(SETUP)), "the share is unknown"


@pytest.mark.parametrize(("flag", "share"), [("skip_zero.enable", 0.4), ("auto", 0.4), ("gae.enable", 0)])
def test_a_run_with_skip_zero_is_predicted_with_the_share_of_the_other_run(flag, share):
    flags, known = flags_of_words([f"+rl_accel.{flag}=True"]), replace(SETUP, zero_shares=(0.4,))
    ours, stock = (predict(setup, flags, 4, 2, 1)[0] for setup in (known, SETUP))
    assert ours == replace(stock, step_seconds=ours.step_seconds)
    training = stock.step_seconds - stock.rollout_seconds
    assert stock.step_seconds - ours.step_seconds == pytest.approx(share * training)


def with_rewards(folder, log, **more):
    """A copy of ``log`` with further metrics, and a group of equal and one of other rewards, as verl stores them."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (folder / "rollouts").mkdir()
    lines = [json.dumps({**line, "data": {**line["data"], **more}}) for line in lines]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    rewards = [("p", 1), ("p", 1), ("q", 0), ("q", 1)]
    rows = [json.dumps({"input": prompt, "output": "xyz", "score": score}) for prompt, score in rewards]
    (folder / "rollouts" / "1.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def test_the_share_of_skip_zero_is_read_beside_a_log_without_telemetry(tmp_path):
    setup, _ = setup_of(read_run(with_rewards(tmp_path, AGGREGATES), group=4), {})
    assert setup.zero_shares[:1] == [0.5]


@pytest.mark.parametrize(("more", "is_priced"), [({}, True), ({"timing_s/update_critic": 0.5}, False)])
def test_the_command_prices_skip_zero_for_equal_rewards_without_a_critic(run_dir, tmp_path, invoke, more, is_priced):
    shutil.copytree(run_dir / "checkpoints", tmp_path / "checkpoints")
    folder = with_rewards(tmp_path, run_dir / "metrics.jsonl", **more)
    output = invoke(plan, folder, *["--draws", "1", "--rounds", "5"])
    rows = {row["name"]: row for row in json.loads((folder / "plan.json").read_text())["answers"]}
    assert ("skip_zero" in rows) == ("skip_zero + tail_batching" in rows) == is_priced
    assert ("Not priced: skip_zero, it wants groups of equal rewards" in output) == (not is_priced)
    if is_priced:
        stock = json.loads((folder / "plan.json").read_text())["stock"]
        assert stock["step_seconds"] - rows["skip_zero"]["step_seconds"] == pytest.approx(1.5, rel=0.2), "half of 3 s"


def test_other_places_are_priced_where_requests_wait_or_caches_are_full():
    def slots(engine):
        options = options_by_name(replace(SETUP, engine=engine)).items()
        return {name: option.simulate(5, 0) for name, option in options if name.endswith(" slots a replica")}

    assert not slots(SETUP.engine)
    few = replace(SETUP.engine, slots=4)
    result = slots(few)
    fewer, more = result["2 slots a replica"], result["8 slots a replica"]
    stock = simulated(replace(SETUP, engine=few), 5, 0)
    assert more.rollout_seconds < stock.rollout_seconds < fewer.rollout_seconds
    assert len(slots(replace(SETUP.engine, cache_tokens=10**6))) == 1


def test_flags_of_a_command_are_read_as_verl_reads_them():
    section = "+rl_accel.tail_batching"
    flags = flags_of_words(["python", f"{section}.enable=True", f"{section}.response_ratio=1.0"])
    assert flags.sections["tail_batching"].response_ratio == 1.0
    waste = answers.outcome_of(SETUP, rounds_of(SETUP, flags.sections["tail_batching"], 5, 0)).wasted
    assert 0 < waste < 0.6


def test_the_command_on_a_run(run_dir, tmp_path, invoke):
    shutil.copytree(run_dir, tmp_path, dirs_exist_ok=True)
    output = invoke(plan, tmp_path / "metrics.jsonl", "--draws", "2", "--rounds", "5")
    assert "Fitted to 384 responses" in output
    assert "Best of the pack: " in output
    assert "Not priced: skip_zero, it wants groups of equal rewards" in output, "the log has no rewards"
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["schema"] == "rl_accel.plan/2"
    assert {"sampler", "tail_batching 1.25 / 1", "twice the replicas"} <= {row["name"] for row in document["answers"]}


@pytest.mark.parametrize(
    ("error", "preemptions", "cache", "warning"),
    [(0.1, 0.0, {}, None), (3.0, 0.0, {}, "trust"), (0.1, 7.0, {}, "cache"), (0.1, 7.0, {"cache_tokens": 5000}, None)],
)
def test_a_plan_says_if_its_engine_is_far_off_or_the_size_of_its_cache_unknown(error, preemptions, cache, warning):
    setup = replace(SETUP, engine=replace(SETUP.engine, **cache))
    result = Plan(setup, Fit(SETUP.engine, error, 100), answer(SETUP, [], 1, 5), "", preemptions=preemptions)
    lines = list(result.conclusions())
    assert lines[0].startswith("Do not trust this plan: the fitted engine is 300% off") == (warning == "trust")
    assert any("--cache-tokens" in line for line in lines) == (warning is not None), "either asks for it"


def test_the_command_on_published_lengths_and_with_a_published_engine(tmp_path, invoke):
    given = f"{PUBLISHED} {BATCH} --draws 1 --rounds 5 --out {tmp_path} --step-seconds".split()
    assert "A decoding step takes 10 ms with 1, 20 ms with 64 running requests." in invoke(
        plan, *given, "1:0.01,64:0.02"
    )

    output = invoke(plan, *given, "published:qwen2.5-14b")
    assert "From RollPacker" in output
    assert json.loads((tmp_path / "plan.json").read_text())["engine"]["cached_token_seconds"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("of", "most"), [("ab_tail", {}), ("ab_vllm", {("all", "rollout"): 12, ("all", "step"): 25})])
def test_the_check_on_real_runs(of, most, invoke):
    """Arms of `make ab-tail` and of `make ab-vllm`: what the telemetry of stock predicts for each."""
    arms, rows = sorted(path.name for path in (REAL / of).iterdir()), {}
    for arm in arms:
        for line in invoke(plan, "--check", REAL / of / "stock", REAL / of / arm).splitlines():
            name, *cells = [cell.strip() for cell in line.strip("│ ").split("│")]
            rows[arm, name] = cells
    off = {row: float(cells[3].split("%")[0]) for row, cells in rows.items() if row[1] in ("rollout", "step")}
    assert len(off) == 2 * len(arms)
    assert {row: value for row, value in off.items() if abs(value) > most.get(row, 10)} == {}
    wasted = {arm: float(cells[3].split()[0]) for (arm, name), cells in rows.items() if name == "tokens wasted"}
    assert "tail" in wasted
    assert max(map(abs, wasted.values())) < 3
    predicted, measured = ({arm: float(rows[arm, "rollout"][at].split()[0]) for arm in arms} for at in (0, 2))
    assert predicted[min(arms, key=measured.get)] == min(predicted.values())


def test_rollouts_that_are_uneven_widen_the_interval_and_not_the_prediction():
    flags = flags_of_words([])
    even, even_draws = predict(SETUP, flags, 6, 20, 1)
    result, draws = predict(replace(SETUP, uneven=(0.5, 1.5)), flags, 6, 20, 1)
    assert result == even
    assert np.ptp(draws) > 2 * np.ptp(even_draws)
    span = Range.of(draws)
    assert span.low < result.rollout_seconds < span.high


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (PUBLISHED, "--lengths needs --prompts, --responses, --replicas, --step-seconds as well"),
        ("", "give LOG, or --lengths"),
        (f"{PUBLISHED} --step-seconds fast", "wants seconds of a step by running requests"),
        (f"{PUBLISHED} --step-seconds 1:inf", "must be finite times above 0 by numbers of running requests from 1"),
        (f"{PUBLISHED} --step-seconds 0:0.1", "wants seconds of a step by running requests"),
        (f"{PUBLISHED} --other-seconds nan", "wants a finite number, found nan"),
        (f"{PUBLISHED.replace('math16k', 'x')} {BATCH} --step-seconds 1:1", "wanted one of math16k"),
        (f"{PUBLISHED} {BATCH} --step-seconds published:gpt", "wanted one of qwen2.5-7b"),
        ("{without}/metrics.jsonl", "+rl_accel.telemetry.enable=True"),
        ("--check {run} {asynchronous}", "found trainer.v1.trainer_mode=colocate_async"),
    ],
)
def test_wrong_input_is_named_in_one_line(run_dir, tmp_path, invoke, words, error):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(WITHOUT_TELEMETRY) + "\n")
    (tmp_path / "async").mkdir()
    shutil.copy(run_dir / "metrics.jsonl", tmp_path / "async")
    (tmp_path / "async" / "run.json").write_text(json.dumps(ASYNC))
    words = words.format(run=run_dir, asynchronous=tmp_path / "async", without=tmp_path)
    assert error in invoke(plan, *words.split(), code=None)


def test_options_of_slime_are_in_its_own_words():
    setup = replace(SETUP, is_slime=True, poll_seconds=0.0, engine=replace(SETUP.engine, slots=8))
    how = {name: option.how for name, option in options_by_name(setup).items()}
    wanted = "rl-accel slime-config --enable tail_batching --set tail_batching.prompt_ratio="
    assert how["tail_batching 1.25 / 1"] == f"{wanted}1.25 --set tail_batching.response_ratio=1.0"
    assert how["4 slots a replica"] == "--sglang-max-running-requests 4"
    assert how["limit of 1,024 tokens"] == "--rollout-max-response-len 1024"
    assert not any("+rl_accel" in words or "actor_rollout_ref" in words for words in how.values())


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_words_of_a_command_may_have_any_number_of_plus_signs(plus):
    section = f"{plus}rl_accel.tail_batching"
    flags = flags_of_words([f"{section}.enable=True", f"{section}.prompt_ratio=2"])
    assert (flags[TAIL_BATCHING].enable, flags[TAIL_BATCHING].prompt_ratio) == (True, 2)
    word = f"{plus}trainer.v1.trainer_mode=colocate_async"
    assert asynchronous_mode(["trainer.v1.trainer_mode=sync", word]) == word
    assert RunData("a", 0, {}, [f"{plus}data.train_batch_size=8"]).batch_size == 8


@pytest.mark.parametrize("text", ["[1]", "{}", '{"command": 3}', "no JSON"])
def test_a_run_json_of_another_program_is_no_command(tmp_path, text):
    shutil.copy(AGGREGATES, tmp_path / "m.jsonl")
    (tmp_path / "run.json").write_text(text)
    assert words_of_run(tmp_path, read_run(tmp_path)) == []
