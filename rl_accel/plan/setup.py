"""Description of the run that ``rl-accel plan`` simulates, with an engine model fitted to the run's telemetry."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, isfinite, nan
from statistics import fmean
from typing import Any

import numpy as np

from rl_accel.errors import RlAccelError
from rl_accel.plan.fit import Fit, fit_engine
from rl_accel.rollout.simulation import Cluster, EngineModel
from rl_accel.rollout.workload import Lengths, from_groups
from rl_accel.telemetry.aggregates import LEAST_STEPS, POLL_SECONDS, Estimate, Range
from rl_accel.telemetry.profile import Profile
from rl_accel.telemetry.stage_clock import COMPLETED, TRAINING, ResponseTimes, by_prompt


@dataclass(frozen=True)
class Setup:
    """Description of a run without any feature of rl-accel.

    Args:
        prompts, responses: number of prompts in a batch, and number of responses per prompt.
        replicas: number of replicas of the rollout engine.
        engine: speed model of the engine in each replica.
        workload: lengths and reward times of the responses.
        stages: mean seconds of each stage of a step except the rollout stage ``gen``, by stage name.
        poll_seconds: seconds between the trainer's checks whether the rollout is done; 0: the trainer notices the end at once.
        after_seconds: seconds of the stage ``gen`` after the trainer has noticed the end of the rollout.
        uneven: measured seconds divided by simulated seconds of each rollout of the measured run.
        zero_shares: share of the stage ``update_actor`` that the feature skip_zero would save, as estimated, and then in bootstrap
            samples of the estimate. Empty: nothing would be saved.
        is_slime: True for a run of slime, False for a run of verl.
    """

    prompts: int
    responses: int
    replicas: int
    engine: EngineModel
    workload: Lengths
    stages: Mapping[str, float] = field(default_factory=dict)
    poll_seconds: float = 0.0
    after_seconds: float = 0.0
    uneven: Sequence[float] = (1.0,)
    zero_shares: Sequence[float] = ()
    is_slime: bool = False

    @property
    def requests_each(self) -> int:
        """Number of requests on each replica when a whole batch runs at once, rounded up."""
        return ceil(self.prompts * self.responses / self.replicas)

    @property
    def training_seconds(self) -> float:
        """Mean seconds per step of all stages whose duration grows with the number of trained tokens."""
        return sum(self.stages.get(name, 0.0) for name in TRAINING)

    @property
    def other_seconds(self) -> float:
        """Mean seconds per step of the stages other than rollout and training. Their duration is taken as fixed."""
        return sum(self.stages.values()) - self.training_seconds

    def noticed(self, seconds: float) -> float:
        """Returns the seconds of the stage ``gen``: rollout ``seconds``, rounded up to the next poll, plus ``after_seconds``."""
        poll = self.poll_seconds
        return (ceil(seconds / poll) * poll if poll else seconds) + self.after_seconds

    def skipping_zero(self, seed: int) -> "Setup":
        """Returns the setup with skip_zero: the stage ``update_actor`` is shorter by one of ``zero_shares``, chosen by ``seed``."""
        share = self.zero_shares[seed % len(self.zero_shares)] if self.zero_shares else 0.0
        update = self.stages.get("update_actor", 0.0) * (1 - share)
        return replace(self, stages={**self.stages, "update_actor": update})


def setup_of(run: Profile, options: Mapping[str, Any]) -> tuple[Setup, Fit | None]:
    """Returns the setup of a run, and the fit of the engine model to the run's telemetry (None without telemetry).

    ``options`` are the options of ``rl-accel plan``, by name. They take precedence over the telemetry.

    Raises:
        RlAccelError: the run's log or telemetry lacks required data.
    """
    if run.overlaps:
        wanted = "wanted a run whose rollouts end with their step, found responses of older weights"
        raise RlAccelError(f"{run.log}: {wanted}")
    if run.estimate is not None:
        return _setup_of_aggregates(run, run.estimate, options), None
    steps = list(run.responses.values())
    # steps that show the whole batch; with tail batching, only long rounds do
    whole_steps = [step for step in steps if all(r.outcome == COMPLETED for r in step)]
    whole = list(map(by_prompt, whole_steps))
    if not steps:
        needs = f"{LEAST_STEPS} steps after the warm-up with response_length/mean and response_length/max"
        why = f" ({'; '.join(run.missing)})" if run.missing else ""
        raise RlAccelError(f"{run.log}: rl-accel plan needs the time of each response{why}, or {needs}, or --lengths")
    if not whole and not (options.get("prompts") and options.get("responses")):
        why = "in every step responses were cut off: give --prompts and --responses of the batch"
        raise RlAccelError(f"{run.log}: {why}")
    limits = {"slots": options.get("slots") or run.numbers.get("slots"), "cache_tokens": options.get("cache_tokens")}
    prompt_lengths = [step.get("prompt_length/mean", nan) for step in run.metrics.values()]
    prompt_tokens = round(fmean(filter(isfinite, prompt_lengths))) if any(map(isfinite, prompt_lengths)) else 0
    fit = fit_engine(steps, prompt_tokens, **{name: int(value) for name, value in limits.items() if value})
    responses = [response for step in steps for response in step]
    servers = {response.server for response in responses} - {None}
    rewards = np.array([r.rewarded - r.generated for r in responses if r.rewarded and r.generated is not None])
    # run.kept includes warm-up steps, so that prompts are in the order of the data
    setup = Setup(
        options.get("prompts") or max(map(len, whole)),
        options.get("responses") or max(len(group) for groups in whole for group in groups),
        options.get("replicas") or max(len(servers), 1),
        fit.engine,
        from_groups(_lengths(list(run.kept.values())), str(run.log), rewards=rewards, prompt_tokens=prompt_tokens),
        {name: seconds for name, seconds in run.stages.items() if name != "gen"},
        0.0 if run.on & {"sampler", "tail_batching"} else POLL_SECONDS,
        min(run.rests, default=0.0),
        zero_shares=run.zero_groups[0],
    )
    return replace(setup, uneven=[_measured_over_simulated(setup, s) for s in whole_steps] or setup.uneven), fit


def _setup_of_aggregates(run: Profile, estimate: Estimate, options: Mapping[str, Any]) -> Setup:
    """Returns the setup of a run without telemetry. Its workload has alternatives that fit the run's log as well."""
    rollouts = estimate.rollouts
    responses = options.get("responses") or rollouts.group
    if responses is None:
        raise RlAccelError(f"{run.log} does not say how many responses a prompt has: give --responses")
    prompts = options.get("prompts") or rollouts.responses // responses
    if not prompts:
        raise RlAccelError(f"{run.log} does not say how many prompts a batch has: give --prompts")
    lengths = estimate.lengths
    spread = Range.of([workload.tokens.mean() for workload in lengths])
    source = (
        f"{len(lengths)} fits of published shapes to the mean, the longest and the share at the limit of"
        f" {len(rollouts.seconds)} batches (mean {spread.low:,.0f} to {spread.high:,.0f} tokens);"
        " the engine is assumed as fast with other numbers of requests"
    )
    known = {name: options[name] for name in ("slots", "cache_tokens") if options.get(name)}
    replicas = options.get("replicas") or 1
    starting = estimate.base.mean * replicas / (prompts * responses)
    paces = {1: max(estimate.pace.mean, 1e-6)}  # the log does not show the pace with other numbers of requests
    return Setup(
        prompts,
        responses,
        replicas,
        EngineModel(paces, request_seconds=starting, **{"slots": prompts * responses * 4, **known}),
        replace(lengths[0], alternatives=lengths, source=source, prompt_tokens=round(fmean(rollouts.prompts))),
        {name: seconds for name, seconds in run.stages.items() if name != "gen"},
        POLL_SECONDS if rollouts.polls else 0.0,
        estimate.storing + estimate.unexplained.mean,
        zero_shares=run.zero_groups[0],
        is_slime=run.logged.is_slime,
    )


def _measured_over_simulated(setup: Setup, step: Sequence[ResponseTimes]) -> float:
    """Returns the measured rollout seconds of ``step``, divided by the seconds that a simulation of its responses takes."""
    cluster = Cluster(setup.engine, setup.replicas, setup.workload.prompt_tokens)
    cluster.launch(range(len(step)), [response.tokens or 1 for response in step])
    while len(cluster):
        cluster.happen()
    return (max(r.generated or r.ended for r in step) - min(r.began for r in step)) / cluster.now


def _lengths(steps: Sequence[Sequence[ResponseTimes]]) -> list[list[float]]:
    """Returns the number of tokens of each response, one list per prompt.

    A response that was cut off gets the length of a random longer response that was completed. If tail batching cut responses off
    in some steps, only these steps are used. The other steps run the same prompts again, which would count twice.
    """
    rng = np.random.default_rng(0)
    ended = np.sort([r.tokens or 1 for step in steps for r in step if r.outcome == COMPLETED])
    cut = [step for step in steps if any(r.outcome != COMPLETED for r in step)]

    def length(response: ResponseTimes) -> float:
        tokens = response.tokens or 1
        longer = ended[np.searchsorted(ended, tokens, side="right") :]
        return tokens if response.outcome == COMPLETED or not len(longer) else float(rng.choice(longer))

    return [[length(response) for response in group] for step in cut or steps for group in by_prompt(step)]
