"""The run that is priced, and its engine as its telemetry shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np

from rl_accel.errors import RlAccelError
from rl_accel.plan.workload import Lengths, from_groups
from rl_accel.rollout.simulation import Engine, Floats
from rl_accel.telemetry.profile import Profile
from rl_accel.telemetry.stage_clock import COMPLETED, Response

TRAINING = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
"""Stages that take as long as there are tokens to train on."""
POLL_SECONDS = 2.0
"""verl's V1 trainer looks so seldom whether a rollout is done."""
_KNOTS = (1, 4, 16, 64, 256, 1024)


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
    """

    prompts: int
    responses: int
    replicas: int
    engine: Engine
    workload: Lengths
    stages: Mapping[str, float] = field(default_factory=dict)
    poll_seconds: float = 0.0
    after_seconds: float = 0.0

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
        raise RlAccelError(
            f"{run.log}: rl-accel plan wants the times of responses; {why}. Or give --lengths and --step-seconds"
        )
    if not whole and not (given.get("prompts") and given.get("responses")):
        raise RlAccelError(
            f"{run.log}: in every step responses were cut off: give --prompts and --responses of the batch"
        )
    fit = fit_engine(steps, given.get("places"))
    servers = {response.server for step in steps for response in step} - {None}
    rewards = [r.rewarded - r.generated for step in steps for r in step if r.rewarded and r.generated is not None]
    polled = not run.on & {"sampler", "tail_batching"}
    setup = Setup(
        given.get("prompts") or max(map(len, whole)),
        given.get("responses") or max(len(group) for groups in whole for group in groups),
        given.get("replicas") or max(len(servers), 1),
        fit.engine,
        from_groups(_lengths(list(run.kept.values())), str(run.log), rewards=np.array(rewards)),
        {name: seconds for name, seconds in run.stages.items() if name != "gen"},
        POLL_SECONDS if polled else 0.0,
        0.0 if polled else min(run.rests.values(), default=0.0),
    )
    return setup, fit


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
        longer = int(np.searchsorted(ended, tokens, side="right"))
        return tokens if response.outcome == COMPLETED or longer == len(ended) else float(rng.choice(ended[longer:]))

    return [[length(response) for response in group] for step in cut or steps for group in _groups(step)]


def fit_engine(steps: Sequence[Sequence[Response]], places: int | None = None) -> Fit:
    """Fit the constants of an engine to how long responses took, by least squares (scipy).

    The tokens of a response are those that its server's steps between its first and last moment would have given, with as many
    requests and cached tokens as there were at each moment. A step is level or rises with requests.

    Raises:
        RlAccelError: too few responses have tokens and times.
    """
    from scipy.optimize import least_squares

    data = _Observed(steps)
    if len(data.tokens) < 16:
        raise RlAccelError(f"fitting the engine wants 16 responses with tokens and times, found {len(data.tokens)}")
    most = int(data.running.max())
    knots = np.array([k for k in _KNOTS if k < most] + [most], float)
    pace = float(np.median(data.seconds / data.tokens))

    def error(values: Floats) -> Floats:
        missing: Floats = data.predicted(knots, np.cumsum(values[:-2]), values[-2], values[-1]) - data.tokens
        return missing * pace

    start = np.array([pace, *[0.0] * (len(knots) + 1)])
    least = np.array([pace / 100, *[0.0] * (len(knots) + 1)])
    scale = np.array([pace] * len(knots) + [pace / max(data.cached.max(), 1.0), pace])
    found = least_squares(
        error, start, bounds=(least, np.inf), x_scale=scale, loss="soft_l1", f_scale=max(pace * 10, 0.05)
    )
    left = error(found.x)
    covariance = np.linalg.pinv(found.jac.T @ found.jac) * (left @ left) / max(len(left) - len(start), 1)
    summed = np.eye(len(start))
    summed[: len(knots), : len(knots)] = np.tril(np.ones((len(knots), len(knots))))
    half = 1.96 * np.sqrt(np.maximum(np.diag(summed @ covariance @ summed.T), 0.0))
    names = [*(f"step_seconds[{int(k)}]" for k in knots), "cached_token_seconds", "request_seconds"]
    values = (summed @ found.x).tolist()
    engine = Engine(
        dict(zip(map(int, knots), values[:-2], strict=True)),
        cached_token_seconds=values[-2],
        request_seconds=values[-1],
        places=places or 1024,
    )
    relative = float(np.sqrt((left**2).mean()) / data.seconds.mean())
    return Fit(engine, dict(zip(names, half.tolist(), strict=True)), relative, len(data.tokens))


class _Observed:
    """Responses as a fit needs them, on one time axis: all steps and servers one after the other.

    ``tokens`` and ``seconds`` of each response; ``running`` and ``cached``: requests and tokens on its server between two events.
    """

    def __init__(self, steps: Sequence[Sequence[Response]]) -> None:
        rows: list[tuple[float, float, int, int]] = []
        offset = 0.0
        for step in steps:
            for server in sorted({str(response.server) for response in step}):
                its = [r for r in step if str(r.server) == server and r.tokens]
                ends = [r.ended if r.generated is None else r.generated for r in its]
                rows += [
                    (r.began + offset, end + offset, r.tokens or 1, len(its)) for r, end in zip(its, ends, strict=True)
                ]
                offset += max(ends, default=0.0) + 1.0
        self._begins, self._ends, self.tokens, self._together = np.array(rows, float).reshape(-1, 4).T
        self.seconds = np.maximum(self._ends - self._begins, 1e-9)
        times, rate = np.concatenate([self._begins, self._ends]), self.tokens / self.seconds
        order = np.argsort(times, kind="stable")
        self._times, self._lasted = times[order], np.diff(times[order])
        ones = np.ones(len(rate))
        self.running, growth, gone = (
            np.cumsum(np.concatenate(changes)[order])[:-1]
            for changes in ((ones, -ones), (rate, -rate), (0 * ones, self.tokens))
        )
        self.cached = np.maximum(np.cumsum(growth * self._lasted) - growth * self._lasted / 2 - gone, 0.0)

    def predicted(self, knots: Floats, step_seconds: Floats, cached_seconds: float, request_seconds: float) -> Floats:
        """Return the tokens that each response would have had."""
        pace = np.interp(self.running, knots, step_seconds) + cached_seconds * self.cached
        done = np.concatenate([[0.0], np.cumsum(self._lasted / pace)])
        begins = np.minimum(self._begins + request_seconds * self._together, self._ends)
        result: Floats = np.interp(self._ends, self._times, done) - np.interp(begins, self._times, done)
        return result
