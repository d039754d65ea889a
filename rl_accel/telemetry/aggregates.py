"""Estimates for runs without telemetry, from the seconds of rollouts and from aggregates of response lengths.

verl and slime log a few numbers of each rollout: its seconds, and the mean and maximum of the response lengths in tokens. The
model of a rollout is ``seconds = base + pace * longest + noise``, rounded up to the next poll if the trainer polls. The
distribution of lengths is a published one (RollPacker, NSDI'26, Fig. 2a). It is stretched on a logarithmic scale until its mean,
the mean of its maximum over a batch, and its share at the length limit are those of the run.

Each estimate is made :data:`DRAWS` times. Each draw has other steps (bootstrap), another published shape, and other values of what
a log does not say. The interval of an estimate holds 95% of the draws.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rl_accel.features import RewardTimeoutFlags
from rl_accel.rollout.tail_batching import TailRun
from rl_accel.rollout.workload import PUBLISHED, PUBLISHED_LIMIT, Floats, Lengths, published

POLL_SECONDS = 2.0
"""Seconds between two polls of verl's V1 trainer."""
DRAWS = 36
"""Number of random draws for each estimate: 3 published distributions of lengths x 3 numbers of responses per prompt x 4
intraclass correlations of the lengths. If the log tells the number of responses, each combination is used three times."""
LEAST_STEPS = 4
"""Minimum number of logged steps for an estimate. Chosen by hand."""
SMALLEST_GAIN = 0.02
"""Smallest saving that is reported, as a share of a step's duration. Chosen by hand."""
_GROUPS = (4, 8, 16)
"""Assumed numbers of responses per prompt if the log does not tell the number. Each draw uses one of them."""
_ALIKE = (0.0, 0.15, 0.3, 0.45)
"""Assumed intraclass correlations of the response lengths within a prompt. Each draw uses one. Measured values: 0.13 to 0.30."""
_UNEXPLAINED = 0.25
"""Limit of the root mean square error of the fit in :meth:`Rollouts.timed`, divided by the mean rollout time. Above this limit,
response lengths do not explain rollout times. Chosen by hand."""
_SLOWEST_TOKEN, _SLOWEST_READING, _SLOWEST_START = 0.1, 1 / 5000, 2.0
"""Seconds that a very slow engine needs for a token of the longest response, for a token of a prompt, and to start a rollout. A
rollout that takes longer waits for something else, such as rewards. Chosen by hand."""
_ROUND_RESPONSES = 15_000
"""Approximate number of responses that :func:`in_rounds` simulates, enough for stable means. Chosen by hand."""
_FIELDS = {
    "seconds": ("timing_s/gen", 0.0),
    "mean": ("response_length/mean", 0.0),
    "longest": ("response_length/max", 0.0),
    "clipped": ("response_length/clip_ratio", 0.0),
    "prompts": ("prompt_length/mean", 0.0),
    "generating": ("timing_s/agent_loop/generate_sequences/mean", math.nan),
}
"""Mapping from each array of :class:`Rollouts` to verl's metric and the value for a step without this metric."""
V1 = "training/off_policy/trajectory_"
"""Prefix of metrics that only verl's V1 trainer logs."""
STALENESS = "training/off_policy/trajectory_staleness/mean"
"""Name of verl's metric for the mean number of weight updates between the generation and the training of a response."""


@dataclass(frozen=True)
class Range:
    """An estimate (``mean``) with its 95% interval (``low`` to ``high``)."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, draws: Sequence[float] | Floats, mean: float | None = None) -> "Range":
        """Returns the estimate ``mean`` (None: the mean of ``draws``) with the interval that holds the central 95% of ``draws``."""
        low, high = np.quantile(draws, (0.025, 0.975)).tolist()
        return cls(float(np.mean(draws)) if mean is None else mean, low, high)


@dataclass(frozen=True)
class Rollouts:
    """Rollouts of a run, as described by a log without telemetry. Arrays have one number per step, shape [S].

    Attributes:
        seconds: duration of the stage ``gen``.
        mean, longest: mean and maximum of the response lengths in tokens.
        prompts: mean number of tokens in a prompt.
        clipped: share of responses that are cut off at the length limit.
        generating: mean generation time of a response in seconds; NaN if unknown.
        responses: number of responses in a step; 0 if unknown.
        group: number of responses per prompt; None if unknown.
        polls: whether the trainer polls, and so notices the end of a rollout late.
        on_policy: whether all responses were generated with the weights that are trained on them.
        limit: length limit in tokens. If several steps have equally long longest responses, their length is taken for the limit;
            otherwise infinity.
    """

    seconds: Floats
    mean: Floats
    longest: Floats
    prompts: Floats
    clipped: Floats
    generating: Floats
    responses: int
    group: int | None
    polls: bool
    on_policy: bool
    limit: float

    @classmethod
    def of(
        cls, steps: Sequence[Mapping[str, float]], group: int | None, prompts: int | None = None, polls: bool = True
    ) -> "Rollouts | None":
        """Returns the rollouts of ``steps``, a list with the metrics of each step.

        Returns None if fewer than :data:`LEAST_STEPS` steps have the rollout's duration and the mean and maximum length.

        Args:
            group: number of responses per prompt, if known.
            prompts: number of prompts in a batch, if known.
            polls: False if a feature is on with which verl's V1 trainer does not poll.
        """
        needed = [_FIELDS[field][0] for field in ("seconds", "mean", "longest")]
        known = [step for step in steps if all(0 < step.get(name, 0) < math.inf for name in needed)]
        if len(known) < LEAST_STEPS:
            return None
        arrays = {
            field: np.array([step.get(name, other) for step in known]) for field, (name, other) in _FIELDS.items()
        }
        tokens = np.array([step.get("perf/total_num_tokens", math.nan) for step in known])
        count = float(np.median(tokens / (arrays["prompts"] + arrays["mean"])))
        responses = round(count) if math.isfinite(count) else (prompts or 0) * (group or 0)
        longest = float(arrays["longest"].max())
        on_policy = all(step.get(STALENESS, 0) == 0 for step in known)
        return cls(
            **arrays,
            responses=responses,
            group=group,
            polls=polls and on_policy and any(name.startswith(V1) for name in known[0]),
            on_policy=on_policy,
            limit=longest if (arrays["longest"] == longest).sum() > 1 else math.inf,
        )

    @property
    def is_measured(self) -> bool:
        """True if verl logged the mean generation time of a response for every step."""
        return bool(np.isfinite(self.generating).all())

    def drawn(self, rng: np.random.Generator) -> "Rollouts":
        """Returns a bootstrap sample: the same number of steps, drawn from these steps with replacement."""
        rows = rng.integers(len(self.seconds), size=len(self.seconds))
        return replace(self, **{name: getattr(self, name)[rows] for name in _FIELDS})

    def phase(self) -> float:
        """Returns the seconds from the trainer's poll that finds a rollout done to the end of the stage ``gen``.

        Polls come at regular intervals from the start of ``gen``, so that this is the remainder of the duration of ``gen`` divided
        by the interval. Returns 0 if the remainders of the steps are not about equal.
        """
        direction = np.exp(2j * np.pi * self.seconds / POLL_SECONDS).mean()
        if abs(direction) < 0.8:
            return 0.0
        usual = np.angle(direction) * POLL_SECONDS / (2 * np.pi)
        off = self.seconds - usual
        return max(float((off - np.round(off / POLL_SECONDS) * POLL_SECONDS).min() + usual), 0.0)

    def timed(self, phase: float, rng: np.random.Generator) -> tuple[float, float, Floats, Floats]:
        """Fits the model ``seconds = base + pace * longest`` to the rollouts; ``longest`` is the length of the longest response.

        If the trainer polls, the log only tells the two polls between which a rollout ended. The end is then drawn at random
        between these polls. Fits and draws alternate (data augmentation). ``phase`` is the result of :meth:`phase`.

        Returns:
            ``base`` in seconds; ``pace`` in seconds per token; duration of each rollout in seconds, shape [S]; seconds of each
                rollout that response lengths do not explain, shape [S].
        """
        from scipy.optimize import linprog, nnls
        from scipy.special import ndtr, ndtri

        ends = np.maximum(self.seconds - phase, 0.01) if self.polls else self.seconds
        begins = np.maximum(ends - POLL_SECONDS, 0.0)
        done = (begins + ends) / 2 if self.polls else ends
        unit = float(done.mean() / self.longest.mean())
        # The last row prefers a small base where the lengths hardly differ.
        table = np.stack([np.ones_like(ends), self.longest * unit], axis=1)
        table = np.vstack([table, [0.1 * math.sqrt(len(ends)), 0.0]])
        for _ in range(20):
            base, pace = nnls(table, np.append(done, 0.0))[0]
            expected = table[:-1] @ (base, pace)
            noise = max(float(np.sqrt(np.square(done - expected).mean())), 0.02 * POLL_SECONDS)
            if not self.polls:
                break
            low, high = ndtr((begins - expected) / noise), ndtr((ends - expected) / noise)
            drawn = expected + noise * ndtri(low + rng.random(len(ends)) * (high - low))
            done = np.where(np.isfinite(drawn), np.clip(drawn, begins, ends), (begins + ends) / 2)
        excess = np.zeros_like(done)
        possible = _SLOWEST_TOKEN * self.longest + _SLOWEST_READING * self.responses * self.prompts + _SLOWEST_START
        if noise > max(POLL_SECONDS / 2, _UNEXPLAINED * done.mean()) or (done > possible).mean() > 1 / 2:
            sums = -table[:-1].sum(axis=0)
            base, pace = linprog(sums, table[:-1], done).x  # the line below all rollouts that is closest to them
            excess = done - np.minimum(table[:-1] @ (base, pace), possible)
        return float(base), float(pace) * unit, done, excess

    def lengths(self, shape: str, alike: float) -> Lengths:
        """Returns the published length distribution ``shape``, such as "math16k", stretched to fit the lengths of these rollouts.

        ``alike`` is the intraclass correlation of the lengths within a prompt.
        """
        from scipy.optimize import least_squares

        log, limit = _uncut(shape), self.limit
        clipped = float(np.where(self.longest == limit, self.clipped, 0.0).mean())
        most = round((1 - clipped) * len(log))
        ranks = np.arange(len(log) + 1) / len(log)
        of_longest = np.diff(ranks ** max(self.responses, 1))
        mean, longest = self.mean.mean(), self.longest.mean()
        inner = log[(np.arange(most) * len(log) / most).astype(int)]

        def stretched(values: Floats) -> Floats:
            body = np.minimum(np.exp(np.minimum(values[0] + values[1] * inner, 30.0)), limit)
            return np.concatenate([body, np.full(len(log) - most, limit if clipped else 0.0)])

        def off(values: Floats) -> list[float]:
            tokens = stretched(values)
            # no matrix product: its threads wait for each other on a busy machine
            deviations = np.log(tokens.mean() / mean), np.log((tokens * of_longest).sum() / longest)
            over = np.maximum(values[0] + values[1] * inner - math.log(limit), 0).sum() / len(log) if clipped else 0.0
            # The last terms keep further responses below the limit, and prefer the published spread where all steps reach it.
            return [*deviations, 20 * over, 0.1 * (values[1] - 1)]

        start = [math.log(mean) - float(np.log(np.exp(log).mean())), 1.0]
        tokens = stretched(least_squares(off, start, bounds=([-30, 0.1], [30, 4])).x)
        return Lengths(np.maximum(tokens, 1).round().astype(np.int64), alike)


@functools.cache
def _uncut(shape: str) -> Floats:
    """Returns quantiles of the logarithm of the length in the published distribution ``shape``, without truncated responses."""
    tokens = published(shape).tokens
    free = np.log(tokens[tokens < PUBLISHED_LIMIT])
    return np.interp((np.arange(len(tokens)) + 0.5) / len(tokens), (np.arange(len(free)) + 0.5) / len(free), free)


def in_rounds(lengths: Lengths, run: TailRun, seed: int = 0) -> tuple[float, float, float]:
    """Simulates rollouts with and without tail batching. Each response takes one unit of time per token.

    A short round of tail batching launches more prompts and responses than a training step needs, and ends when enough of them are
    complete. All other prompts start again in long rounds, which launch as many as a training step needs, and wait for all.

    Returns:
        Mean duration of a rollout with tail batching; mean duration without tail batching; number of trained tokens with tail
            batching, divided by the number without.
    """
    prompts, responses = run.prompts_per_step, run.responses_per_prompt
    launched, each = run.surplus_prompts, run.surplus_responses
    rng, rounds = np.random.default_rng(seed), max(_ROUND_RESPONSES // (launched * each), 20)
    drawn = np.sort(lengths.lengths(range(rounds * launched), each, rng).reshape(rounds, launched, each), axis=2)
    ended = drawn[:, :, responses - 1]  # a prompt is complete with its R0-th shortest response
    order = np.argsort(ended, axis=1, kind="stable")
    tokens = np.take_along_axis(ended, order[:, prompts - 1, None], 1).mean()
    trained = np.take_along_axis(drawn, order[:, :prompts, None], 1)[:, :, :responses].sum(axis=(1, 2)).mean()
    longest = lengths.lengths(range(rounds * prompts), responses, rng).reshape(rounds, -1).max(axis=1).mean()
    late = (order[:, prompts:] + np.arange(rounds)[:, None] * launched).ravel()
    late = late[: len(late) // prompts * prompts]
    if len(late):
        again = lengths.lengths(late.tolist(), responses, rng).reshape(-1, prompts * responses)
        share = launched / prompts - 1  # long rounds for each short round
        tokens = (tokens + share * again.max(axis=1).mean()) / (1 + share)
        trained = (trained + share * again.sum(axis=1).mean()) / (1 + share)
    return float(tokens), float(longest), float(trained / (drawn.mean() * prompts * responses))


@dataclass(frozen=True)
class Estimate:
    """Estimated parts of the mean rollout of a run without telemetry, in seconds, and estimated effects of features.

    Attributes:
        rollouts: the rollouts in the log, from which the estimates were made.
        lengths: distributions of response lengths that fit the log, one for each draw.
        base, pace: fixed seconds of a rollout, and additional seconds per token of its longest response.
        polling: seconds from the end of a rollout to the poll that finds it done; 0 if the trainer does not poll.
        storing: seconds from this poll to the end of the stage ``gen``; 0 if the trainer does not poll.
        waiting: seconds in which only the longest 10% of the responses are still running.
        unexplained: seconds that response lengths do not explain, such as slow rewards.
        idle: mean share of empty slots in the engine during generation. Without ``rollouts.generating``, it is assumed that all
            responses begin together.
        tail: seconds of generation that tail batching saves, without ``polling``; None if unknown.
        trained: number of trained tokens with tail batching, divided by the number without.
        over: the part of ``unexplained`` beyond the shortest time limit of reward_timeout, which this feature may save.
    """

    rollouts: Rollouts
    lengths: Sequence[Lengths]
    storing: float
    base: Range
    pace: Range
    polling: Range
    waiting: Range
    unexplained: Range
    idle: Range
    over: Range
    tail: Range | None = None
    trained: Range = Range(1.0, 1.0, 1.0)


def estimate(rollouts: Rollouts) -> Estimate:
    """Estimates where the time of ``rollouts`` went, and the savings by the features tail_batching and reward_timeout."""
    rng, phase = np.random.default_rng(0), rollouts.phase() if rollouts.polls else 0.0
    groups = [rollouts.group] if rollouts.group else [n for n in _GROUPS if n <= rollouts.responses] or [1]
    rows: list[dict[str, float]] = []
    lengths = []
    variants = itertools.cycle(itertools.product(PUBLISHED, groups, _ALIKE))
    for draw, (shape, group, alike) in zip(range(DRAWS), variants, strict=False):
        steps = rollouts.drawn(rng)
        base, pace, done, excess = steps.timed(phase, rng)
        lengths.append(steps.lengths(shape, alike))
        nine_in_ten = float(np.quantile(lengths[-1].tokens, 0.9))
        longest = steps.longest.mean()
        busy = steps.generating.mean() if rollouts.is_measured else base + pace * steps.mean.mean()
        row = {
            "base": base,
            "pace": pace,
            "polling": (steps.seconds - phase - done).mean() if rollouts.polls else 0.0,
            "waiting": pace * max(longest - nine_in_ten, 0.0),
            "unexplained": excess.mean(),
            "idle": min(max(1 - busy / steps.seconds.mean(), 0.0), 1.0),
            "over": np.maximum(excess - RewardTimeoutFlags().minimum, 0.0).mean(),
        }
        prompts = rollouts.responses // group
        if prompts and rollouts.on_policy:
            tokens, stock, trained = in_rounds(lengths[-1], TailRun(prompts, group), draw)
            row |= {"tail": max(pace * longest * (1 - tokens / stock), 0.0), "trained": trained}
        rows.append(row)
    return Estimate(rollouts, lengths, phase, **{name: Range.of([row[name] for row in rows]) for name in rows[0]})
