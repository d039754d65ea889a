"""The decision on runs whose truth is known: how often each answer is wrong, and whether the seeds it asks for are enough."""

import itertools
import math

import numpy as np
import pytest
from scipy.signal import lfilter
from scipy.stats import binomtest

from rl_accel.errors import RecipeError
from rl_accel.lab.ab.convergence import (
    DIFFERENT,
    EQUAL,
    NOT_ENOUGH,
    converge,
    decide,
    interval,
    levels,
    matched,
    points,
    seeds_enough,
    sentence,
)
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
    return base, ours, (MARGIN / GAIN) * (base - before - own) if share else np.full(size, MARGIN)


def at_most(share, count):
    """Whether so many of ``DRAWS`` go together with a share of at most that."""
    return binomtest(int(count), DRAWS, share, alternative="greater").pvalue > 0.01


@pytest.mark.parametrize("true", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize(("seeds", "spread"), [(3, 0.2), (3, 1.0), (5, 0.7), (10, 1.5)])
@pytest.mark.parametrize(("paired", "share"), list(itertools.product((True, False), (True, False))))
def test_each_answer_is_wrong_in_at_most_one_of_twenty(true, seeds, spread, paired, share):
    answers = decide(*draws(np.random.default_rng(1), seeds, spread, true, paired, share), paired)
    if true >= 1:
        assert at_most(0.05, (answers == EQUAL).sum())
    if true <= 1:
        assert at_most(0.05, (answers == DIFFERENT).sum())


@pytest.mark.parametrize(("true", "answer"), [(0.0, EQUAL), (0.5, EQUAL), (2.0, DIFFERENT)])
def test_with_many_seeds_the_answer_is_the_right_one(true, answer):
    answers = decide(*draws(np.random.default_rng(2), 60, 1.0, true, True), True)
    assert (answers == answer).mean() > 0.95


def test_at_exactly_the_margin_runs_are_never_enough():
    answers = decide(*draws(np.random.default_rng(3), 200, 1.0, 1.0, True), True)
    assert (answers == NOT_ENOUGH).mean() > 0.88


@pytest.mark.slow
@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize(("true", "supposed"), [(0.0, 0.0), (0.5, 0.5), (2.0, 0.0)])
@pytest.mark.parametrize("spread", [0.7, 2.0])
def test_the_seeds_it_asks_for_are_enough_in_four_of_five(paired, true, supposed, spread):
    """Over draws that were not decided by three or five seeds, and for each a second one with the seeds asked for."""
    rng = np.random.default_rng(4)
    for pilot in (3, 5):
        base, ours, margin = draws(rng, pilot, spread, true, paired)
        undecided = decide(base, ours, margin, paired) == NOT_ENOUGH
        base, ours = base[undecided], ours[undecided]
        deviations = (
            (ours - base).std(axis=1, ddof=1)
            if paired
            else np.hypot(base.std(axis=1, ddof=1), ours.std(axis=1, ddof=1))
        )
        # it grows with the deviation: the number for the next smaller one of a grid is no larger
        grid = np.quantile(deviations, np.linspace(0, 1, 25))
        example = np.array([-1.0, 0.0, 1.0] if pilot == 3 else [-1.5, -0.5, 0.0, 0.5, 1.5])
        unit = example / example.std(ddof=1)
        zero = np.zeros(pilot)
        wanted = [
            seeds_enough(*((zero, its * unit) if paired else (its * unit / 2**0.5,) * 2), MARGIN, paired, supposed)
            for its in grid
        ]
        asked = np.minimum(np.array(wanted)[np.searchsorted(grid, deviations, side="right") - 1], 1001).astype(int)
        decided = 0
        for seeds, count in zip(*np.unique(asked, return_counts=True), strict=True):
            decided += (decide(*draws(rng, seeds, spread, true, paired, count=count), paired) != NOT_ENOUGH).sum()
        assert binomtest(int(decided), len(asked), 0.8, alternative="less").pvalue > 0.01, (decided, len(asked), pilot)
        print(
            f"{pilot} seeds, deviation {spread}, difference {true}: enough in {decided} of {len(asked)}, {np.median(asked)}"
        )


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


@pytest.mark.parametrize("true", [0.0, 0.5, 1.0, 2.0])
def test_autocorrelated_curves_of_different_lengths_do_not_mislead(true):
    rng = np.random.default_rng(5)
    finals = []
    for _ in range(DRAWS):
        sides = curves(rng, (0.0, true))
        end = min(x[-1] for side in sides for x, _ in side)
        assert end == 80
        finals.append([levels(side, end) for side in sides])
    (before, base), (_, ours) = np.array(finals).transpose(1, 2, 0, 3)
    answers = decide(base, ours, MARGIN / GAIN * (base - before), False)
    counts = {answer: (answers == answer).sum() for answer in (EQUAL, DIFFERENT)}
    if true >= 1:
        assert at_most(0.05, counts[EQUAL])
    if true <= 1:
        assert at_most(0.05, counts[DIFFERENT])
    if true in (0, 2):
        assert counts[EQUAL if true == 0 else DIFFERENT] > DRAWS / 2, "these runs do tell"


def test_one_seed_and_two_never_decide_not_even_runs_that_are_alike():
    for seeds in (1, 2):
        same = np.full((1, seeds), 0.7)
        assert decide(same, same, np.full((1, seeds), 1.0), True) == NOT_ENOUGH
        assert math.isnan(interval(same[0], same[0], True)[0])


def test_runs_that_are_alike_to_the_bit_are_equal_and_a_constant_difference_is_a_difference():
    base = np.array([0.5, 0.6, 0.7])
    margin = np.full(3, 0.01)
    assert decide(base, base.copy(), margin, True) == EQUAL
    assert interval(base, base.copy(), True) == (0.0, 0.0)
    assert decide(base, base + 0.02, margin, True) == DIFFERENT


def test_the_interval_is_students_for_pairs_and_welchs_otherwise():
    base, ours = np.array([0.1, 0.2, 0.3]), np.array([0.2, 0.31, 0.39])
    low, high = interval(base, ours, True)
    # t(0.975, 2) = 4.303; the differences 0.10, 0.11, 0.09 deviate by 0.01
    assert high - low == pytest.approx(2 * 4.3027 * 0.01 / 3**0.5, rel=1e-4)
    assert (low + high) / 2 == pytest.approx(0.1)
    wide = interval(base, ours, False)
    assert wide[1] - wide[0] > 5 * (high - low)


def test_the_seeds_asked_for_grow_with_the_deviation_and_end_at_a_thousand():
    unit = np.array([-1.0, 0.0, 1.0])
    asked = [seeds_enough(np.zeros(3), spread * unit, 1.0, True) for spread in (0.1, 0.5, 1.0, 2.0, 100.0)]
    assert asked == sorted(asked)
    assert asked[0] == 3
    assert asked[-1] == math.inf
    assert seeds_enough(np.zeros(3), unit, 1.0, True, 0.5) > 2 * seeds_enough(np.zeros(3), unit, 1.0, True)


@pytest.mark.parametrize(
    ("text", "margin"),
    [("2%", (0.02, True)), ("0.01", (0.01, False)), (" 10% ", (0.1, True)), ("1e-3", (0.001, False))],
)
def test_a_margin_is_a_share_of_the_gain_or_a_difference(text, margin):
    assert parse_margin(text) == pytest.approx(margin)


@pytest.mark.parametrize("text", ["", "%", "0", "0%", "-1", "nan", "two", "1 %%"])
def test_a_margin_that_is_none_is_refused(text):
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
        first, second, paired = matched(*runs)
        return [its.seed for its in first], [its.seed for its in second], paired

    assert names([0, 1, 2], [2, 1, 0]) == ([0, 1, 2], [0, 1, 2], True)
    assert names([0, 1, 2, 3], [1, 2, 3, 4, 5]) == ([1, 2, 3], [1, 2, 3], True)
    assert names([0], [0]) == ([0], [0], True)
    assert names([0, 1, 2], [0, 1, 7])[2] is False
    assert names([0, 1, None], [0, 1, 2])[2] is False


def test_a_value_lies_at_a_step_at_prompts_and_at_hours():
    found = points(run("a", 0, [0.1, 0.2, math.nan, 0.4], 1800.0, batch=8), Metrics(), REWARD)
    assert {axis: x.tolist() for axis, (x, _) in found.items()} == {
        "steps": [1, 2, 4],
        "prompts": [8, 16, 32],
        "hours": [0.5, 1.0, 2.0],
    }
    assert found["hours"][1].tolist() == [0.1, 0.2, 0.4]


def test_slime_counts_from_zero_and_what_is_not_known_is_left_out():
    assert points(run("a", 0, [1, 2], batch=8, first=0), Metrics(), REWARD)["prompts"][0].tolist() == [8, 16]
    assert set(points(run("a", 0, [1, 2], first=5), Metrics(), REWARD)) == {"steps"}, "hours before step 5 are unknown"
    gap = run("a", 0, [1, 2, 3])
    del gap.steps[2]["timing_s/step"]
    assert set(points(gap, Metrics(), REWARD)) == {"steps"}


def test_a_validation_before_training_lies_at_no_prompt_and_no_hour():
    trained = run("a", 0, [1, 2], batch=8)
    trained.steps[2]["val-core/gsm8k/acc/mean@1"] = 0.5
    its = RunData("a", 0, {0: {"val-core/gsm8k/acc/mean@1": 0.3}, **trained.steps}, trained.command)
    found = points(its, Metrics(), "val-core/gsm8k/acc/mean@1")
    assert {axis: x.tolist() for axis, (x, _) in found.items()} == {
        "steps": [0, 2],
        "prompts": [0, 16],
        "hours": [0, 2],
    }


def test_the_whole_says_levels_answers_axes_and_what_is_missing():
    ramp = np.linspace(0, 1, 50)
    runs = [run("stock", seed, ramp + seed / 10, batch=4) for seed in range(3)]
    runs += [
        run("fast", seed, (ramp + seed / 10)[: 50 - 4 * (seed == 1)], seconds=1800.0, batch=4) for seed in range(3)
    ]
    runs[0].steps[50]["val-core/x/acc/mean@1"] = 1.0
    found = converge(runs, ["stock", "fast"], "stock", Metrics())
    by_axis = {row["axis"]: row for row in found["rows"]}
    assert {axis: row["answer"] for axis, row in by_axis.items()} == {
        "steps": EQUAL,
        "prompts": EQUAL,
        "hours": DIFFERENT,
    }
    assert (by_axis["steps"]["end"], by_axis["steps"]["longest"], by_axis["prompts"]["end"]) == (46, 50, 184)
    assert by_axis["steps"]["difference"] == 0
    assert by_axis["hours"]["end"] == 23
    assert by_axis["steps"]["reach"]["ratio"] == pytest.approx(1)
    assert by_axis["hours"]["reach"]["ratio"] == pytest.approx(2)
    assert "val-core/x/acc/mean@1 is not in stock-seed1, stock-seed2, all runs of fast" in found["notes"]
    assert list(found["curves"]) == [REWARD, "val-core/x/acc/mean@1"]
    assert found["curves"]["val-core/x/acc/mean@1"]["prompts"] == {"stock-seed0": [[200.0], [1.0]]}
    text = sentence(by_axis["steps"], "stock", "2%")
    assert text.startswith(
        "fast and stock, critic/score/mean against training steps: equal within the margin (difference +0"
    )
    assert "2% of stock's gain; 3 seeds, paired" in text


def test_a_level_that_a_run_does_not_reach_gives_no_ratio():
    slow = [run("b", seed, np.linspace(0, 0.5, 50)) for seed in range(3)]
    rows = converge([*(run("a", s, np.linspace(0, 1, 50)) for s in range(3)), *slow], ["a", "b"], "a", Metrics())[
        "rows"
    ]
    reach = rows[0]["reach"]
    assert reach["reached"] == [3, 0]
    assert math.isnan(reach["ratio"])
    assert math.isnan(reach["value"])


@pytest.mark.parametrize(
    ("seeds", "values", "why"),
    [
        (1, [0, 1], "nothing is decided below 3 seeds of each"),
        (3, [1, 0], "stock gained nothing"),
        (3, None, "seeds of each show that they are equal"),
    ],
)
def test_not_enough_says_why(seeds, values, why):
    rng = np.random.default_rng(0)
    noisy = itertools.starmap(
        lambda arm, seed: run(arm, seed, values or np.linspace(0, 1, 50) + rng.normal(0, 0.2)),
        itertools.product(("stock", "fast"), range(seeds)),
    )
    row = converge(list(noisy), ["stock", "fast"], "stock", Metrics())["rows"][0]
    assert row["answer"] == NOT_ENOUGH
    assert why in sentence(row, "stock", "2%")
