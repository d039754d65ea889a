"""Simulated seconds of the rollouts and steps of a run with each feature."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import fmean

import numpy as np

from rl_accel.features import TailBatchingFlags
from rl_accel.plan.setup import Setup
from rl_accel.rollout.simulation import Round, play_rounds
from rl_accel.rollout.tail_batching import TailRun
from rl_accel.rollout.workload import Floats

SMALLEST_GAIN = 0.02
"""Smallest saving that is reported, as a share of a step's duration."""
CANCEL_SECONDS = 0.0007
"""Measured seconds that one CPU core needs to cancel a response at the end of a rollout."""
PLAIN = TailBatchingFlags(prompt_ratio=1.0, response_ratio=1.0)
"""Flags with which tail batching launches and waits for the same responses as a run without tail batching."""
RATIOS = ((1.25, 1.25), (1.25, 1.0), (1.5, 1.25), (1.5, 1.5), (2.0, 1.25))
"""Pairs of the flags ``prompt_ratio`` and ``response_ratio`` of tail batching to try; the first is the default."""
TAIL = "tail_batching"


@dataclass(frozen=True)
class Range:
    """An estimate (``mean``) with its 95% interval (``low`` to ``high``)."""

    mean: float
    low: float
    high: float

    @classmethod
    def around(cls, draws: Floats, mean: float) -> "Range":
        """Returns the estimate ``mean`` with a 95% prediction interval, from the standard deviation of a few ``draws`` (t
        distribution; one draw has no interval).
        """
        from scipy.special import stdtrit

        count = len(draws)
        spread = (
            float(np.std(draws, ddof=1) * math.sqrt(1 + 1 / count) * stdtrit(count - 1, 0.975)) if count > 1 else 0.0
        )
        return cls(mean, mean - spread, mean + spread)


@dataclass(frozen=True)
class Prediction:
    """Predicted times and waste of a run, from simulated steps.

    Attributes:
        rollout_seconds, step_seconds: mean seconds of a rollout, and of a whole training step.
        wasted: share of the generated tokens that belong to cancelled responses.
    """

    rollout_seconds: float
    step_seconds: float
    wasted: float


@dataclass(frozen=True)
class Option:
    """A change of the run whose effect is predicted, such as turning on a feature.

    Attributes:
        how: text to add to the run's command to make the change; "" for the run as it is.
        setup: description of the changed run.
        flags: flags of tail batching; :data:`PLAIN` without tail batching.
        cost: disadvantages of the change, as text for the output.
    """

    name: str
    how: str
    setup: Setup
    flags: TailBatchingFlags = field(default_factory=lambda: PLAIN)
    cost: str = ""

    def simulate(self, rounds: int, seed: int) -> Prediction:
        """Returns the prediction for the run with this change, from ``rounds`` simulated rollouts."""
        return outcome_of(self.setup, rounds_of(self.setup, self.flags, rounds, seed))


@dataclass(frozen=True)
class Answer:
    """Predicted effect of an option (a change of the run).

    Attributes:
        outcome: prediction for the changed run, as the mean over all random draws.
        ratio: step seconds of the unchanged run, divided by those of the changed run.
        saved: step seconds of the unchanged run, less those of the changed run.
    """

    option: Option
    outcome: Prediction
    ratio: Range
    saved: Range

    @property
    def is_nothing(self) -> bool:
        """True if the option makes a step faster by less than :data:`SMALLEST_GAIN`, or not significantly."""
        return self.ratio.mean < 1 + SMALLEST_GAIN or self.ratio.low <= 1.0


def rounds_of(setup: Setup, flags: TailBatchingFlags, rounds: int, seed: int) -> list[Round]:
    """Simulates ``rounds`` consecutive rollouts of the run ``setup``. ``flags`` are those of tail batching.

    ``seed`` also shuffles the prompts.
    """
    return play_rounds(
        TailRun(setup.prompts, setup.responses, flags),
        setup.engine,
        setup.replicas,
        setup.workload.drawn(seed),
        rounds,
        seed=seed,
    )


def steady(rounds: Sequence[Round], prompts: int, value: Callable[[Round], float]) -> float:
    """Returns the mean per rollout of ``value``, a number computed from a round, for a run that goes on after ``rounds``.

    Tail batching defers prompts to a queue, and runs them later in long rounds of ``prompts`` prompts each. Long rounds that the
    queue still needs at the end count, too: each with the mean value of the simulated long rounds or, if there are none, with the
    largest value of all rounds.
    """
    values = [value(played) for played in rounds]
    long_values = [value(played) for played in rounds if played.metrics.kind == "long"]
    rounds_to_come = rounds[-1].metrics.queue_length / prompts
    value_to_come = fmean(long_values) if long_values else max(values)
    return (sum(values) + rounds_to_come * value_to_come) / (len(values) + rounds_to_come)


def outcome_of(setup: Setup, rounds: Sequence[Round]) -> Prediction:
    """Returns the prediction that follows from the simulated rollouts ``rounds``. Deferred prompts count as in :func:`steady`."""

    def mean(value: Callable[[Round], float]) -> float:
        return steady(rounds, setup.prompts, value)

    def noticed(played: Round) -> float:
        return setup.noticed(played.metrics.rollout_seconds + CANCEL_SECONDS * played.unfinished)

    generated = mean(lambda played: played.metrics.tokens_generated)
    wasted = mean(lambda played: played.metrics.tokens_wasted)
    tokens_of_batch = float(setup.workload.tokens.mean()) * setup.prompts * setup.responses
    rollout = mean(noticed)
    training = setup.training_seconds * (generated - wasted) / tokens_of_batch
    return Prediction(
        rollout_seconds=rollout,
        step_seconds=rollout + training + setup.other_seconds,
        wasted=wasted / generated,
    )


def tail_option(setup: Setup, prompt_ratio: float, response_ratio: float) -> Option:
    """Returns the option that turns tail batching on with the two ratios."""
    settings = (f"{TAIL}.prompt_ratio={prompt_ratio}", f"{TAIL}.response_ratio={response_ratio}")
    return Option(
        name=f"{TAIL} {prompt_ratio:g} / {response_ratio:g}",
        how=words_for(setup, TAIL, settings),
        setup=replace(setup, poll_seconds=0.0),
        flags=TailBatchingFlags(prompt_ratio=prompt_ratio, response_ratio=response_ratio),
        cost="shorter responses of a prompt are preferred" if response_ratio > 1 else "",
    )


def words_for(setup: Setup, feature: str, settings: Sequence[str] = ()) -> str:
    """Returns the words that turn on ``feature`` with ``settings``, such as "tail_batching.prompt_ratio=1.5"."""
    if setup.is_slime:
        return " ".join([f"rl-accel slime-config --enable {feature}", *(f"--set {flag}" for flag in settings)])
    return " ".join(f"+rl_accel.{flag}" for flag in (f"{feature}.enable=True", *settings))


def options_of(setup: Setup) -> Iterator[Option]:
    """Yields the features of rl-accel whose effect is predicted."""
    if setup.poll_seconds:
        yield Option("sampler", words_for(setup, "sampler"), replace(setup, poll_seconds=0.0))
    for prompt_ratio, response_ratio in RATIOS:
        yield tail_option(setup, prompt_ratio, response_ratio)


def answer(
    setup: Setup, options: Iterable[Option], draws: int, rounds: int, note: Callable[[], None] = lambda: None
) -> list[Answer]:
    """Predicts the effect of each option (a change of the run). Simulates ``rounds`` rollouts for each of ``draws`` random seeds.

    Returns the answer for the unchanged run, then one per option. ``note`` is called after each simulation, to show progress.
    """
    answers: list[Answer] = []
    unchanged: list[Prediction] = []
    for option in [Option("as it is", "", setup), *options]:
        predictions = []
        for draw in range(draws):
            predictions.append(option.simulate(rounds, draw))  # the same seed for each option
            note()
        unchanged = unchanged or predictions
        mean = mean_of(predictions)
        stock = mean_of(unchanged)
        before = np.array([prediction.step_seconds for prediction in unchanged])
        after = np.array([prediction.step_seconds for prediction in predictions])
        answers.append(
            Answer(
                option=option,
                outcome=mean,
                ratio=Range.around(before / after, stock.step_seconds / mean.step_seconds),
                saved=Range.around(before - after, stock.step_seconds - mean.step_seconds),
            )
        )
    return answers


def mean_of(outcomes: Sequence[Prediction]) -> Prediction:
    """Returns a prediction in which every field is the mean over ``outcomes``."""
    return Prediction(*(fmean(getattr(outcome, part.name) for outcome in outcomes) for part in fields(Prediction)))


def best_of(answers: Sequence[Answer]) -> Answer | None:
    """Returns the answer for the best feature of rl-accel; None if no feature gains anything.

    If several gain about as much (within :data:`SMALLEST_GAIN`), returns the first, which is the simplest.
    """
    features = [answer for answer in answers if not answer.is_nothing]
    largest = max((answer.ratio.mean for answer in features), default=0.0)
    return next((answer for answer in features if answer.ratio.mean > largest * (1 - SMALLEST_GAIN)), None)
