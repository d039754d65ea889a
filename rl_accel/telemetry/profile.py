"""What a run's steps say about where its time goes: average stages, the parts of generation, and what would save how much."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl_accel.errors import RlAccelError
from rl_accel.lab.ab.metrics_log import read_steps
from rl_accel.telemetry import stage_clock, steps_file
from rl_accel.telemetry.replay import prompt_seconds, replay
from rl_accel.telemetry.stage_clock import OTHER, Generation
from rl_accel.telemetry.steps_file import Step

KEPT = "rl_accel_telemetry.jsonl"
WARMUP = 2
TAIL, TIMEOUT, SAMPLER, GAE, MORE = "tail_batching", "reward_timeout", "sampler", "gae", "more"
_APPLIED = "rl_accel/{}/applied"
_LIMIT_SCALE, _LIMIT_SLACK, _LIMIT_LEAST = 1.5, 0.5, 2.0
"""Of reward_timeout by default: a limit is 1.5 times a correct execution and half a second, at least two seconds."""


@dataclass(frozen=True)
class Waste:
    """Seconds a step that something takes, what would reduce them, and by how much.

    Attributes:
        name: in words.
        seconds: mean of the measured steps.
        feature: the feature that would reduce them, ``more`` for what only more engines do.
        advice: the flag, in words.
        gain: seconds a step that it would save; None if the run's numbers do not tell.
        arithmetic: how ``gain`` was found, or why it was not.
    """

    name: str
    seconds: float
    feature: str
    advice: str
    gain: float | None
    arithmetic: str


@dataclass(frozen=True)
class Profile:
    """What :func:`profile` found.

    Attributes:
        log: the metrics that were read.
        steps: the measured steps.
        step_seconds: mean of a step.
        stages: mean seconds of each stage; they add up to ``step_seconds``.
        generations: of the measured steps, those that are known.
        preemptions: mean of a step; None if unknown.
        wastes: the largest first.
        missing: in words, what could not be told and why.
        last: the last measured step, with its responses.
    """

    log: Path
    steps: Sequence[int]
    step_seconds: float
    stages: Mapping[str, float]
    generations: Sequence[Generation]
    preemptions: float | None
    wastes: Sequence[Waste]
    missing: Sequence[str]
    last: Step | None = None
    servers: Mapping[str, Generation] = field(default_factory=dict)

    def mean(self, name: str) -> float | None:
        """Return the mean of a number of the generations, None if none has it."""
        known = [value for found in self.generations if (value := getattr(found, name)) is not None]
        return statistics.fmean(known) if known else None


def find_log(folder: Path) -> Path:
    """Return the one file of verl's file logger in ``folder`` or below it.

    Raises:
        RlAccelError: there is none, or there are several; names them.
    """
    if folder.is_file():
        return folder
    if not folder.is_dir():
        raise RlAccelError(f"{folder} is no folder")
    found = [path for path in sorted(folder.rglob("*.jsonl")) if path.name != KEPT and _has_steps(path)]
    own = [path for path in found if path.parent == folder] or found
    if len(own) == 1:
        return own[0]
    if own:
        names = ", ".join(str(path.relative_to(folder)) for path in own)
        raise RlAccelError(f"{folder} holds the metrics of several runs: give one of {names}")
    raise RlAccelError(
        f"{folder} holds no metrics of a training step of verl: they are written with trainer.logger=[console,file]"
    )


def _has_steps(path: Path) -> bool:
    with path.open(errors="replace") as file:
        return any(stage_clock.PREFIX + "step" in line for line in file)


def profile(folder: Path, warmup: int = WARMUP) -> Profile:
    """Read the run in ``folder``. Its first ``warmup`` steps are left out, but never the last.

    Raises:
        RlAccelError: there is no run, or more than one.
    """
    log = find_log(folder)
    every = {step: metrics for step, metrics in read_steps(log).items() if stage_clock.stages(metrics) is not None}
    numbers = list(every)[min(warmup, len(every) - 1) :]
    metrics = [every[number] for number in numbers]
    staged = [seconds for entry in metrics if (seconds := stage_clock.stages(entry)) is not None]
    names = [name for name in (*stage_clock.STAGES, OTHER) if any(name in seconds for seconds in staged)]
    stages = {name: statistics.fmean(seconds.get(name, 0.0) for seconds in staged) for name in names}

    missing: list[str] = []
    kept = _kept(folder if folder.is_dir() else folder.parent, numbers, missing)
    generations = [
        found
        for step in kept
        if step.window_known
        and step.stages.get("gen", 0.0) > 0
        and (found := stage_clock.generation(step.responses, step.stages["gen"], slots=step.slots))
    ]
    if kept and not generations:
        missing.append("parts of generation: in this trainer mode responses are under way when the stage begins")
    preemptions = _preemptions(kept)
    if kept and preemptions is None:
        missing.append("preemptions: a server's own counter could not be read (vLLM: rollout.disable_log_stats=False)")
    last = kept[-1] if kept else None
    servers = (
        stage_clock.by_server(last.responses, last.stages["gen"])
        if last is not None and last.window_known and last.stages.get("gen", 0.0) > 0
        else {}
    )
    wastes = sorted(_wastes(stages, generations, kept, metrics), key=lambda waste: -waste.seconds)
    return Profile(log, numbers, sum(stages.values()), stages, generations, preemptions, wastes, missing, last, servers)


def _kept(folder: Path, numbers: Sequence[int], missing: list[str]) -> list[Step]:
    files = sorted(folder.rglob(KEPT))
    if len(files) != 1:
        why = "several files of that name are here" if files else "the run had no +rl_accel.telemetry.enable=True"
        missing.append(f"idle share, waiting, rewards, completion times and preemptions: no {KEPT} to read, {why}")
        return []
    steps = steps_file.read(files[0])
    return [steps[number] for number in numbers if number in steps]


def _preemptions(kept: Sequence[Step]) -> float | None:
    known = [step.preemptions for step in kept if step.preemptions is not None]
    return statistics.fmean(known) if known and len(known) == len(kept) else None


def _wastes(
    stages: Mapping[str, float],
    generations: Sequence[Generation],
    kept: Sequence[Step],
    metrics: Sequence[Mapping[str, float]],
) -> list[Waste]:
    on = {name for name in (TAIL, TIMEOUT, SAMPLER, GAE) if metrics[-1].get(_APPLIED.format(name)) == 1.0}

    def mean(name: str) -> float:
        known = [value for found in generations if (value := getattr(found, name)) is not None]
        return statistics.fmean(known) if known else 0.0

    wastes = []
    if generations:
        wastes += [_tail(mean("waiting"), kept, TAIL in on), _timeout(mean("reward"), kept, TIMEOUT in on)]
        wastes.append(_sampler(generations, bool(on & {SAMPLER, TAIL})))
        wastes.append(
            Waste(
                "generating nine in ten responses",
                mean("most"),
                MORE,
                "more replicas, or a smaller max_response_length",
                None,
                "how an engine's speed changes with its requests is not in these numbers",
            )
        )
    if stages.get("adv", 0.0) > 0:
        flag = "gae.enable or advantages.enable"
        wastes.append(
            Waste(
                "advantages",
                stages["adv"],
                GAE,
                f"+rl_accel.{GAE}.enable=True (or advantages)" if GAE not in on else f"{flag} is on",
                None,
                "at most all of it; `rl-accel bench gae` measures your shape",
            )
        )
    return wastes


def _tail(seconds: float, kept: Sequence[Step], on: bool) -> Waste:
    name = "waiting for the longest responses"
    if on:
        advice = "tail_batching is on; prompt_ratio=auto chooses the surplus from the times it sees"
        return Waste(name, seconds, TAIL, advice, None, "times of what was cancelled are unknown")
    advice = "+rl_accel.tail_batching.enable=True"
    steps = [times for step in kept if step.window_known and (times := prompt_seconds(step.responses))]
    found = replay(steps)
    if found is None:
        return Waste(name, seconds, TAIL, advice, None, "no step in which every response completed")
    arithmetic = (
        f"{found.known} prompts' own times, replayed in rounds of {found.launched} prompts for {found.prompts} trained, the "
        f"rest in long rounds: {found.in_rounds:.2f} s a rollout instead of {found.as_it_is:.2f} s"
    )
    return Waste(name, seconds, TAIL, advice, found.saved, arithmetic)


def _timeout(seconds: float, kept: Sequence[Step], on: bool) -> Waste:
    name = "rewards after the last generation"
    if on:
        return Waste(name, seconds, TIMEOUT, "reward_timeout is on", None, "what remains is within the limits")
    advice = "+rl_accel.reward_timeout.enable=True (for rewards that execute something)"
    durations = sorted(
        r.rewarded - r.generated
        for step in kept
        for r in step.responses
        if r.rewarded is not None and r.generated is not None
    )
    if not durations:
        return Waste(name, seconds, TIMEOUT, advice, None, "no reward was noted")
    usual = stage_clock.quantile(durations, 0.9)
    limit = max(_LIMIT_SCALE * usual + _LIMIT_SLACK, _LIMIT_LEAST)
    saved = [_saved_by_limit(step, limit) for step in kept]
    arithmetic = (
        f"at most: rewards replayed with a limit of {limit:.1f} s, which is max({_LIMIT_SCALE} x {usual:.2f} s (nine in ten take "
        f"no longer) + {_LIMIT_SLACK} s, {_LIMIT_LEAST} s)"
    )
    return Waste(name, seconds, TIMEOUT, advice, statistics.fmean(saved), arithmetic)


def _saved_by_limit(step: Step, limit: float) -> float:
    done = [r for r in step.responses if r.generated is not None and r.rewarded is not None]
    if not done:
        return 0.0
    ends = [(r.rewarded or 0.0, min(r.rewarded or 0.0, (r.generated or 0.0) + limit)) for r in done]
    return max(end for end, _ in ends) - max(end for _, end in ends)


def _sampler(generations: Sequence[Generation], on: bool) -> Waste:
    rests = [found.rest for found in generations if found.rest is not None]
    seconds = statistics.fmean(rests) if rests else 0.0
    name = "noticing that the rollout is done"
    if on:
        return Waste(name, seconds, SAMPLER, "an adaptive wait is on", None, "storing and putting engines to sleep")
    advice = "+rl_accel.sampler.enable=True"
    if len(rests) < 2:
        return Waste(name, seconds, SAMPLER, advice, None, "one step alone does not tell polling from the rest")
    arithmetic = (
        f"mean {seconds:.2f} s less the shortest of {len(rests)} steps, {min(rests):.2f} s, whose poll came in time"
    )
    return Waste(name, seconds, SAMPLER, advice, seconds - min(rests), arithmetic)
