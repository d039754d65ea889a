"""The run that is priced, and its engine as its telemetry shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from statistics import fmean
from typing import Any

import numpy as np

from rl_accel.errors import RlAccelError
from rl_accel.plan.fit import Fit, fit_engine
from rl_accel.plan.workload import Lengths, from_groups
from rl_accel.rollout.simulation import Cluster, Engine
from rl_accel.telemetry.logs import read_log
from rl_accel.telemetry.profile import Profile
from rl_accel.telemetry.stage_clock import COMPLETED, Response

TRAINING = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
"""Stages that take as long as there are tokens to train on."""
POLL_SECONDS = 2.0
"""verl's V1 trainer looks so seldom whether a rollout is done."""
_PROMPTS = "prompt_length/mean"
"""verl's metric."""


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
        why = f"not known: {'; '.join(run.missing)}" if run.missing else "it has no responses"
        needs = "rl-accel plan needs the time of each response"
        raise RlAccelError(f"{run.log}: {needs} ({why}), or --lengths and --step-seconds")
    if not whole and not (given.get("prompts") and given.get("responses")):
        why = "in every step responses were cut off: give --prompts and --responses of the batch"
        raise RlAccelError(f"{run.log}: {why}")
    known = {"places": given.get("places") or run.numbers.get("places"), "cache_tokens": given.get("cache_tokens")}
    logged = [step[_PROMPTS] for step in read_log(run.log).values() if _PROMPTS in step]
    prompt_tokens = round(fmean(logged)) if logged else 0
    fit = fit_engine(steps, prompt_tokens, **{name: int(value) for name, value in known.items() if value})
    servers = {response.server for step in steps for response in step} - {None}
    rewards = np.array(
        [r.rewarded - r.generated for step in steps for r in step if r.rewarded and r.generated is not None]
    )
    setup = Setup(
        given.get("prompts") or max(map(len, whole)),
        given.get("responses") or max(len(group) for groups in whole for group in groups),
        given.get("replicas") or max(len(servers), 1),
        fit.engine,
        from_groups(_lengths(list(run.kept.values())), str(run.log), rewards=rewards, prompt_tokens=prompt_tokens),
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
