"""What each feature, and what else users weigh, would do to a run: rounds of the simulation with and without it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any

import numpy as np

from rl_accel.features import RewardTimeoutFlags, TailBatchingFlags
from rl_accel.plan.setup import Setup
from rl_accel.reward.adaptive_timeout import AdaptiveTimeout
from rl_accel.rollout.simulation import Cluster, Engine, Round, collecting_seldom, play_rounds
from rl_accel.rollout.tail_batching import TailRun

CANCEL_SECONDS = 0.0007
"""Of a core, to cancel a response at the end of a round (docs/benchmarks, tail batching)."""
EVENTS_PER_SECOND = 13_819
"""That the trainer process takes in, of a core (the same page, 512 x 16)."""
NOTHING = 0.02
"""A gain below this share of a step is called nothing."""
PLAIN = TailBatchingFlags(prompt_ratio=1.0, response_ratio=1.0)
RATIOS = ((1.25, 1.25), (1.25, 1.0), (1.5, 1.25), (1.5, 1.5), (2.0, 1.25))
"""Of prompts and of responses, that are tried."""


@dataclass(frozen=True)
class Outcome:
    """Means over the steps of one draw. ``peak_tokens``: most in the cache of a replica. ``staleness``: steps between the weights
    that began a response and those that it trains.
    """

    rollout_seconds: float
    step_seconds: float
    wasted: float = 0.0
    peak_tokens: float = 0.0
    staleness: float = 0.0


Price = Callable[[Setup, int, int], Outcome]
"""Plays so many rounds of a setup, with a seed."""


@dataclass(frozen=True)
class Option:
    """Something to choose: ``how`` says what to set, ``cost`` what else it changes, ``ours`` whether the pack has it."""

    name: str
    how: str
    price: Price
    ours: bool = True
    cost: str = ""


@dataclass(frozen=True)
class Answer:
    """An option with its mean outcome, and how many times less than stock a step takes, with a 95% interval over draws."""

    option: Option
    outcome: Outcome
    ratio: float
    low: float
    high: float
    more_memory: float

    @property
    def is_nothing(self) -> bool:
        """Whether no gain can be told."""
        return self.ratio < 1 + NOTHING or self.low <= 1.0


def rounds_of(
    setup: Setup, flags: TailBatchingFlags, rounds: int, seed: int, timeout: bool = False, ends: bool = False
) -> list[Round]:
    """Play rounds of ``setup`` with these flags of tail batching; see :func:`~rl_accel.rollout.simulation.play_rounds`."""
    limits = AdaptiveTimeout(RewardTimeoutFlags()) if timeout else None
    run = TailRun(setup.prompts, setup.responses, flags)
    return play_rounds(run, setup.engine, setup.replicas, setup.workload.drawn(), rounds, seed, limits, ends)


def steady(rounds: Sequence[Round], prompts: int, value: Callable[[Round], float]) -> float:
    """Return the mean of ``value``, with the long rounds in which prompts that still wait will be trained."""
    values = [value(played) for played in rounds]
    long = [value(played) for played in rounds if played.metrics.kind == "long"]
    owed = rounds[-1].metrics.queue_length / prompts
    return (sum(values) + owed * fmean(long or [max(values)])) / (len(values) + owed)


def outcome_of(setup: Setup, rounds: Sequence[Round], poll_seconds: float | None = None, ends: bool = False) -> Outcome:
    """Return what rounds make of a step. ``ends``: they are a whole run, in which nothing is left to train."""

    def mean(value: Callable[[Round], float]) -> float:
        return fmean(map(value, rounds)) if ends else steady(rounds, setup.prompts, value)

    def noticed(played: Round) -> float:
        return setup.noticed(played.metrics.rollout_seconds + CANCEL_SECONDS * played.unfinished, poll_seconds)

    generated, wasted = mean(lambda p: p.metrics.tokens_generated), mean(lambda p: p.metrics.tokens_wasted)
    usual = float(setup.workload.tokens.mean()) * setup.prompts * setup.responses
    rollout = mean(noticed)
    step = rollout + setup.training_seconds * (generated - wasted) / usual + setup.other_seconds
    return Outcome(rollout, step, wasted / generated, max(played.peak_tokens for played in rounds))


def simulated(
    flags: TailBatchingFlags = PLAIN,
    poll_seconds: float | None = None,
    timeout: bool = False,
    **changes: Callable[[Setup], Any],
) -> Price:
    """Rounds with these flags, with other values for some fields of the setup; by default the run as it is."""

    def price(setup: Setup, rounds: int, seed: int) -> Outcome:
        other = replace(setup, **{name: change(setup) for name, change in changes.items()})
        return outcome_of(other, rounds_of(other, flags, rounds, seed, timeout), poll_seconds)

    return price


stock = simulated()


def with_drafts(engine: Engine, tokens_a_step: float, limit: int = 32) -> Engine:
    """Return an engine that accepts so many tokens a step with at most ``limit`` running requests, as ``drafts`` does."""
    knots = sorted({*engine.step_seconds, 1, limit, limit + 1, limit + 2})
    pace = zip(knots, engine.seconds(knots).tolist(), strict=True)
    return replace(engine, step_seconds={k: s / (tokens_a_step if k <= limit else 1.0) for k, s in pace})


def hidden_seconds(setup: Setup, played: Round) -> float:
    """Return how many seconds of training a rollout hides if half of the devices train what is complete, from half of the responses
    on, while the others finish (RollPacker's stream trainer, RLHFuse). Gradients are applied afterwards.
    """
    trainable = setup.training_seconds * (1 - 1 / (setup.prompts * setup.responses))  # all but the last response
    return min((played.ends[-1] - played.ends[len(played.ends) // 2]) / 2, trainable)


def overlapped(setup: Setup, rounds: int, seed: int) -> Outcome:
    """Training overlapped with the tail."""
    played = rounds_of(setup, PLAIN, rounds, seed)
    plain = outcome_of(setup, played)
    return replace(plain, step_seconds=plain.step_seconds - fmean(hidden_seconds(setup, p) for p in played))


class _Prompts:
    """Prompts whose responses may outlive a training step."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self._setup, self._rng, self._workload = setup, np.random.default_rng(seed), setup.workload.drawn()
        self.begun = 0
        self.born: dict[int, int] = {}  # the version of the weights that began each
        self.length: dict[int, int] = {}  # of responses that have not ended
        self._missing: dict[int, int] = {}

    def begin(self, count: int, version: int) -> list[int]:
        """Begin so many prompts; return the ids of their responses."""
        each, new = self._setup.responses, range(self.begun, self.begun + max(count, 0))
        self.begun = new.stop
        self.born.update(dict.fromkeys(new, version))
        self._missing.update(dict.fromkeys(new, each))
        lengths = self._workload.lengths(new, each, self._rng).ravel().tolist() if new else []
        ids = range(new.start * each, new.stop * each)
        self.length.update(zip(ids, lengths, strict=True))
        return list(ids)

    def end(self, response_id: int) -> list[int]:
        """A response has ended; return its prompt if that is complete."""
        prompt = response_id // self._setup.responses
        del self.length[response_id]
        self._missing[prompt] -= 1
        return [] if self._missing[prompt] else [prompt]


def partial(more: float, budget: int = 2**40) -> Price:
    """Partial rollout (APRIL, Kimi K1.5): ``more`` times P0 prompts are under way, a rollout ends with the first P0 that are
    complete, and all else goes on in the next one with the tokens it has. A response has at most ``budget`` tokens at a time.
    """

    def price(setup: Setup, rounds: int, seed: int) -> Outcome:
        cluster, prompts = Cluster(setup.engine, setup.replicas, setup.workload.prompt_tokens), _Prompts(setup, seed)
        had: dict[int, float] = {}
        complete: list[int] = []
        seconds, staleness = [], []
        warmup = max(rounds // 4, 1)
        for version in range(rounds + warmup):
            under_way = len({response_id // setup.responses for response_id in prompts.length})
            prompts.begin(math.ceil(more * setup.prompts) - under_way - len(complete), version)
            began = cluster.now
            while len(complete) < setup.prompts:
                if not len(cluster):  # all of them, at first; then those whose budget was used up
                    ids = list(prompts.length)
                    tokens = [had.get(i, 0.0) for i in ids]
                    until = [min(prompts.length[i], int(t) + budget) for i, t in zip(ids, tokens, strict=True)]
                    cluster.launch(ids, until, tokens)
                ended = cluster.happen()
                if ended is not None and ended.length < prompts.length[ended.id]:
                    had[ended.id] = ended.length
                elif ended is not None:
                    complete += prompts.end(ended.id)
            running = [i for i in prompts.length if i in cluster]
            had.update(zip(running, cluster.cancel(running), strict=True))
            seconds.append(setup.noticed(cluster.now - began))
            staleness.append(fmean(version - prompts.born[prompt] for prompt in complete[: setup.prompts]))
            complete = complete[setup.prompts :]
        rollout, peak = fmean(seconds[warmup:]), cluster.take_peak_tokens()
        return Outcome(rollout, rollout + sum(setup.stages.values()), 0.0, peak, fmean(staleness[warmup:]))

    return price


def asynchronous(eta: int, share: float = 0.5) -> Price:
    """Asynchronous training on devices of its own, with ``share`` of all for rollouts (AReaL): at most (eta + version + 1) x P0
    prompts are ever begun, and a step trains the first P0 that are complete.
    """

    def price(setup: Setup, rounds: int, seed: int) -> Outcome:
        replicas = max(round(setup.replicas * share), 1)
        cluster, prompts = Cluster(setup.engine, replicas, setup.workload.prompt_tokens), _Prompts(setup, seed)
        training = setup.training_seconds / (1 - share) + setup.other_seconds
        complete: list[int] = []
        trained: list[float] = []
        staleness = []
        warmup = max(rounds // 4, 2) + eta
        ready = math.inf
        while len(trained) < rounds + warmup:
            ids = prompts.begin((eta + len(trained) + 1) * setup.prompts - prompts.begun, len(trained))
            if ids:
                cluster.launch(ids, [prompts.length[i] for i in ids])
            if ready == math.inf and len(complete) >= setup.prompts:
                staleness.append(fmean(len(trained) - prompts.born[prompt] for prompt in complete[: setup.prompts]))
                complete, ready = complete[setup.prompts :], cluster.now + training
            if ready <= cluster.next_event():
                cluster.now, ready = ready, math.inf
                trained.append(cluster.now)
            elif (ended := cluster.happen()) is not None:
                complete += prompts.end(ended.id)
        seconds = (trained[-1] - trained[warmup - 1]) / rounds
        return Outcome(seconds, seconds, 0.0, cluster.take_peak_tokens(), fmean(staleness[warmup:]))

    return price


def options_of(setup: Setup, tokens_a_step: float | None = None) -> list[Option]:
    """Return what is priced for a setup: features first, then what else there is."""
    tails, limits = "+rl_accel.tail_batching", "+rl_accel.reward_timeout.enable=True"
    options = []
    if setup.poll_seconds:
        options.append(Option("sampler", "+rl_accel.sampler.enable=True", simulated(poll_seconds=0.0)))
    for ratios in RATIOS:
        named = zip(("prompt", "response"), ratios, strict=True)
        how = [f"{tails}.enable=True", *(f"{tails}.{name}_ratio={ratio:g}" for name, ratio in named if ratio != 1.25)]
        price = simulated(TailBatchingFlags(prompt_ratio=ratios[0], response_ratio=ratios[1]), 0.0)
        cost = "shorter responses of a prompt are preferred" if ratios[1] > 1 else ""
        options.append(Option("tail_batching {:g} / {:g}".format(*ratios), " ".join(how), price, cost=cost))
    auto = simulated(TailBatchingFlags(prompt_ratio="auto"), 0.0)
    options.append(
        Option("tail_batching auto", f"{tails}.enable=True {tails}.prompt_ratio=auto", auto, cost=options[-1].cost)
    )
    if setup.workload.rewards.max(initial=0.0) > RewardTimeoutFlags().minimum:
        cost = "rewards of slow answers"
        options.append(Option("reward_timeout", limits, simulated(timeout=True), cost=cost))
        both = simulated(TailBatchingFlags(), 0.0, timeout=True)
        options.append(Option("tail_batching + reward_timeout", f"{tails}.enable=True {limits}", both, cost=cost))
    if tokens_a_step:
        accepted: float = tokens_a_step
        price = simulated(engine=lambda s: with_drafts(s.engine, accepted))
        options.append(Option("drafts", "+rl_accel.drafts.enable=True", price))
    half, budget = setup.workload.limit // 2, max(setup.workload.limit // 4, 1)
    cut = f"{(setup.workload.tokens > half).mean():.1%} of the responses cut short"
    shorter = simulated(workload=lambda s: s.workload.limited(half))
    slime = "slime: --partial-rollout --over-sampling-batch-size"
    options += [
        Option("twice the replicas", "", simulated(replicas=lambda s: 2 * s.replicas), False, "GPUs"),
        Option(f"limit of {half:,} tokens", f"data.max_response_length={half}", shorter, False, cut),
        Option("training overlapped with the tail", "RollPacker, RLHFuse; in neither framework", overlapped, False),
        Option("partial rollout, 1.5 times the prompts", slime, partial(1.5), False, "tokens of old weights"),
        Option(f"partial rollout, {budget:,} tokens at a time", "Kimi K1.5", partial(1.5, budget), False, "the same"),
    ]
    if setup.replicas > 1 and setup.training_seconds:
        modes = "verl: trainer_mode=separate_async, slime: train_async.py; half of the devices each"
        for eta in (1, 4):
            name = f"asynchronous, staleness at most {eta}"
            options.append(Option(name, modes, asynchronous(eta), False, "tokens of old weights"))
    return options


def answer(
    setup: Setup, options: Sequence[Option], draws: int, rounds: int, note: Callable[[], None] = lambda: None
) -> tuple[Outcome, list[Answer]]:
    """Price options over ``draws`` draws of ``rounds`` rounds each; return the stock outcome and the answers in the same order.

    Draw n of an option is compared with draw n of stock. ``note`` is called after each.
    """

    def priced(price: Price) -> list[Outcome]:
        found = []
        for draw in range(draws):
            found.append(price(setup, rounds, draw))
            note()
        return found

    with collecting_seldom():
        base = priced(stock)
        mean = mean_of(base)
        answers = []
        for option in options:
            found = priced(option.price)
            ours = mean_of(found)
            ratios = [b.step_seconds / f.step_seconds for b, f in zip(base, found, strict=True)]
            low, high = np.quantile(ratios, [0.025, 0.975]).tolist()
            memory = ours.peak_tokens / mean.peak_tokens - 1
            answers.append(Answer(option, ours, mean.step_seconds / ours.step_seconds, low, high, memory))
    return mean, answers


def mean_of(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the mean of each number."""
    return Outcome(*(fmean(getattr(outcome, field.name) for outcome in outcomes) for field in fields(Outcome)))


def best_of(answers: Sequence[Answer]) -> Answer | None:
    """Return what of the pack gains most; None if the answer is nothing."""
    ours = [found for found in answers if found.option.ours and not found.is_nothing]
    return max(ours, key=lambda found: found.ratio, default=None)


def scale(setup: Setup, gpus: int, replica_gpus: int, rounds: int = 2) -> dict[str, float]:
    """Return how a step looks on so many GPUs, with as many prompts for each as ``setup`` has.

    Seconds: ``rollout`` and ``tail`` (from nine in ten responses to the last) of stock, ``tail_batching``, ``end`` (to cancel what
    runs at the end of its rounds) and ``trainer`` (of a processor, to take in its events); ``own_share`` is that of the last two.
    """
    replicas = max(gpus // replica_gpus, 1)
    at = replace(setup, replicas=replicas, prompts=max(round(setup.prompts * replicas / setup.replicas), 1))
    plain = rounds_of(at, PLAIN, rounds, 0)
    tails = rounds_of(at, TailBatchingFlags(), 5 * rounds, 0)
    launched = math.ceil(1.25 * at.prompts) * math.ceil(1.25 * at.responses)
    end, trainer = CANCEL_SECONDS * fmean(p.unfinished for p in tails), 2 * launched / EVENTS_PER_SECOND
    seconds = steady(tails, at.prompts, lambda p: p.metrics.rollout_seconds)
    return {
        "gpus": gpus,
        "prompts": at.prompts,
        "rollout": fmean(p.metrics.rollout_seconds for p in plain),
        "tail": fmean(p.ends[-1] - p.ends[int(0.9 * len(p.ends))] for p in plain),
        "tail_batching": seconds,
        "end": end,
        "trainer": trainer,
        "own_share": (end + trainer) / (seconds + end),
    }
