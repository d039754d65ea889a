"""The run that is priced, and its engine as its telemetry shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import numpy as np

from rl_accel.errors import RlAccelError
from rl_accel.plan.workload import Lengths, from_groups
from rl_accel.rollout.simulation import Cluster, Engine, Floats
from rl_accel.telemetry.profile import Profile
from rl_accel.telemetry.stage_clock import COMPLETED, Response

TRAINING = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
"""Stages that take as long as there are tokens to train on."""
POLL_SECONDS = 2.0
"""verl's V1 trainer looks so seldom whether a rollout is done."""
_KNOTS = (1, 4, 16, 64, 256, 1024)
"""Running requests between which a step is linear, far enough apart, and from the most that ran, to be told apart."""


@dataclass(frozen=True)
class Setup:
    """A run without any feature.

    Args:
        prompts, responses: of a batch, P0 and R0.
        replicas: of the rollout engine.
        engine: each of them.
        workload: what is generated.
        stages: mean seconds of the stages of a step other than ``gen``.
        poll_seconds: between two looks whether the rollout is done; 0: it is noticed at once.
        after_seconds: from there to the end of the stage.
        tp: tensor-parallel size, the GPUs of a replica.
        engines: replicas at other sizes, by size, as far as they are known.
        cluster: makes the cluster; another class routes requests otherwise.
        uneven: how many times the seconds that the engine would need each rollout of the run took.
    """

    prompts: int
    responses: int
    replicas: int
    engine: Engine
    workload: Lengths
    stages: Mapping[str, float] = field(default_factory=dict)
    poll_seconds: float = 0.0
    after_seconds: float = 0.0
    tp: int = 1
    engines: Mapping[int, Engine] = field(default_factory=dict)
    cluster: type[Cluster] = Cluster
    uneven: Sequence[float] = (1.0,)

    def __post_init__(self) -> None:
        for name in ("prompts", "responses", "replicas"):
            if getattr(self, name) < 1:
                raise RlAccelError(f"--{name} must be at least 1, found {getattr(self, name)}")

    @property
    def training_seconds(self) -> float:
        """Of the stages that grow with tokens."""
        return sum(self.stages.get(name, 0.0) for name in TRAINING)

    @property
    def other_seconds(self) -> float:
        """Of the stages that do not, rollout excepted."""
        return sum(self.stages.values()) - self.training_seconds

    def noticed(self, seconds: float, poll_seconds: float | None = None) -> float:
        """Return how long the stage ``gen`` takes with a rollout of so many seconds."""
        poll = self.poll_seconds if poll_seconds is None else poll_seconds
        return (ceil(seconds / poll) * poll if poll else seconds) + self.after_seconds

    def built(self) -> Cluster:
        """Return its replicas, with nothing to do."""
        return self.cluster(self.engine, self.replicas, self.workload.prompt_tokens)


@dataclass(frozen=True)
class Fit:
    """An engine fitted to so many ``responses``. ``intervals``: half the width of the 95% interval of each constant, by name.
    ``error``: root mean square error of a response's seconds, over their mean.
    """

    engine: Engine
    intervals: Mapping[str, float]
    error: float
    responses: int


def setup_of(run: Profile, given: Mapping[str, Any]) -> tuple[Setup, Fit]:
    """Return the setup of a run with telemetry, and how well its engine is known; ``given`` is what the user says of it.

    The batch is that of steps in which nothing was cut off: all steps without tail batching, long rounds with it. Lengths are of
    all steps, for the prompts to be in the order of the data; warm-up says nothing of the engine.

    Raises:
        RlAccelError: what is needed is not in the run.
    """
    steps = list(run.responses.values())
    whole = [_groups(step) for step in steps if all(r.outcome == COMPLETED for r in step)]
    if not steps:
        why = "; ".join(run.missing) or "it has no responses"
        wants = "rl-accel plan wants the times of responses"
        raise RlAccelError(f"{run.log}: {wants}; {why}. Or give --lengths and --step-seconds")
    if not whole and not (given.get("prompts") and given.get("responses")):
        why = "in every step responses were cut off: give --prompts and --responses of the batch"
        raise RlAccelError(f"{run.log}: {why}")
    fit = fit_engine(steps, **{name: given[name] for name in ("places", "cache_tokens") if given.get(name)})
    servers = {response.server for step in steps for response in step} - {None}
    rewards = [r.rewarded - r.generated for step in steps for r in step if r.rewarded and r.generated is not None]
    setup = Setup(
        given.get("prompts") or max(map(len, whole)),
        given.get("responses") or max(len(group) for groups in whole for group in groups),
        given.get("replicas") or max(len(servers), 1),
        fit.engine,
        from_groups(_lengths(list(run.kept.values())), str(run.log), rewards=np.array(rewards)),
        {name: seconds for name, seconds in run.stages.items() if name != "gen"},
        0.0 if run.on & {"sampler", "tail_batching"} else POLL_SECONDS,
        min(run.rests.values(), default=0.0),
        given.get("gpus") or 1,
    )
    uneven = [_slower(setup, step) for step in steps if all(r.outcome == COMPLETED for r in step)]
    return replace(setup, uneven=uneven or setup.uneven), fit


def _slower(setup: Setup, step: Sequence[Response]) -> float:
    """How many times the seconds that the fitted engine needs for the responses of a step they took."""
    cluster = setup.built()
    cluster.launch(range(len(step)), [response.tokens or 1 for response in step])
    while len(cluster):
        cluster.happen()
    return (max(r.generated or r.ended for r in step) - min(r.began for r in step)) / cluster.now


def _groups(step: Sequence[Response]) -> list[list[Response]]:
    """The responses of each prompt."""
    groups: dict[str, list[Response]] = {}
    for response in step:
        groups.setdefault(response.prompt, []).append(response)
    return list(groups.values())


def _lengths(steps: Sequence[Sequence[Response]]) -> list[list[float]]:
    """Tokens of the responses of each prompt. One that was cut off gets the length of one that went on beyond that, by chance.

    Beside steps with such responses the others are left out: they are the long rounds of the same prompts.
    """
    rng = np.random.default_rng(0)
    ended = np.sort([r.tokens or 1 for step in steps for r in step if r.outcome == COMPLETED])
    cut = [step for step in steps if any(r.outcome != COMPLETED for r in step)]

    def length(response: Response) -> float:
        tokens = response.tokens or 1
        longer = ended[np.searchsorted(ended, tokens, side="right") :]
        return tokens if response.outcome == COMPLETED or not len(longer) else float(rng.choice(longer))

    return [[length(response) for response in group] for step in cut or steps for group in _groups(step)]


def fit_engine(steps: Sequence[Sequence[Response]], **known: int) -> Fit:
    """Fit the constants of an engine to how long responses took, by least squares (scipy); ``known`` are others of its fields.

    The tokens of a response are those that its server's steps between its first and last moment would have given, with as many
    requests and cached tokens as there were at each moment. A step is level or rises with requests.

    Raises:
        RlAccelError: too few responses have tokens and times.
    """
    from scipy.optimize import curve_fit

    rows: list[tuple[float, float, int, int]] = []  # on one time axis: all steps and servers one after the other
    offset = 0.0
    for step in steps:
        for server in sorted({str(response.server) for response in step}):
            its = [(r, r.tokens, r.generated or r.ended) for r in step if str(r.server) == server and r.tokens]
            rows += [(r.began + offset, end + offset, tokens, len(its)) for r, tokens, end in its]
            offset += max((end for *_, end in its), default=0.0) + 1.0
    if len(rows) < 16:
        raise RlAccelError(f"fitting the engine wants 16 responses with tokens and times, found {len(rows)}")
    begins, ends, tokens, together = np.array(rows, float).T
    seconds = np.maximum(ends - begins, 1e-9)
    order = np.argsort(np.concatenate([begins, ends]), kind="stable")
    times = np.concatenate([begins, ends])[order]
    lasted = np.diff(times)

    def summed(at_begin: Floats, at_end: Floats) -> Floats:
        """Between one event and the next, the sum of what those up to there have changed."""
        total: Floats = np.cumsum(np.concatenate([at_begin, at_end])[order])[:-1]
        return total

    ones, rate = np.ones(len(rows)), tokens / seconds
    running, growth = summed(ones, -ones), summed(rate, -rate)
    cached = np.maximum(np.cumsum(growth * lasted) - growth * lasted / 2 - summed(0 * ones, tokens), 0.0)
    knots = np.array([k for k in _KNOTS if k <= max(running.max() / 4, 1)] + [running.max()] * bool(running.max() > 1))
    rises = np.tril(np.ones((len(knots), len(knots))))

    def predicted(_: Any, *values: float) -> Floats:
        """Tokens that each response would have."""
        pace = np.interp(running, knots, rises @ values[:-2]) + values[-2] * cached
        done = np.append(0.0, np.cumsum(lasted / pace))
        started = np.minimum(begins + values[-1] * together, ends)
        result: Floats = np.interp(ends, times, done) - np.interp(started, times, done)
        return result

    pace = float(np.median(seconds / tokens))
    least = [pace / 100, *[0.0] * (len(knots) + 1)]
    scale = [pace] * len(knots) + [pace / max(cached.max(), 1.0), pace]
    start = [pace, *least[1:]]
    found, covariance = curve_fit(predicted, None, tokens, start, bounds=(least, np.inf), x_scale=scale)
    to_constants = np.eye(len(found))
    to_constants[: len(knots), : len(knots)] = rises
    half = 1.96 * np.sqrt(np.maximum(np.diag(to_constants @ covariance @ to_constants.T), 0.0))
    *paces, cached_seconds, request_seconds = (to_constants @ found).tolist()
    step_seconds = dict(zip(map(int, knots), paces, strict=True))
    engine = Engine(step_seconds, cached_seconds, request_seconds=request_seconds, **known)
    names = [*(f"step_seconds[{count}]" for count in step_seconds), "cached_token_seconds", "request_seconds"]
    missing = (predicted(None, *found) - tokens) * seconds / tokens
    error = float(np.sqrt((missing**2).mean()) / seconds.mean())
    return Fit(engine, dict(zip(names, half.tolist(), strict=True)), error, len(rows))
