"""Logs of runs whose savings are known: what ``rl-accel profile`` prints of them must hold the truth.

The runs have an engine without limits: a rollout takes ``base + pace * longest`` seconds. Lengths are log-normal, with a part that
the responses to a prompt share. The saving of tail batching follows from thousands of drawn rounds, computed without the product.
"""

import functools
import json
from dataclasses import dataclass

import numpy as np
import pytest

from rl_accel.features import TailBatchingFlags
from rl_accel.plan.profile_report import profile
from rl_accel.plan.savings import NOTICING, VALIDATING, WAITING, find_savings
from rl_accel.rollout.tail_batching import TailRun
from rl_accel.telemetry import stage_clock
from rl_accel.telemetry.profile import read_run
from rl_accel.telemetry.stage_clock import FILE_NAME, POLL_SECONDS, ResponseTimes

RUN = TailRun(16, 8, TailBatchingFlags())
TRAINING = 20.0
"""Seconds of the stage ``update_actor`` for a batch of mean length."""


@dataclass(frozen=True)
class Truth:
    """Settings of a run."""

    spread: float = 0.75
    mean: float = 1500.0
    limit: int = 8192
    base: float = 6.0
    pace: float = 0.012

    def lengths(self, shared, responses, rng):
        """Lengths of ``responses`` new responses to each prompt, shape [P, R]. ``shared``: the prompts' own part, shape [P]."""
        own = rng.normal(size=(len(shared), responses))
        scores = 0.55 * shared[:, None] + 0.83 * own
        return np.minimum(np.exp(np.log(self.mean) - self.spread**2 / 2 + self.spread * scores).round(), self.limit)

    def seconds(self, longest):
        return self.base + self.pace * longest

    @functools.cache  # noqa: B019 (a few settings)
    def saved(self, polls=False):
        """Seconds that tail batching saves in generation, and in training. ``polls``: stock looks every 2 s for the end."""
        rng = np.random.default_rng(99)
        prompts, responses = RUN.prompts_per_step, RUN.responses_per_prompt
        batches = [self.lengths(rng.normal(size=prompts), responses, rng) for _ in range(2000)]
        ends = np.array([self.seconds(batch.max()) for batch in batches])
        stock = np.mean(np.ceil(ends / POLL_SECONDS) * POLL_SECONDS if polls else ends)
        seconds, tokens = [], []
        for _ in range(300):
            late = []
            while len(late) < prompts:
                shared = rng.normal(size=RUN.short_round_prompts)
                ends = np.sort(self.lengths(shared, RUN.short_round_responses, rng), axis=1)[:, :responses]
                order = np.argsort(ends[:, -1])
                seconds.append(self.seconds(ends[order[prompts - 1], -1]))
                tokens.append(ends[order[:prompts]].sum())
                late += shared[order[prompts:]].tolist()
            batch = self.lengths(np.array(late[:prompts]), responses, rng)
            seconds.append(self.seconds(batch.max()))
            tokens.append(batch.sum())
        trained = np.mean(tokens) / np.mean([batch.sum() for batch in batches])
        return stock - np.mean(seconds), TRAINING * (1 - trained)


def write(folder, truth, seed, is_v1=False, has_times=False, steps=12, is_slime=False):
    """A log of ``steps`` steps of the run ``truth``; with ``has_times``, as the feature telemetry leaves it."""
    rng = np.random.default_rng(seed)
    lines = []
    for step in range(1, steps + 1):
        lengths = truth.lengths(rng.normal(size=RUN.prompts_per_step), RUN.responses_per_prompt, rng)
        seconds = truth.seconds(lengths.max())
        gen = np.ceil(seconds / POLL_SECONDS) * POLL_SECONDS + 0.05 if is_v1 else seconds
        update = TRAINING * lengths.mean() / truth.mean
        metrics = {"response_length/mean": lengths.mean(), "response_length/max": lengths.max()}
        metrics |= {"timing_s/gen": gen, "timing_s/update_actor": update, "timing_s/step": gen + update + 0.8}
        if is_v1:
            metrics["training/off_policy/trajectory_staleness/mean"] = 0.0
        if step % 4 == 0:
            metrics["timing_s/testing"] = 90.0
            metrics["timing_s/step"] += 0.0 if is_v1 else 90.0
        if has_times:
            ends = truth.seconds(lengths)
            responses = [
                ResponseTimes(f"p{prompt}", 0.0, end, end, end, int(tokens), "s0")
                for prompt, row in enumerate(zip(ends, lengths, strict=True))
                for end, tokens in zip(*row, strict=True)
            ]
            numbers = stage_clock.completion(responses) | stage_clock.generation(responses, gen)
            metrics |= {f"rl_accel/telemetry/{name}": value for name, value in numbers.items()}
            stage_clock.keep(folder / FILE_NAME, step, responses)
        if is_slime:
            names = {name: ours for ours, name in stage_clock.SLIME_NAMES.items()}
            lines.append(f"x.py:1 - perf {step}: { {names[k]: float(v) for k, v in metrics.items() if k in names} }")
        else:
            lines.append(json.dumps({"step": step, "data": {name: float(value) for name, value in metrics.items()}}))
    (folder / ("slime.log" if is_slime else "metrics.jsonl")).write_text("\n".join([*lines, ""]))


def savings_of(folder):
    return {saving.name: saving for saving in find_savings(read_run(folder))}


TRUTHS = [
    Truth(),
    Truth(spread=0.4),
    Truth(spread=1.0, limit=16384),
    Truth(mean=2700.0, spread=0.8, base=8.0, pace=0.02),
    Truth(base=0.5, pace=0.03, limit=3000),
    Truth(spread=0.05),
]


@pytest.mark.parametrize("truth", TRUTHS, ids=str)
@pytest.mark.parametrize("framework", ["verl's older trainer", "verl's V1 trainer", "slime"])
def test_a_bound_of_means_and_maxima_is_above_the_truth_and_is_called_a_bound(tmp_path, invoke, truth, framework):
    write(tmp_path, truth, 0, is_v1="V1" in framework, steps=40, is_slime=framework == "slime")
    savings = savings_of(tmp_path)
    in_generation, _ = truth.saved()
    assert savings[WAITING].at_most > in_generation
    assert (savings[WAITING].gain, read_run(tmp_path).step_seconds < 500) == (None, True)
    if framework != "slime":
        assert savings[VALIDATING].at_most == pytest.approx(90.0 / 4, rel=0.1)
    if "V1" in framework:
        assert 0 < savings[NOTICING].at_most <= POLL_SECONDS
    output = invoke(profile, tmp_path, "--no-picture")
    assert f"{WAITING}: a bound: what generation would save if no response were longer than the mean" in output
    if framework == "slime":
        verls_own = ("V1 trainer", "rollout_data_dir", "final_output", "+rl_accel", "bypass_mode")
        assert [word for word in verls_own if word in output] == []


@pytest.mark.slow
def test_intervals_of_response_times_hold_the_truth(tmp_path):
    """A 95% interval may miss it in one of twenty runs."""
    missed = []
    for number, truth in enumerate(TRUTHS):
        for seed in range(3):
            folder = tmp_path / f"{number}-{seed}"
            folder.mkdir()
            write(folder, truth, seed, is_v1=True, has_times=True)
            gain = savings_of(folder)[WAITING].gain
            if not gain.low < sum(truth.saved(polls=True)) < gain.high:
                missed.append((truth, seed, gain, truth.saved(polls=True)))
    assert len(missed) <= 2, missed
