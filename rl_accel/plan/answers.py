"""Simulated seconds of the rollouts and steps of a run with each feature, and with alternatives that users may consider instead."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import fmean
from typing import Any

from rl_accel.features import RewardTimeoutFlags, TailBatchingFlags
from rl_accel.plan.setup import Setup
from rl_accel.reward.adaptive_timeout import PROGRAM_BUDGET, AdaptiveTimeout
from rl_accel.rollout.simulation import Round, play_rounds
from rl_accel.rollout.tail_batching import TailRun
from rl_accel.telemetry.aggregates import SMALLEST_GAIN, Range

CANCEL_SECONDS = 0.0007
"""Measured seconds that one CPU core needs to cancel a response at the end of a rollout."""
PLAIN = TailBatchingFlags(prompt_ratio=1.0, response_ratio=1.0)
"""Flags with which tail batching launches and waits for the same responses as a run without tail batching."""
RATIOS = ((1.25, 1.25), (1.25, 1.0), (1.5, 1.25), (1.5, 1.5), (2.0, 1.25))
"""Pairs of the flags ``prompt_ratio`` and ``response_ratio`` of tail batching to try. Chosen by hand around the default."""


@dataclass(frozen=True)
class Prediction:
    """Predicted times, waste and memory of a run, from simulated steps.

    Attributes:
        rollout_seconds, step_seconds: mean seconds of a rollout, and of a whole training step.
        wasted: share of the generated tokens that belong to cancelled responses.
        peak_tokens: maximum number of tokens in the key-value cache of any replica.
    """

    rollout_seconds: float
    step_seconds: float
    wasted: float
    peak_tokens: float


@dataclass(frozen=True)
class Option:
    """A change of the run whose effect is predicted, such as turning on a feature.

    Attributes:
        how: text to add to the run's command to make the change; "" if no setting makes it.
        setup: description of the changed run.
        flags: flags of tail batching; :data:`PLAIN` without tail batching.
        timeout: True if rewards have adaptive time limits (feature reward_timeout).
        skip_zero: True if responses of advantage 0 are left out of the actor update (feature skip_zero).
        ours: True for a feature of rl-accel, False for a change that needs no rl-accel.
        cost: disadvantages of the change, as text for the output.
    """

    name: str
    how: str
    setup: Setup
    flags: TailBatchingFlags = field(default_factory=lambda: PLAIN)
    timeout: bool = False
    skip_zero: bool = False
    ours: bool = True
    cost: str = ""

    def simulate(self, rounds: int, seed: int) -> Prediction:
        """Returns the prediction for the run with this change, from ``rounds`` simulated rollouts."""
        setup = self.setup.skipping_zero(seed) if self.skip_zero else self.setup
        return outcome_of(setup, rounds_of(setup, self.flags, rounds, seed, self.timeout))


@dataclass(frozen=True)
class Answer:
    """Predicted effect of an option (a change of the run).

    Attributes:
        outcome: prediction for the changed run, as the mean over all random draws.
        ratio: step seconds of the unchanged run, divided by those of the changed run.
        low, high: bounds of the 95% interval of ``ratio``.
        more_memory: relative increase of ``peak_tokens``, the maximum number of tokens in a key-value cache.
    """

    option: Option
    outcome: Prediction
    ratio: float
    low: float
    high: float
    more_memory: float

    @property
    def is_nothing(self) -> bool:
        """True if the option makes a step faster by less than :data:`SMALLEST_GAIN`, or not significantly."""
        return self.ratio < 1 + SMALLEST_GAIN or self.low <= 1.0


def rounds_of(
    setup: Setup, flags: TailBatchingFlags, rounds: int, seed: int, timeout: bool = False, ends: bool = False
) -> list[Round]:
    """Simulates ``rounds`` consecutive rollouts of the run ``setup``. ``flags`` are those of tail batching.

    Args:
        timeout: True if rewards have adaptive time limits.
        ends: True if training ends with these rollouts. The last rollout then runs all remaining prompts, and prompts keep the
            order of the data. If False, training goes on, and ``seed`` also shuffles the prompts.
    """
    run = TailRun(setup.prompts, setup.responses, flags)
    limits = AdaptiveTimeout(RewardTimeoutFlags(maximum=PROGRAM_BUDGET)) if timeout else None
    workload = setup.workload.drawn(None if ends else seed)
    return play_rounds(run, setup.engine, setup.replicas, workload, rounds, seed, limits, ends)


def steady(rounds: Sequence[Round], prompts: int, value: Callable[[Round], float]) -> float:
    """Returns the mean per rollout of ``value``, a number computed from a round, for a run that goes on after ``rounds``.

    Tail batching defers prompts to a queue, and runs them later in long rounds of ``prompts`` prompts each. Long rounds that the
    queue still needs at the end count, too: each with the mean value of the simulated long rounds or, if there are none, with the
    largest value of all rounds.
    """
    values = [value(played) for played in rounds]
    long = [value(played) for played in rounds if played.metrics.kind == "long"]
    owed = rounds[-1].metrics.queue_length / prompts
    return (sum(values) + owed * fmean(long or [max(values)])) / (len(values) + owed)


def outcome_of(setup: Setup, rounds: Sequence[Round], ends: bool = False) -> Prediction:
    """Returns the prediction that follows from the simulated rollouts ``rounds``.

    ``ends`` is True if training ends with the last rollout. If False, deferred prompts count as in :func:`steady`.
    """

    def mean(value: Callable[[Round], float]) -> float:
        return fmean(map(value, rounds)) if ends else steady(rounds, setup.prompts, value)

    def noticed(played: Round) -> float:
        return setup.noticed(played.metrics.rollout_seconds + CANCEL_SECONDS * played.unfinished)

    generated, wasted = mean(lambda p: p.metrics.tokens_generated), mean(lambda p: p.metrics.tokens_wasted)
    usual = float(setup.workload.tokens.mean()) * setup.prompts * setup.responses
    rollout = mean(noticed)
    step = rollout + setup.training_seconds * (generated - wasted) / usual + setup.other_seconds
    return Prediction(rollout, step, wasted / generated, max(played.peak_tokens for played in rounds))


def options_of(setup: Setup) -> list[Option]:
    """Returns the changes of a run whose effect is predicted: features of rl-accel, then alternatives."""
    return [*_features(setup), *_alternatives(setup)]


def _features(setup: Setup) -> Iterator[Option]:
    def option(name: str, changed: Setup, *features: str, settings: Sequence[str] = (), **more: Any) -> Option:
        """Returns the option that turns on ``features`` with the flags ``settings``. ``changed`` describes the changed run."""
        if setup.is_slime:
            words = [f"rl-accel slime-config --enable {','.join(features)}", *(f"--set {flag}" for flag in settings)]
        else:
            words = [f"+rl_accel.{flag}" for flag in (*(f"{feature}.enable=True" for feature in features), *settings)]
        return Option(name, " ".join(words), changed, **more)

    tail, tails = "tail_batching", TailBatchingFlags()
    unpolled = replace(setup, poll_seconds=0.0)
    if setup.poll_seconds:
        yield option("sampler", unpolled, "sampler")
    shorter = "shorter responses of a prompt are preferred"
    for prompts, responses in RATIOS:
        settings = (f"{tail}.prompt_ratio={prompts}", f"{tail}.response_ratio={responses}")
        flags, cost = TailBatchingFlags(prompt_ratio=prompts, response_ratio=responses), shorter * (responses > 1)
        yield option(f"{tail} {prompts:g} / {responses:g}", unpolled, tail, settings=settings, flags=flags, cost=cost)
    if setup.workload.rewards.max(initial=0.0) > RewardTimeoutFlags().minimum:
        timeout: dict[str, Any] = {"timeout": True, "cost": "rewards of slow answers"}
        yield option("reward_timeout", setup, "reward_timeout", **timeout)
        yield option(f"{tail} + reward_timeout", unpolled, tail, "reward_timeout", flags=tails, **timeout)
    if setup.zero_shares:
        zero = f"advantage 0 for {setup.zero_shares[0]:.0%} of the text, if rewards are compared in groups"
        yield option("skip_zero", setup, "skip_zero", skip_zero=True, cost=zero)
        if setup.poll_seconds:
            yield option("skip_zero + sampler", unpolled, "sampler", "skip_zero", skip_zero=True, cost=zero)
        both: dict[str, Any] = {"flags": tails, "skip_zero": True, "cost": f"{shorter}; {zero}"}
        yield option(f"skip_zero + {tail}", unpolled, tail, "skip_zero", **both)


def _alternatives(setup: Setup) -> Iterator[Option]:
    """Yields changes of the run that need no rl-accel: more replicas, other numbers of slots, half the maximum response length."""
    more = replace(setup, replicas=2 * setup.replicas)
    yield Option("twice the replicas", "", more, ours=False, cost="GPUs")
    slots, waiting = setup.engine.slots, setup.engine.slots < setup.requests_each
    fewer = [max(min(slots, setup.requests_each) // 2, 1)] * (waiting or setup.engine.cache_tokens < math.inf)
    for count in fewer + [2 * slots] * waiting:
        how = f"{'--sglang-max-running-requests ' if setup.is_slime else 'actor_rollout_ref.rollout.max_num_seqs='}{count}"
        engine = replace(setup.engine, slots=count)
        yield Option(f"{count:,} slots a replica", how, replace(setup, engine=engine), ours=False)
    half = max(setup.workload.limit // 2, 1)
    cut = f"{(setup.workload.tokens > half).mean():.1%} of the responses cut short"
    limited = replace(setup, workload=setup.workload.limited(half))
    how = f"{'--rollout-max-response-len ' if setup.is_slime else 'data.max_response_length='}{half}"
    yield Option(f"limit of {half:,} tokens", how, limited, ours=False, cost=cut)


def answer(
    setup: Setup, options: Sequence[Option], draws: int, rounds: int, note: Callable[[], None] = lambda: None
) -> list[Answer]:
    """Predicts the effect of each option (a change of the run). Simulates ``rounds`` rollouts for each of ``draws`` random seeds.

    Returns the answer for the unchanged run, then one per option. ``note`` is called after each simulation, to show progress.
    """
    answers: list[Answer] = []
    base: list[Prediction] = []
    for option in [Option("as it is", "", setup, ours=False), *options]:
        predictions = []
        for draw in range(draws):
            predictions.append(option.simulate(rounds, draw))  # the same seed for each option
            note()
        base = base or predictions
        mean, plain = mean_of(predictions), mean_of(base)
        ratios = [stock.step_seconds / ours.step_seconds for stock, ours in zip(base, predictions, strict=True)]
        ratio = Range.of(ratios, plain.step_seconds / mean.step_seconds)
        memory = mean.peak_tokens / plain.peak_tokens - 1
        answers.append(Answer(option, mean, ratio.mean, ratio.low, ratio.high, memory))
    return answers


def mean_of(outcomes: Sequence[Prediction]) -> Prediction:
    """Returns a prediction in which every field is the mean over ``outcomes``."""
    return Prediction(*(fmean(getattr(outcome, part.name) for outcome in outcomes) for part in fields(Prediction)))


def best_of(answers: Sequence[Answer]) -> Answer | None:
    """Returns the answer for the best feature of rl-accel; None if no feature gains anything.

    If several gain about as much (within :data:`SMALLEST_GAIN`), returns the first, which is the simplest.
    """
    features = [answer for answer in answers if answer.option.ours and not answer.is_nothing]
    most = max((answer.ratio for answer in features), default=0.0)
    return next((answer for answer in features if answer.ratio > most * (1 - SMALLEST_GAIN)), None)
