"""Tests the decision about learning on runs with a known truth: how often each answer is wrong."""

import itertools
import math

import numpy as np
import pytest
from scipy.signal import lfilter
from scipy.stats import binomtest

from rl_accel.errors import RecipeError
from rl_accel.lab.ab import convergence
from rl_accel.lab.ab.convergence import DIFFERENT, EQUAL, IDENTICAL, NOT_ENOUGH, converge, decide
from rl_accel.lab.ab.recipe import Metrics, parse_margin
from rl_accel.lab.ab.stats import RunData

DRAWS = 1000
GAIN, MARGIN = 0.5, 0.01
REWARD = "critic/score/mean"


def draws(rng, seeds, spread, true, paired, share=False, count=DRAWS):
    """``count`` experiments: levels of both arms and the margin, [count, seeds] each; ``spread`` and ``true`` in margins.

    A seed's own level is common to both arms where they are paired.
    """
    size = (count, seeds)
    own = rng.normal(0, 3 * MARGIN, size) if paired else 0.0
    before = rng.normal(0.2, MARGIN, size)
    noise = spread * MARGIN / math.sqrt(2)
    base = before + GAIN + own + rng.normal(0, noise, size)
    ours = before + GAIN + own + rng.normal(0, noise, size) + true * MARGIN
    if not paired:
        ours += before[:, ::-1] - before
    margins = (MARGIN / GAIN) * (base - before - own) if share else np.full(size, MARGIN)
    return base, ours, margins.mean(axis=1)


def answers_of(base, ours, margins, paired):
    return np.array([decide(*case, paired) for case in zip(base, ours, margins, strict=True)])


def at_most(share, count):
    """Whether so many of ``DRAWS`` go together with a share of at most that."""
    return binomtest(int(count), DRAWS, share, alternative="greater").pvalue > 0.01


def assert_seldom_wrong(answers, true):
    """In at most one of twenty an answer of ``decide`` is not that of the ``true`` difference, in margins."""
    if true >= 1:
        assert at_most(0.05, (answers == EQUAL).sum())
    if true <= 1:
        assert at_most(0.05, (answers == DIFFERENT).sum())


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "spread"), [(3, 0.2), (10, 1.0)])
@pytest.mark.parametrize(("paired", "share"), list(itertools.product((True, False), (True, False))))
def test_each_answer_is_wrong_in_at_most_one_of_twenty(seeds, spread, paired, share):
    """At a difference of exactly the margin, where both wrong answers are most frequent."""
    answers = answers_of(*draws(np.random.default_rng(1), seeds, spread, 1.0, paired, share), paired)
    assert_seldom_wrong(answers, 1.0)


@pytest.mark.parametrize(
    ("true", "seeds", "answer", "share"),
    [(0.0, 60, EQUAL, 0.95), (0.5, 60, EQUAL, 0.95), (2.0, 60, DIFFERENT, 0.95), (1.0, 200, NOT_ENOUGH, 0.88)],
)
def test_with_many_seeds_the_answer_is_the_right_one_and_none_at_exactly_the_margin(true, seeds, answer, share):
    answers = answers_of(*draws(np.random.default_rng(2), seeds, 1.0, true, True, count=200), True)
    assert (answers == answer).mean() > share


def curves(rng, arms_true, length=80, seeds=4, noise=0.005, common=0.001):
    """Rewards of runs, autocorrelated and of different lengths: rising, then a plateau; an arm's is ``true`` margins higher."""
    made = []
    for true in arms_true:
        lengths = [length, *rng.integers(length, 2 * length, seeds - 1)]
        for seed, steps in enumerate(lengths):
            x = np.arange(steps)
            rise = np.clip((x - length // 5) / 20, 0, 1)
            drift = lfilter([1], [1, -0.9], rng.normal(0, noise * math.sqrt(1 - 0.81), steps))
            made.append((seed, x + 1.0, 0.2 + (GAIN + true * MARGIN + rng.normal(0, common)) * rise + drift))
    return [[(x, y) for _, x, y in made[:seeds]], [(x, y) for _, x, y in made[seeds:]]]


@pytest.mark.slow
@pytest.mark.parametrize("true", [0.0, 1.0, 2.0])
def test_autocorrelated_curves_of_different_lengths_do_not_mislead(true):
    rng, finals = np.random.default_rng(5), []
    for _ in range(DRAWS):
        sides = curves(rng, (0.0, true))
        end = min(x[-1] for side in sides for x, _ in side)
        assert end == 80
        finals.append([convergence.levels(side, end) for side in sides])
    (before, base), (_, ours) = np.array(finals).transpose(1, 2, 0, 3)
    answers = answers_of(base, ours, MARGIN / GAIN * (base - before).mean(axis=1), False)
    assert_seldom_wrong(answers, true)
    if true in (0, 2):
        assert (answers == (EQUAL if true == 0 else DIFFERENT)).sum() > DRAWS / 2, "these runs do tell"


def test_runs_that_are_alike_to_the_bit_are_equal_from_three_seeds_on_and_a_constant_difference_is_one():
    base = np.array([0.5, 0.6, 0.7])
    assert decide(base, base.copy(), 0.01, True) == EQUAL
    assert convergence.interval(base, base.copy(), True) == (0.0, 0.0)
    assert decide(base, base + 0.02, 0.01, True) == DIFFERENT
    for seeds in (1, 2):
        same = np.full(seeds, 0.7)
        assert decide(same, same, 1.0, True) == NOT_ENOUGH
        assert math.isnan(convergence.interval(same, same, True)[0])


def test_the_interval_is_students_for_pairs_and_welchs_otherwise():
    base, ours = np.array([0.1, 0.2, 0.3]), np.array([0.2, 0.31, 0.39])
    low, high = convergence.interval(base, ours, True)
    # t(0.975, 2) = 4.303; the differences 0.10, 0.11, 0.09 deviate by 0.01
    assert high - low == pytest.approx(2 * 4.3027 * 0.01 / 3**0.5, rel=1e-4)
    assert (low + high) / 2 == pytest.approx(0.1)
    wide = convergence.interval(base, ours, False)
    assert wide[1] - wide[0] > 5 * (high - low)


def test_a_margin_is_a_share_of_the_gain_or_a_difference_and_else_refused():
    margins = {"2%": (0.02, True), "0.01": (0.01, False), " 10% ": (0.1, True), "1e-3": (0.001, False)}
    for text, margin in margins.items():
        assert parse_margin(text) == pytest.approx(margin)
    for text in ("", "%", "0", "0%", "-1", "nan", "two", "1 %%"):
        with pytest.raises(RecipeError, match=r"metrics\.margin wants .* found"):
            parse_margin(text)


def run(arm, seed, values, seconds=3600.0, batch=None, first=1, **more):
    steps = {}
    for index, value in enumerate(values):
        steps[first + index] = {REWARD: value, "timing_s/step": seconds} | {k: v[index] for k, v in more.items()}
    return RunData(arm, seed, steps, [f"data.train_batch_size={batch}"] if batch else [])


def test_runs_pair_by_seed_where_all_are_known():
    def names(base, ours):
        runs = [[run(arm, seed, [0]) for seed in seeds] for arm, seeds in (("a", base), ("b", ours))]
        first, second, paired = convergence.matched(*runs)
        return [run.seed for run in first], [run.seed for run in second], paired

    assert names([0, 1, 2], [2, 1, 0]) == ([0, 1, 2], [0, 1, 2], True)
    assert names([0, 1, 2, 3], [1, 2, 3, 4, 5]) == ([1, 2, 3], [1, 2, 3], True)
    assert names([0], [0]) == ([0], [0], True)
    assert names([0, 1, 2], [0, 1, 7])[2] is False
    assert names([0, 1, None], [0, 1, 2])[2] is False


def test_values_lie_at_steps_and_at_the_prompts_and_hours_that_are_known():
    def places(of, metric=REWARD):
        return {axis: x.tolist() for axis, (x, _) in convergence.points(of, Metrics(), metric).items()}

    gap = run("a", 0, [0.1, 0.2, math.nan, 0.4], 1800.0, batch=8)
    assert places(gap) == {"steps": [1, 2, 4], "prompts": [8, 16, 32], "hours": [0.5, 1.0, 2.0]}
    assert convergence.points(gap, Metrics(), REWARD)["hours"][1].tolist() == [0.1, 0.2, 0.4]
    assert places(run("a", 0, [1, 2], batch=8, first=0))["prompts"] == [8, 16], "slime counts from zero"
    assert set(places(run("a", 0, [1, 2], first=5))) == {"steps"}, "hours before step 5 are unknown"
    gap = run("a", 0, [1, 2, 3])
    del gap.steps[2]["timing_s/step"]
    assert set(places(gap)) == {"steps"}
    trained = run("a", 0, [1, 2], batch=8)
    trained.steps[2]["val"] = 0.5
    validated_first = RunData("a", 0, {0: {"val": 0.3}, **trained.steps}, trained.command)
    assert places(validated_first, "val") == {"steps": [0, 2], "prompts": [0, 16], "hours": [0, 2]}


def test_the_whole_says_levels_answers_axes_and_what_is_missing():
    ramp = np.linspace(0, 1, 50)
    runs = [run("stock", seed, ramp + seed / 10, batch=4) for seed in range(3)]
    fast = {seed: (ramp + seed / 10)[: 50 - 4 * (seed == 1)] for seed in range(3)}
    runs += [run("fast", seed, values, seconds=1800.0, batch=4) for seed, values in fast.items()]
    runs[0].steps[50]["val-core/x/acc/mean@1"] = 1.0
    section = converge(runs, ["stock", "fast"], "stock", Metrics())
    by_axis = {row["axis"]: row for row in section["rows"]}
    answers = {axis: row["answer"] for axis, row in by_axis.items()}
    assert answers == {"steps": EQUAL, "prompts": EQUAL, "hours": DIFFERENT}
    assert (by_axis["steps"]["end"], by_axis["steps"]["last"], by_axis["prompts"]["end"]) == (46, 50, 184)
    assert (by_axis["steps"]["difference"], by_axis["hours"]["end"]) == (0, 23)
    assert "val-core/x/acc/mean@1 is not in stock-seed1, stock-seed2, all runs of fast" in section["notes"]
    assert list(section["curves"]) == [REWARD, "val-core/x/acc/mean@1"]
    assert section["curves"]["val-core/x/acc/mean@1"]["prompts"] == {"stock-seed0": [[200.0], [1.0]]}
    text = convergence.sentence(by_axis["steps"], "stock", "2%")
    start = "fast and stock, critic/score/mean against training steps: equal within the margin (difference +0"
    assert text.startswith(start)
    assert "2% of stock's gain; 3 seeds, paired" in text


def test_a_baseline_that_gains_nothing_gives_no_answer():
    runs = [run(arm, seed, [1, 0]) for arm in ("stock", "fast") for seed in range(3)]
    runs[-1].steps[1][REWARD] = 0.9
    row = converge(runs, ["stock", "fast"], "stock", Metrics())["rows"][0]
    assert row["answer"] == NOT_ENOUGH
    assert "stock gained nothing" in convergence.sentence(row, "stock", "2%")


def test_arms_with_the_same_curves_are_identical_with_one_run_each_and_less_than_an_hour_is_in_minutes():
    runs = [run(arm, 0, np.linspace(0, 1, 20), seconds, batch=8) for arm, seconds in (("stock", 60.0), ("fast", 30.0))]
    rows = {row["axis"]: row for row in converge(runs, ["stock", "fast"], "stock", Metrics())["rows"]}
    answers = {axis: row["answer"] for axis, row in rows.items()}
    assert answers == {"steps": IDENTICAL, "prompts": IDENTICAL, "minutes": NOT_ENOUGH}
    assert rows["minutes"]["end"] == 10
