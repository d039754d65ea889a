"""Description of the run that is simulated, with an engine fitted to the run's telemetry."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, isfinite, nan
from statistics import fmean
from typing import Any

import numpy as np

from rl_accel.errors import RlAccelError
from rl_accel.plan.fit import Fit, fit_engine
from rl_accel.rollout.simulation import EngineModel
from rl_accel.rollout.workload import Lengths, from_groups
from rl_accel.telemetry.profile import Profile
from rl_accel.telemetry.stage_clock import COMPLETED, POLL_SECONDS, TRAINING, ResponseTimes, by_prompt, reward_seconds


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
        fixed_seconds: seconds of the stage ``gen`` before the first decoding step and after the trainer has noticed the end.
        is_slime: True for a run of slime, False for a run of verl.
    """

    prompts: int
    responses: int
    replicas: int
    engine: EngineModel
    workload: Lengths
    stages: Mapping[str, float] = field(default_factory=dict)
    poll_seconds: float = 0.0
    fixed_seconds: float = 0.0
    is_slime: bool = False

    @property
    def training_seconds(self) -> float:
        """Mean seconds per step of all stages whose duration grows with the number of trained tokens."""
        return sum(self.stages.get(name, 0.0) for name in TRAINING)

    @property
    def other_seconds(self) -> float:
        """Mean seconds per step of the stages other than rollout and training. Their duration is taken as fixed."""
        return sum(self.stages.values()) - self.training_seconds

    def noticed(self, seconds: float) -> float:
        """Returns the seconds of the stage ``gen``: rollout ``seconds``, rounded up to the next poll, plus ``fixed_seconds``."""
        if self.poll_seconds:
            seconds = ceil(seconds / self.poll_seconds) * self.poll_seconds
        return seconds + self.fixed_seconds


def setup_of(run: Profile, options: Mapping[str, Any]) -> tuple[Setup, Fit]:
    """Returns the setup of a run whose response times are known, and the fit of the engine model to these times.

    ``options`` are the options of ``rl-accel plan``, by name. They take precedence over the log.

    Raises:
        RlAccelError: the run's telemetry is missing or lacks required data, or rollouts run during training.
    """
    if run.overlaps:
        wanted = "wanted a run whose rollouts end with their step, found responses of older weights"
        raise RlAccelError(f"{run.log}: {wanted}")
    steps = list(run.responses.values())
    if not steps:
        raise RlAccelError(f"{run.log}: the time of each response is not known ({'; '.join(run.missing)})")
    # steps that show the whole batch; with tail batching, only long rounds do
    whole = [by_prompt(step) for step in steps if all(response.outcome == COMPLETED for response in step)]
    prompts, responses = run.logged.batch
    if whole:
        given_prompts, given_responses = run.logged.given
        prompts = given_prompts or max(map(len, whole))
        responses = given_responses or max(len(group) for groups in whole for group in groups)
    if not prompts or not responses:
        why = "in every step responses were cut off: give --prompts and --responses of the batch"
        raise RlAccelError(f"{run.log}: {why}")
    prompt_lengths = [step.get("prompt_length/mean", nan) for step in run.metrics.values()]
    known_lengths = [length for length in prompt_lengths if isfinite(length)]
    prompt_tokens = round(fmean(known_lengths)) if known_lengths else 0
    fit = fit_engine(
        steps,
        prompt_tokens,
        slots=int(options.get("slots") or run.numbers.get("slots") or EngineModel.slots),
        cache_tokens=options.get("cache_tokens") or EngineModel.cache_tokens,
    )
    servers = {response.server for step in steps for response in step} - {None}
    rewards = [seconds for step in steps for seconds in reward_seconds(step)]
    rests = [numbers["rest_seconds"] for numbers in run.noted.values() if "rest_seconds" in numbers]
    setup = Setup(
        prompts=prompts,
        responses=responses,
        replicas=options.get("replicas") or max(len(servers), 1),
        engine=fit.engine,
        # run.kept includes warm-up steps, so that prompts are in the order of the data
        workload=from_groups(
            _lengths(list(run.kept.values())), str(run.log), rewards=np.array(rewards), prompt_tokens=prompt_tokens
        ),
        stages={name: seconds for name, seconds in run.stages.items() if name != "gen"},
        poll_seconds=0.0 if run.on & {"sampler", "tail_batching"} else POLL_SECONDS,
        fixed_seconds=fit.start_seconds + min(rests, default=0.0),
    )
    return setup, fit


def _lengths(steps: Sequence[Sequence[ResponseTimes]]) -> list[list[float]]:
    """Returns the number of tokens of each response, one list per prompt.

    A response that was cut off gets the length of a random longer response that was completed. If tail batching cut responses off
    in some steps, only these steps are used. The other steps run the same prompts again, which would count twice.
    """
    rng = np.random.default_rng(0)
    completed = np.sort([r.tokens or 1 for step in steps for r in step if r.outcome == COMPLETED])
    cut_steps = [step for step in steps if any(r.outcome != COMPLETED for r in step)]

    def length(response: ResponseTimes) -> float:
        tokens = response.tokens or 1
        longer = completed[np.searchsorted(completed, tokens, side="right") :]
        return tokens if response.outcome == COMPLETED or not len(longer) else float(rng.choice(longer))

    return [[length(response) for response in group] for step in cut_steps or steps for group in by_prompt(step)]
