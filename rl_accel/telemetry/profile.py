"""What a run's steps say about where its time goes: average stages, the parts of generation, and what would save how much."""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

import numpy as np

from rl_accel.errors import RlAccelError
from rl_accel.telemetry import stage_clock, steps_file
from rl_accel.telemetry.stage_clock import COMPLETED, OTHER, Generation, Response
from rl_accel.telemetry.steps_file import FILE_NAME, Step

WARMUP = 2
_LIMIT_SCALE, _LIMIT_SLACK, _LIMIT_LEAST = 1.5, 0.5, 2.0
"""Of reward_timeout by default: a limit is 1.5 times a correct execution and half a second, at least two seconds."""


@dataclass(frozen=True)
class Saving:
    """Seconds a step that something takes, what would reduce them, and by how much.

    Attributes:
        name: what takes them, in words.
        seconds: mean of the measured steps.
        advice: the flag that would reduce them, in words.
        gain: seconds a step that it would save; None if the run's numbers do not tell.
        arithmetic: how ``gain`` was found, or why it was not.
    """

    name: str
    seconds: float
    advice: str
    gain: float | None
    arithmetic: str


@dataclass(frozen=True)
class Profile:
    """Where the time of a run's steps went.

    Attributes:
        log: the metrics that were read.
        steps: the measured steps.
        step_seconds: mean of a step.
        stages: mean seconds of each stage; they add up to ``step_seconds``.
        generations: of the measured steps, those that are known.
        preemptions: mean of a step; None if unknown.
        savings: what takes most time first.
        missing: in words, what could not be told and why.
        last: the last measured step, with its responses.
        servers: what generation was spent on in the last step, by rollout server.
    """

    log: Path
    steps: Sequence[int]
    step_seconds: float
    stages: Mapping[str, float]
    generations: Sequence[Generation]
    preemptions: float | None
    savings: Sequence[Saving]
    missing: Sequence[str]
    last: Step | None = None
    servers: Mapping[str, Generation] = field(default_factory=dict)

    def mean(self, name: str) -> float | None:
        """Return the mean of a number of the generations, None if none has it."""
        return _mean(getattr(generation, name) for generation in self.generations)


def find_log(folder: Path) -> Path:
    """Return the one file of verl's file logger in ``folder`` or below it.

    Raises:
        RlAccelError: there is none, or there are several; names them.
    """
    if folder.is_file():
        return folder
    if not folder.is_dir():
        raise RlAccelError(f"{folder} is no folder")
    logs = [path for path in sorted(folder.rglob("*.jsonl")) if path.name != FILE_NAME and _has_steps(path)]
    logs = [path for path in logs if path.parent == folder] or logs
    if len(logs) == 1:
        return logs[0]
    if logs:
        names = ", ".join(str(path.relative_to(folder)) for path in logs)
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
    metrics = steps_file.read_log(log)
    staged = {step: seconds for step, logged in metrics.items() if (seconds := stage_clock.stages(logged)) is not None}
    numbers = list(staged)[min(warmup, len(staged) - 1) :]
    measured = [staged[number] for number in numbers]
    names = [name for name in (*stage_clock.STAGES, OTHER) if any(name in seconds for seconds in measured)]
    stages = {name: statistics.fmean(seconds.get(name, 0.0) for seconds in measured) for name in names}

    missing: list[str] = []
    kept = _kept(folder if folder.is_dir() else folder.parent, numbers, missing)
    timed = [step for step in kept if step.window_known and step.stages.get("gen", 0.0) > 0]
    generations = [
        generation
        for step in timed
        if (generation := stage_clock.generation(step.responses, step.stages["gen"], slots=step.slots))
    ]
    if kept and not generations:
        missing.append("parts of generation: in this trainer mode responses are under way when the stage begins")
    preemptions = None
    if kept and all(step.preemptions is not None for step in kept):
        preemptions = _mean(step.preemptions for step in kept)
    elif kept:
        missing.append("preemptions: a server's own counter could not be read (vLLM: rollout.disable_log_stats=False)")
    last = kept[-1] if kept else None
    servers = stage_clock.by_server(last.responses, last.stages["gen"]) if last in timed and last else {}
    on = {name.split("/")[1] for name, value in metrics[numbers[-1]].items() if name.endswith("/applied") and value}
    savings = sorted(_savings(stages, generations, timed, on), key=lambda saving: -saving.seconds)
    return Profile(
        log, numbers, sum(stages.values()), stages, generations, preemptions, savings, missing, last, servers
    )


def _kept(folder: Path, numbers: Sequence[int], missing: list[str]) -> list[Step]:
    files = sorted(folder.rglob(FILE_NAME))
    if len(files) != 1:
        why = "several files of that name are here" if files else "the run had no +rl_accel.telemetry.enable=True"
        missing.append(f"idle share, waiting, rewards, completion times and preemptions: no {FILE_NAME} to read, {why}")
        return []
    steps = steps_file.read(files[0])
    return [steps[number] for number in numbers if number in steps]


def _savings(
    stages: Mapping[str, float], generations: Sequence[Generation], steps: Sequence[Step], on: set[str]
) -> list[Saving]:
    """What could be saved, given which features were ``on``. ``steps`` are those of ``generations``."""
    savings = []
    if generations:
        most = _mean(generation.most for generation in generations) or 0.0
        waiting = _mean(generation.waiting for generation in generations) or 0.0
        reward = _mean(generation.reward for generation in generations) or 0.0
        savings = [
            _tail_batching(waiting, steps, "tail_batching" in on),
            _reward_timeout(reward, steps, "reward_timeout" in on),
            _sampler(generations, bool(on & {"sampler", "tail_batching"})),
            Saving(
                "generating nine in ten responses",
                most,
                "more replicas, or a smaller max_response_length",
                None,
                "how an engine's speed changes with its requests is not in these numbers",
            ),
        ]
    if stages.get("adv", 0.0) > 0:
        is_on = "gae.enable or advantages.enable is on"
        advice = is_on if on & {"gae", "advantages"} else "+rl_accel.gae.enable=True (or advantages)"
        arithmetic = "at most all of it; `rl-accel bench gae` measures your shape"
        savings.append(Saving("advantages", stages["adv"], advice, None, arithmetic))
    return savings


def _tail_batching(seconds: float, steps: Sequence[Step], on: bool) -> Saving:
    name = "waiting for the longest responses"
    if on:
        advice = "tail_batching is on; prompt_ratio=auto chooses the surplus from the times it sees"
        return Saving(name, seconds, advice, None, "times of what was cancelled are unknown")
    advice = "+rl_accel.tail_batching.enable=True"
    rounds = replay([times for step in steps if (times := prompt_seconds(step.responses))])
    if rounds is None:
        return Saving(name, seconds, advice, None, "no step in which every response completed")
    arithmetic = (
        f"{rounds.known} prompts' own times, replayed in rounds of {rounds.launched} prompts for {rounds.prompts} trained, "
        f"the rest in long rounds: {rounds.in_rounds:.2f} s a rollout instead of {rounds.as_it_is:.2f} s"
    )
    return Saving(name, seconds, advice, rounds.saved, arithmetic)


@dataclass(frozen=True)
class Replay:
    """Mean seconds of a rollout of ``prompts`` prompts, as it is and in rounds that launch ``launched``.

    ``known`` is how many prompts' times were drawn from.
    """

    as_it_is: float
    in_rounds: float
    prompts: int
    launched: int
    known: int

    @property
    def saved(self) -> float:
        return max(self.as_it_is - self.in_rounds, 0.0)


def prompt_seconds(responses: Sequence[Response]) -> list[float] | None:
    """Return, for each prompt of a step, the seconds from the step's first response until all of its own had their reward.

    None if a response was cancelled or failed: the time that it would have taken is unknown.
    """
    if not responses or any(response.outcome != COMPLETED for response in responses):
        return None
    start = min(response.began for response in responses)
    last: dict[str, float] = {}
    for response in responses:
        last[response.prompt] = max(last.get(response.prompt, 0.0), response.completed_at - start)
    return list(last.values())


def replay(steps: Sequence[Sequence[float]], ratio: float = 1.25, rounds: int = 2000, seed: int = 0) -> Replay | None:
    """Replay ``rounds`` rounds of tail batching with the times of ``steps``; None if there is no prompt.

    A short round draws ``ceil(ratio * P0)`` prompts, lasts until P0 of them are complete and puts the others into a queue; a queue
    of P0 makes a long round, which waits for all of them. Either trains P0 prompts. A prompt that was put off takes in a long round
    what it took before: long by nature. What is left out: prompts that were long by chance, a surplus of responses (both would save
    more), and that generation is slower with more prompts at once (which saves less).

    Args:
        steps: completion times of the prompts of each step; P0 is how many the largest has.
        ratio: prompts launched in a short round over those trained.
        rounds: how many to replay.
        seed: of the draws.
    """
    times = np.array([seconds for step in steps for seconds in step])
    if not len(times):
        return None
    prompts = max(len(step) for step in steps)
    launched = ceil(ratio * prompts - 1e-9)
    random = np.random.default_rng(seed)
    queue: deque[float] = deque()
    spent = 0.0
    for _ in range(rounds):
        if len(queue) >= prompts:
            spent += max(queue.popleft() for _ in range(prompts))
            continue
        drawn = np.sort(random.choice(times, launched))
        spent += float(drawn[prompts - 1])
        queue.extend(drawn[prompts:].tolist())
    return Replay(float(np.mean([max(step) for step in steps if step])), spent / rounds, prompts, launched, len(times))


def _reward_timeout(seconds: float, steps: Sequence[Step], on: bool) -> Saving:
    name = "rewards after the last generation"
    if on:
        return Saving(name, seconds, "reward_timeout is on", None, "what remains is within the limits")
    advice = "+rl_accel.reward_timeout.enable=True (for rewards that execute something)"
    rewarded = [
        [(r.generated, r.rewarded) for r in step.responses if r.generated is not None and r.rewarded is not None]
        for step in steps
    ]
    durations = sorted(end - begin for rewards in rewarded for begin, end in rewards)
    if not durations:
        return Saving(name, seconds, advice, None, "no reward was noted")
    nine_in_ten = stage_clock.quantile(durations, 0.9)
    limit = max(_LIMIT_SCALE * nine_in_ten + _LIMIT_SLACK, _LIMIT_LEAST)
    gain = statistics.fmean(
        max(end for _, end in rewards) - max(min(end, begin + limit) for begin, end in rewards) if rewards else 0.0
        for rewards in rewarded
    )
    arithmetic = (
        f"at most: rewards replayed with a limit of {limit:.1f} s, which is max({_LIMIT_SCALE} x {nine_in_ten:.2f} s (nine in "
        f"ten take no longer) + {_LIMIT_SLACK} s, {_LIMIT_LEAST} s)"
    )
    return Saving(name, seconds, advice, gain, arithmetic)


def _sampler(generations: Sequence[Generation], on: bool) -> Saving:
    rests = [generation.rest for generation in generations if generation.rest is not None]
    seconds = statistics.fmean(rests) if rests else 0.0
    name = "noticing that the rollout is done"
    if on:
        return Saving(name, seconds, "an adaptive wait is on", None, "storing and putting engines to sleep")
    advice = "+rl_accel.sampler.enable=True"
    if len(rests) < 2:
        return Saving(name, seconds, advice, None, "one step alone does not tell polling from the rest")
    arithmetic = (
        f"mean {seconds:.2f} s less the shortest of {len(rests)} steps, {min(rests):.2f} s, whose poll came in time"
    )
    return Saving(name, seconds, advice, seconds - min(rests), arithmetic)


def format_seconds(value: float) -> str:
    """Return a duration with three figures, in s or ms."""
    return f"{value:.3g} s" if value >= 0.1 else f"{value * 1000:.3g} ms"


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
