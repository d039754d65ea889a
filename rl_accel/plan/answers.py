"""Simulated seconds of the rollouts and steps of a run with each feature, and with alternatives that users may consider instead."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from types import MappingProxyType
from typing import Any

import numpy as np

from rl_accel.features import RewardTimeoutFlags, TailBatchingFlags, TpReplanFlags
from rl_accel.parallel.model_memory import TpBounds
from rl_accel.parallel.tp_planner import Observation, TpPlanner
from rl_accel.plan.balanced import BalancedCluster
from rl_accel.plan.setup import Setup
from rl_accel.reward.adaptive_timeout import PROGRAM_BUDGET, AdaptiveTimeout
from rl_accel.rollout.simulation import MANY, EngineModel, Player, Round, collecting_seldom, play_rounds
from rl_accel.rollout.tail_batching import TailRun

CANCEL_SECONDS = 0.0007
"""CPU seconds on one core to cancel a response at the end of a rollout (docs/benchmarks, tail batching)."""
EVENTS_PER_SECOND = 13_819
"""Number of response events per second that the trainer process handles on one core (docs/benchmarks, tail batching, 512 prompts
of 16 responses)."""
NOTHING = 0.02
"""Relative gain in step seconds below which an option is reported to gain nothing."""
NODE = 8
"""Number of GPUs per node, which is the maximum number of GPUs of a replica."""
BALANCED_ROUNDS = 4
PLAIN = TailBatchingFlags(prompt_ratio=1.0, response_ratio=1.0)
RATIOS = ((1.25, 1.25), (1.25, 1.0), (1.5, 1.25), (1.5, 1.5), (2.0, 1.25))
"""Pairs of ``prompt_ratio`` and ``response_ratio`` of tail batching to try."""


@dataclass(frozen=True)
class Prediction:
    """Mean results over the simulated steps of one random draw.

    Attributes:
        rollout_seconds, step_seconds: mean seconds of a rollout, and of a whole training step.
        wasted: share of the generated tokens that belong to cancelled responses.
        peak_tokens: maximum number of tokens in the key-value cache of any replica.
        staleness: mean age of the weights that started a response when this response is trained, in training steps.
    """

    rollout_seconds: float
    step_seconds: float
    wasted: float = 0.0
    peak_tokens: float = 0.0
    staleness: float = 0.0


Evaluator = Callable[[Setup, int, int], Prediction]
"""Type of a function ``price(setup, rounds, seed)`` that simulates ``rounds`` rollouts of a run and returns the mean outcome."""


@dataclass(frozen=True)
class Option:
    """A change of the run to evaluate, such as a feature.

    Attributes:
        how: settings that make the change.
        price: function that simulates the changed run.
        ours: whether the change is part of rl-accel.
        cost: side effects of the change, in words.
    """

    name: str
    how: str
    price: Evaluator
    ours: bool = True
    cost: str = ""


@dataclass(frozen=True)
class Answer:
    """Simulated result of an option.

    Attributes:
        outcome: mean over all random draws.
        ratio: step seconds of the unchanged run, divided by step seconds with the option.
        low, high: bounds of the 95% interval of ``ratio`` over the draws.
        more_memory: relative increase of the peak number of tokens in a key-value cache.
    """

    option: Option
    outcome: Prediction
    ratio: float
    low: float
    high: float
    more_memory: float

    @property
    def is_nothing(self) -> bool:
        """True if the gain in step seconds is below :data:`NOTHING` or not significant."""
        return self.ratio < 1 + NOTHING or self.low <= 1.0


def rounds_of(
    setup: Setup, flags: TailBatchingFlags, rounds: int, seed: int, timeout: bool = False, ends: bool = False
) -> list[Round]:
    """Returns ``rounds`` simulated rollouts of the run ``setup`` with the flags ``flags`` of tail batching.

    With ``timeout``, rewards have adaptive time limits. With ``ends``, the rollouts are a whole training, whose last one is final,
    and prompts come in the order of the data. Otherwise training goes on, and ``seed`` shuffles the prompts.
    """
    run, limits = (
        TailRun(setup.prompts, setup.responses, flags),
        AdaptiveTimeout(RewardTimeoutFlags(maximum=PROGRAM_BUDGET)) if timeout else None,
    )
    workload = setup.workload.drawn(None if ends else seed)
    return play_rounds(run, setup.engine, setup.replicas, workload, rounds, seed, limits, ends, setup.cluster)


def steady(rounds: Sequence[Round], prompts: int, value: Callable[[Round], float]) -> float:
    """Returns the mean of ``value`` over the rounds (rollouts) of tail batching and the long rounds that would follow.

    Prompts that are still deferred after the last round would fill further long rounds. Each of these counts like the mean of the
    simulated long rounds or, if there are none, like the largest value. ``prompts``: number of prompts in a batch.
    """
    values = [value(played) for played in rounds]
    long = [value(played) for played in rounds if played.metrics.kind == "long"]
    owed = rounds[-1].metrics.queue_length / prompts
    return (sum(values) + owed * fmean(long or [max(values)])) / (len(values) + owed)


def outcome_of(
    setup: Setup, rounds: Sequence[Round], poll_seconds: float | None = None, ends: bool = False
) -> Prediction:
    """Returns the mean outcome of a step over the simulated ``rounds``.

    ``poll_seconds``: seconds between two checks whether the rollout is done; None: as in ``setup``. ``ends``: whether training
    ends with the last round. If not, the mean includes the long rounds that would follow (:func:`steady`).
    """

    def mean(value: Callable[[Round], float]) -> float:
        return fmean(map(value, rounds)) if ends else steady(rounds, setup.prompts, value)

    def noticed(played: Round) -> float:
        return setup.noticed(played.metrics.rollout_seconds + CANCEL_SECONDS * played.unfinished, poll_seconds)

    generated, wasted = mean(lambda p: p.metrics.tokens_generated), mean(lambda p: p.metrics.tokens_wasted)
    usual = float(setup.workload.tokens.mean()) * setup.prompts * setup.responses
    rollout = mean(noticed)
    step = rollout + setup.training_seconds * (generated - wasted) / usual + setup.other_seconds
    return Prediction(rollout, step, wasted / generated, max(played.peak_tokens for played in rounds))


def simulated(
    flags: TailBatchingFlags = PLAIN,
    poll_seconds: float | None = None,
    timeout: bool = False,
    **changes: Callable[[Setup], Any],
) -> Evaluator:
    """Returns a function that simulates a run with the flags ``flags`` of tail batching and with changed fields of the setup.

    ``changes`` maps the name of a field to a function that returns the new value from the old setup.
    """

    def price(setup: Setup, rounds: int, seed: int) -> Prediction:
        other = replace(setup, **{name: change(setup) for name, change in changes.items()})
        return outcome_of(other, rounds_of(other, flags, rounds, seed, timeout), poll_seconds)

    return price


def with_engine(change: Callable[[EngineModel], EngineModel], *how: Any) -> Evaluator:
    """Returns a function that simulates a run with the engine ``change(setup.engine)``. ``how``: arguments of :func:`simulated`."""
    return simulated(*how, engine=lambda setup: change(setup.engine))


AS_IT_IS = Option("as it is", "", simulated(), False)


def skipping_zero(price: Evaluator) -> Evaluator:
    """Returns a function that simulates a run as ``price`` does, but with responses of advantage 0 left out of the actor update.

    The feature skip_zero leaves these responses out.
    """
    return lambda setup, rounds, seed: price(setup.skipping_zero(seed), rounds, seed)


def with_drafts(engine: EngineModel, tokens_a_step: float, limit: int = 32) -> EngineModel:
    """Returns the engine model with speculative decoding (feature ``drafts``).

    With at most ``limit`` running requests, each request gets ``tokens_a_step`` tokens per decoding step instead of one token.
    """
    knots = sorted({*engine.step_seconds, 1, limit, limit + 1, limit + 2})
    pace = zip(knots, engine.seconds(knots).tolist(), strict=True)
    return replace(engine, step_seconds={k: s / (tokens_a_step if k <= limit else 1.0) for k, s in pace})


def balanced(setup: Setup, rounds: int, seed: int) -> Prediction:
    """Simulates rollouts whose requests are routed by :class:`~rl_accel.rollout.balance.Balance`.

    Only the first :data:`BALANCED_ROUNDS` rollouts are simulated, because the simulation of 512 prompts of 16 responses takes
    seconds. The mean gain of these rollouts is assumed for all rollouts.
    """
    few = min(rounds, BALANCED_ROUNDS)
    whole, plain = (AS_IT_IS.price(setup, count, seed) for count in (rounds, few))
    found = AS_IT_IS.price(replace(setup, cluster=BalancedCluster), few, seed)
    gain = plain.rollout_seconds - found.rollout_seconds
    seconds = whole.rollout_seconds - gain, whole.step_seconds - gain
    return Prediction(*seconds, peak_tokens=found.peak_tokens)


def replanned(setup: Setup, rounds: int, seed: int) -> Prediction:
    """Simulates rollouts with the tensor-parallel sizes that :class:`TpPlanner` chooses. Changes of the size take no time.

    The planner learns during ``rounds`` rollouts that are not counted. The outcome is the mean of the next ``rounds`` rollouts.
    """
    gpus = setup.replicas * setup.tp
    engines = {setup.tp: setup.engine, **setup.engines}
    bounds = TpBounds(TpReplanFlags(min_tp=min(engines), max_tp=max(engines)), gpus, NODE)
    run, workload = TailRun(setup.prompts, setup.responses, PLAIN), setup.workload.drawn(seed)
    planner, player, tp = TpPlanner(bounds), Player(run, setup.built(), workload, seed), setup.tp
    played = []
    for _ in range(2 * rounds):
        played.append(player.play())
        metrics, preemptions = played[-1].metrics, played[-1].preemptions
        seconds, tokens = metrics.rollout_seconds, metrics.tokens_generated
        seen = Observation(kind="all", tp=tp, preemptions=preemptions, rollout_seconds=seconds, tokens=tokens)
        decision = planner.step(seen)
        if decision and decision.tp in engines:
            tp = decision.tp
            player.cluster = replace(setup, engine=engines[tp], replicas=gpus // tp).built()
    return outcome_of(setup, played[rounds:])


def hidden_seconds(setup: Setup, played: Round) -> float:
    """Returns the seconds that a step saves if training overlaps with the rollout ``played`` (as in RollPacker and RLHFuse).

    When half of the responses are complete, half of the devices begin to train on these responses. The other devices finish the
    rollout. Gradients are applied afterwards.
    """
    trainable = setup.training_seconds * (1 - 1 / (setup.prompts * setup.responses))  # all but the last response
    return min((played.ends[-1] - played.ends[len(played.ends) // 2]) / 2, trainable)


def overlapped(setup: Setup, rounds: int, seed: int) -> Prediction:
    """Simulates steps in which training begins before the rollout ends, as :func:`hidden_seconds` describes."""
    played = rounds_of(setup, PLAIN, rounds, seed)
    plain = outcome_of(setup, played)
    return replace(plain, step_seconds=plain.step_seconds - fmean(hidden_seconds(setup, p) for p in played))


def carried_over(
    setup: Setup, rounds: int, seed: int, ahead: float, training: float = 0.0, budget: int = MANY
) -> Prediction:
    """Simulates rollouts in which unfinished responses continue with the new weights after a training step.

    A step trains the first P0 complete prompts, where P0 is the number of prompts in a batch. Generation continues meanwhile. After
    n training steps, at most (n + ``ahead``) x P0 prompts are started in total (AReaL's rule, with ``ahead`` = 1 + eta).

    Args:
        setup, rounds, seed: arguments of a :data:`Evaluator`.
        ahead: number of batches that may be in progress, at least 1.
        training: seconds of training from the completion of a batch to the next weight update. Other devices generate meanwhile.
        budget: maximum number of tokens that a response generates per launch. Unfinished responses are launched again after each
            weight update, and when no response is running.
    """
    rng, workload, cluster = np.random.default_rng(seed), setup.workload.drawn(seed), setup.built()
    lengths: dict[int, int] = {}  # final number of tokens of each unfinished response
    had: dict[int, float] = {}  # number of tokens before the last launch
    born: list[int] = []  # number of the weight version that started each prompt
    missing: list[int] = []
    complete: list[int] = []
    trained: list[float] = []
    staleness: list[float] = []
    ready = -1.0  # time of the next weight update; the first is immediate
    warmup = max(rounds // 4, 2) + math.ceil(ahead)

    def go_on(ids: Sequence[int]) -> None:
        until = [min(lengths[i], int(had[i]) + budget) for i in ids]
        cluster.launch(ids, until, [had[i] for i in ids], [i // setup.responses for i in ids])

    while len(trained) <= rounds + warmup:
        if ready <= cluster.next_event() and ready < math.inf:
            cluster.now = max(ready, cluster.now)
            ready = math.inf
            running = [i for i in lengths if i in cluster]
            had.update(zip(running, cluster.cancel(running), strict=True))
            new = range(len(born), math.ceil((len(trained) + ahead) * setup.prompts))
            born += [len(trained)] * len(new)
            missing += [setup.responses] * len(new)
            if new:
                drawn = workload.lengths(new, setup.responses, rng).ravel().tolist()
                begun = range(new.start * setup.responses, new.stop * setup.responses)
                lengths.update(zip(begun, drawn, strict=True))
                had.update(dict.fromkeys(begun, 0.0))
            trained.append(cluster.now)
            go_on(list(lengths))
        elif not len(cluster):  # every response has used up its budget
            go_on(list(lengths))
        elif (ended := cluster.happen()) is not None:
            if ended.length < lengths[ended.id]:
                had[ended.id] = ended.length
            else:
                prompt = ended.id // setup.responses
                del lengths[ended.id], had[ended.id]
                missing[prompt] -= 1
                complete += [] if missing[prompt] else [prompt]
        if ready == math.inf and len(complete) >= setup.prompts:
            staleness.append(fmean(len(trained) - 1 - born[prompt] for prompt in complete[: setup.prompts]))
            complete, ready = complete[setup.prompts :], cluster.now + training
    seconds = (trained[-1] - trained[warmup]) / rounds
    return Prediction(seconds, seconds, 0.0, cluster.take_peak_tokens(), fmean(staleness[warmup:]))


def partial(more: float, budget: int = MANY) -> Evaluator:
    """Returns a function that simulates partial rollout (APRIL, Kimi K1.5).

    ``more`` x P0 prompts are in progress, where P0 is the number of prompts in a batch. A rollout ends when P0 prompts are
    complete. Unfinished responses keep their tokens and continue in the next rollout. A response pauses after ``budget`` further
    tokens, until the next rollout begins or no response is running.
    """

    def price(setup: Setup, rounds: int, seed: int) -> Prediction:
        found = carried_over(setup, rounds, seed, more, budget=budget)
        rollout = setup.noticed(found.rollout_seconds)
        return replace(found, rollout_seconds=rollout, step_seconds=rollout + sum(setup.stages.values()))

    return price


def asynchronous(eta: int, share: float = 0.5) -> Evaluator:
    """Returns a function that simulates asynchronous training (AReaL) with a staleness of at most ``eta`` training steps.

    The share ``share`` of the devices only generates. All other devices only train.
    """

    def price(setup: Setup, rounds: int, seed: int) -> Prediction:
        half = replace(setup, replicas=max(round(setup.replicas * share), 1))
        return carried_over(half, rounds, seed, eta + 1, setup.training_seconds / (1 - share) + setup.other_seconds)

    return price


def options_of(setup: Setup, tokens_a_step: Mapping[int, float] = MappingProxyType({})) -> list[Option]:
    """Returns the options to evaluate for a run: features of rl-accel, then alternatives.

    ``tokens_a_step``: measured tokens per decoding step of a request with drafts, by maximum draft length.
    """
    found: list[Option] = []

    def add(name: str, how: str, price: Evaluator, cost: str = "", ours: bool = True) -> None:
        found.append(Option(name, how, price, ours, cost))

    def tails(prompts: float | str = 1.25, responses: float = 1.25, timeout: bool = False) -> Evaluator:
        return simulated(TailBatchingFlags(prompt_ratio=prompts, response_ratio=responses), 0.0, timeout)

    flag, on = "+rl_accel.tail_batching", "+rl_accel.{}.enable=True".format
    if setup.poll_seconds:
        add("sampler", on("sampler"), simulated(poll_seconds=0.0))
    shorter = "shorter responses of a prompt are preferred"
    for prompts, responses in RATIOS:
        how = f"{on('tail_batching')} {flag}.prompt_ratio={prompts} {flag}.response_ratio={responses}"
        name = f"tail_batching {prompts:g} / {responses:g}"
        add(name, how, tails(prompts, responses), shorter if responses > 1 else "")
    add("tail_batching auto", f"{on('tail_batching')} {flag}.prompt_ratio=auto", tails("auto"), shorter)
    if setup.workload.rewards.max(initial=0.0) > RewardTimeoutFlags().minimum:
        limits, late = on("reward_timeout"), "rewards of slow answers"
        add("reward_timeout", limits, simulated(timeout=True), late)
        add("tail_batching + reward_timeout", f"{on('tail_batching')} {limits}", tails(timeout=True), late)
    if setup.zero_shares:
        zero = f"advantage 0 for {setup.zero_shares[0]:.0%} of the text, if rewards are compared in groups"
        add("skip_zero", on("skip_zero"), skipping_zero(AS_IT_IS.price), zero)
        if setup.poll_seconds:
            both = skipping_zero(simulated(poll_seconds=0.0))
            add("skip_zero + sampler", f"{on('sampler')} {on('skip_zero')}", both, zero)
        both = skipping_zero(tails())
        add("skip_zero + tail_batching", f"{on('tail_batching')} {on('skip_zero')}", both, f"{shorter}; {zero}")
    for longest, accepted in tokens_a_step.items():
        how = f"{on('drafts')} +rl_accel.drafts.max_tokens={longest}"
        drafting = functools.partial(with_drafts, tokens_a_step=accepted)
        add(f"drafts of {longest}", how, with_engine(drafting))
        both = with_engine(drafting, TailBatchingFlags(), 0.0)
        add(f"drafts of {longest} + tail_batching", f"{on('tail_batching')} {how}", both, shorter)
    each = math.ceil(setup.prompts * setup.responses / setup.replicas)
    waiting = setup.engine.slots < each
    if setup.replicas > 1 and waiting:
        how = f"{on('balance')} +rl_accel.balance.slots={setup.engine.slots}"
        add("balance", how, balanced, "decisions, which take no time here")
    if setup.engines:
        how = f"{on('tp_replan')} +rl_accel.tp_replan.action=restart"
        add("tp_replan", how, replanned, "restarts, which are not in these seconds")
    add("twice the replicas", "", simulated(replicas=lambda s: 2 * s.replicas), "GPUs", False)
    fewer, more = max(min(setup.engine.slots, each) // 2, 1), 2 * setup.engine.slots
    for slots in [fewer] * (waiting or setup.engine.cache_tokens < math.inf) + [more] * waiting:
        how = f"actor_rollout_ref.rollout.max_num_seqs={slots}"
        add(f"{slots:,} slots a replica", how, with_engine(functools.partial(replace, slots=slots)), "", False)
    half, quarter = max(setup.workload.limit // 2, 1), max(setup.workload.limit // 4, 1)
    cut = f"{(setup.workload.tokens > half).mean():.1%} of the responses cut short"
    limited = simulated(workload=lambda s: s.workload.limited(half))
    add(f"limit of {half:,} tokens", f"data.max_response_length={half}", limited, cut, False)
    add("training overlapped with the tail", "RollPacker, RLHFuse; in neither framework", overlapped, "", False)
    slime, stale = "slime: --partial-rollout --over-sampling-batch-size", "tokens of old weights"
    add("partial rollout, 1.5 times the prompts", slime, partial(1.5), stale, False)
    add(f"partial rollout, {quarter:,} tokens at a time", "Kimi K1.5", partial(1.5, quarter), stale, False)
    if setup.replicas > 1 and setup.training_seconds:
        modes = "verl: trainer_mode=separate_async, slime: train_async.py; half of the devices each"
        for eta in (1, 4):
            add(f"asynchronous, staleness at most {eta}", modes, asynchronous(eta), stale, False)
    return found


def answer(
    setup: Setup, options: Sequence[Option], draws: int, rounds: int, note: Callable[[], None] = lambda: None
) -> list[Answer]:
    """Evaluates options with ``draws`` random draws of ``rounds`` rollouts each.

    Returns the answer for the unchanged run, followed by one answer per option. Draw number n of an option is compared with draw
    number n of the unchanged run. ``note`` is called after each draw.
    """

    answers: list[Answer] = []
    base: list[Prediction] = []
    for option in [AS_IT_IS, *options]:
        found = []
        for draw in range(draws):
            with collecting_seldom():
                found.append(option.price(setup, rounds, draw))
            note()
        base = base or found
        ours, plain = mean_of(found), mean_of(base)
        ratios = [b.step_seconds / f.step_seconds for b, f in zip(base, found, strict=True)]
        low, high = np.quantile(ratios, [0.025, 0.975]).tolist()
        memory = ours.peak_tokens / plain.peak_tokens - 1
        answers.append(Answer(option, ours, plain.step_seconds / ours.step_seconds, low, high, memory))
    return answers


def mean_of(outcomes: Sequence[Prediction]) -> Prediction:
    """Returns an outcome with the mean of each field over ``outcomes``."""
    return Prediction(*(fmean(getattr(outcome, field.name) for outcome in outcomes) for field in fields(Prediction)))


def best_of(answers: Sequence[Answer]) -> Answer | None:
    """Returns the answer with the highest gain among the features of rl-accel, or None if no feature gains anything.

    If several gains differ by less than :data:`NOTHING`, returns the first of these answers.
    """
    ours = [found for found in answers if found.option.ours and not found.is_nothing]
    most = max((found.ratio for found in ours), default=0.0)
    return next((found for found in ours if found.ratio > most * (1 - NOTHING)), None)


def scale(setup: Setup, gpus: int, rounds: int = 2) -> dict[str, float]:
    """Simulates rollouts on ``gpus`` GPUs with as many prompts per GPU as in ``setup``. Returns the following values by name.

    ``gpus``, ``prompts``: numbers of GPUs and of prompts in a batch.
    ``rollout``: seconds of a rollout without any feature.
    ``tail``: last seconds of this rollout, from 90% of the responses complete to all responses complete.
    ``tail_batching``: seconds of a rollout with tail batching.
    ``end``: seconds to cancel the running responses at the end of this rollout.
    ``trainer``: CPU seconds of the trainer process to handle the events of this rollout.
    ``own_share``: share of ``end`` and ``trainer`` in a rollout with tail batching.
    """
    replicas = max(gpus // setup.tp, 1)
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
