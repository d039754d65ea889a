"""Reads a run and tells where the time of its training steps went, by stage and cause."""

import contextlib
import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rl_accel.errors import RlAccelError
from rl_accel.telemetry import stage_clock
from rl_accel.telemetry.readers import read
from rl_accel.telemetry.run_log import TELEMETRY, Logged
from rl_accel.telemetry.stage_clock import (
    FILE_NAME,
    OTHER,
    PREFIX,
    SLIME_NAMES,
    STALENESS,
    V1,
    VALIDATION,
    ResponseTimes,
)

WARMUP = 2
"""Default number of first steps to leave out, which are slower than others. Chosen by hand."""
_NEVER_ZERO = {
    "timing_s/values",
    "timing_s/update_critic",
    "actor/kl_loss",
    "actor/entropy_loss",
    "actor/reward_kl_penalty",
}
"""Metrics that verl logs if training has a critic, a KL term or an entropy term. With any of these, groups with equal
rewards change the weights, too, and skip_zero cannot be used."""

PARTS = {
    "most_seconds": ("nine in ten responses", "#4878a8"),
    "waiting_seconds": ("waiting for the longest", "#b5498f"),
    "reward_seconds": ("rewards", "#9bc0de"),
    "rest_seconds": ("noticing, storing", "#b7b7a4"),
}
"""Label and colour in the report of each part of the generation stage, by the name of the part's metric."""


@dataclass(frozen=True)
class Profile:
    """Time of a run's training steps by stage and cause.

    Attributes:
        folder: path that was read.
        logged: the log of the run.
        metrics: metrics of each logged step, by step number. Metrics of slime have verl's names here.
        staged: seconds of each stage of the measured steps (those after the warm-up), by step number and name of the stage.
        notes: texts that say which logged steps are left out and why.
    """

    folder: Path
    logged: Logged
    metrics: Mapping[int, Mapping[str, float]]
    staged: Mapping[int, Mapping[str, float]]
    notes: Sequence[str]

    @property
    def is_v1(self) -> bool:
        """True if the run used verl's V1 trainer, the only one with telemetry."""
        return bool(self.numbers) or any(name.startswith(V1) for name in self.metrics[self.steps[-1]])

    @property
    def overlaps(self) -> bool:
        """True if rollouts run during training."""
        return self.logged.overlaps or any(self.metrics[step].get(STALENESS, 0) for step in self.steps)

    @property
    def log(self) -> Path:
        """First file of the log."""
        return self.logged.files[0]

    @property
    def steps(self) -> list[int]:
        """Numbers of the measured steps (those after the warm-up)."""
        return list(self.staged)

    @cached_property
    def stages(self) -> Mapping[str, float]:
        """Mean seconds of each stage over the steps after the warm-up, by name of the stage."""
        steps = self.staged.values()
        names = [name for name in (*stage_clock.STAGES, OTHER) if any(name in seconds for seconds in steps)]
        return {name: statistics.fmean(seconds.get(name, 0.0) for seconds in steps) for name in names}

    @property
    def step_seconds(self) -> float:
        """Mean duration of the steps after the warm-up."""
        return sum(self.stages.values())

    @cached_property
    def on(self) -> frozenset[str]:
        """Names of the features that were on in the run."""
        last = self.metrics[self.steps[-1]]
        return frozenset(name.split("/")[1] for name, value in last.items() if name.endswith("/applied") and value)

    @cached_property
    def noted(self) -> Mapping[int, Mapping[str, float]]:
        """Finite metrics of the feature telemetry in each step after the warm-up, by step number and name."""
        return {step: _with_prefix(TELEMETRY, self.metrics[step]) for step in self.steps}

    @cached_property
    def numbers(self) -> Mapping[str, float]:
        """Means of the metrics of the feature telemetry over the steps after the warm-up, by name; {} without telemetry."""
        return self.table("telemetry")

    def table(self, feature: str) -> Mapping[str, float]:
        """Returns the mean of each metric that ``feature`` logged, over the steps after the warm-up, by name."""
        of_steps = [_with_prefix(f"rl_accel/{feature}/", self.metrics[step]) for step in self.steps]
        names = dict.fromkeys(name for numbers in of_steps for name in numbers)
        return {name: statistics.fmean(numbers[name] for numbers in of_steps if name in numbers) for name in names}

    @cached_property
    def kept_files(self) -> Sequence[Path]:
        """Files in which the feature telemetry stored the times of all responses. Several files belong to different runs."""
        return sorted((self.folder if self.folder.is_dir() else self.folder.parent).rglob(FILE_NAME))

    @cached_property
    def kept(self) -> Mapping[int, Sequence[ResponseTimes]]:
        """Responses of all steps, by step number, with times in seconds since the first response of the step began.

        {} without telemetry, or unless there is exactly one of :attr:`kept_files`.
        """
        return stage_clock.read_kept(self.kept_files[0]) if self.numbers and len(self.kept_files) == 1 else {}

    @cached_property
    def responses(self) -> Mapping[int, Sequence[ResponseTimes]]:
        """Responses of the steps after the warm-up, by step number. Leaves out steps whose parts of generation are unknown."""
        known = [step for step, numbers in self.noted.items() if "concurrency" in numbers]
        return {step: self.kept[step] for step in known if step in self.kept}

    @property
    def parts(self) -> Mapping[str, float]:
        """Measured mean seconds of each part of the generation stage (a key of :data:`PARTS`); {} without telemetry."""
        return {name: self.numbers[name] for name in PARTS if name in self.numbers}

    @cached_property
    def validations(self) -> list[float]:
        """Seconds of each validation in the measured steps."""
        logged = [self.metrics[step].get(PREFIX + VALIDATION, 0.0) for step in self.steps]
        return [seconds for seconds in logged if 0 < seconds < math.inf]

    @cached_property
    def lengths(self) -> tuple[float, float] | None:
        """Mean and longest response length in tokens, each as the mean over the logged steps; None if unknown."""
        known = [lengths for metrics in self.metrics.values() if (lengths := _lengths(metrics))]
        if not known:
            return None
        return statistics.fmean(mean for mean, _ in known), statistics.fmean(longest for _, longest in known)

    @cached_property
    def tail_bound(self) -> float | None:
        """Most seconds of ``gen`` that could be saved: all beyond the mean length, if a rollout takes as long as its longest
        response, and this takes the same time for each token. None if unknown.
        """
        beyond = []
        for step, seconds in self.staged.items():
            if lengths := _lengths(self.metrics[step]):
                mean, longest = lengths
                beyond.append(seconds.get("gen", 0.0) * (1 - mean / longest))
        return statistics.fmean(beyond) if beyond else None

    @cached_property
    def updates_per_batch(self) -> int | None:
        """Number of optimizer steps for each batch by verl's launch line or configuration; None if unknown."""
        prompts = self.logged.number("train_batch_size")
        mini_batch = self.logged.number(r"(?:actor\.)?ppo_mini_batch_size")
        if self.logged.is_slime or not prompts or not mini_batch:
            return None
        epochs = self.logged.number(r"(?:actor\.)?ppo_epochs") or 1
        return math.ceil(prompts / mini_batch) * epochs

    @cached_property
    def zero_groups(self) -> tuple[float, str]:
        """Share of the text that skip_zero would leave out, and a sentence about it, from :func:`_zero_share`.

        (0, "") if skip_zero is on, or cannot be used in this run.
        """
        names = set().union(*self.metrics.values())
        is_possible = self.folder.is_dir() and "skip_zero" not in self.on and _NEVER_ZERO.isdisjoint(names)
        return _zero_share(self.folder) if is_possible else (0.0, "")

    @property
    def missing(self) -> list[str]:
        """Texts that say which results are unknown and why."""
        if not self.numbers:
            why = "telemetry is for verl" if self.logged.is_slime else "the run had no +rl_accel.telemetry.enable=True"
            return [f"waiting, rewards, completion times and preemptions as measured: {why}"]
        missing = []
        if len(self.kept_files) != 1:
            what = "what tail_batching and reward_timeout would save"
            missing.append(f"{what}: {len(self.kept_files)} files named {FILE_NAME} are here, not one")
        if "concurrency" not in self.numbers:
            missing.append("parts of generation: in this trainer mode responses are under way when the stage begins")
        if unknown := sum("preemptions" not in numbers for numbers in self.noted.values() if numbers):
            why = "a server's own counter could not be read (vLLM: rollout.disable_log_stats=False)"
            missing.append(f"preemptions of {unknown} of {len(self.steps)} steps: {why}")
        return missing


def _lengths(metrics: Mapping[str, float]) -> tuple[float, float] | None:
    """Returns the mean and the longest response length of a step; None if they are not logged."""
    mean = metrics.get("response_length/mean", 0.0)
    longest = metrics.get("response_length/max", 0.0)
    return (mean, longest) if 0 < mean <= longest < math.inf else None


def read_run(folder: Path, warmup: int = WARMUP, prompts: int | None = None, responses: int | None = None) -> Profile:
    """Reads the run in ``folder``, or in several paths joined by commas.

    Args:
        warmup: number of first steps to leave out of averages. The last step is never left out.
        prompts, responses: number of prompts in a batch, and of responses per prompt; None: as the log says.

    Raises:
        RlAccelError: ``folder`` contains no run, or more than one run.
        OSError: a file cannot be read.
    """
    logged = read(str(folder))
    logged.given = prompts, responses
    metrics = {
        step: {SLIME_NAMES.get(name, name): value for name, value in numbers.items()}
        for step, numbers in logged.steps.items()
    }
    for numbers in (
        metrics.values() if logged.is_slime and logged.overlaps else ()
    ):  # a step waits for a part of them only
        within = sum(numbers.get(PREFIX + name, 0.0) for name in ("update_weights", "save_checkpoint"))
        numbers[PREFIX + "gen"] = max(numbers.get("perf/train_wait_time", 0.0) - within, 0.0)
    staged = {step: seconds for step, numbers in metrics.items() if (seconds := stage_clock.stages(numbers))}
    if not staged:
        wanted = "timing_s/step, as verl logs it, or perf/step_time, as slime does"
        raise RlAccelError(f"{folder}: {logged}, but no step has its seconds: wanted {wanted}")
    timers = {PREFIX + name for name in ("step", *stage_clock.STAGES)}
    notes = list(logged.notes)
    if unknown := [str(step) for step, numbers in metrics.items() if step not in staged and timers & numbers.keys()]:
        notes.append(f"left out, because a stage or the step has an invalid duration: {', '.join(unknown)}")
    measured = dict(list(staged.items())[min(warmup, len(staged) - 1) :])
    return Profile(
        folder=folder,
        logged=logged,
        metrics=metrics,
        staged=measured,
        notes=notes,
    )


def _with_prefix(prefix: str, logged: Mapping[str, float]) -> dict[str, float]:
    """Returns the finite metrics whose names start with ``prefix``, by name without ``prefix``."""
    below = {name.removeprefix(prefix): value for name, value in logged.items() if name.startswith(prefix)}
    return {name: value for name, value in below.items() if math.isfinite(value)}


def _zero_share(folder: Path) -> tuple[float, str]:
    """Returns the share of a run's text whose advantage is 0 in verl, and a sentence about the share.

    The text is that in the files of verl's ``trainer.rollout_data_dir`` below ``folder``, measured in characters.
    """
    import torch

    rewards: dict[tuple[Path, str], list[float]] = defaultdict(list)  # of each response, by file and prompt
    sizes: Counter[tuple[Path, str]] = Counter()
    for path in folder.rglob("*.jsonl"):
        with contextlib.suppress(KeyError, TypeError, ValueError):  # another file, or a file that is being written
            for line in path.read_text(encoding="utf-8").split("\n") if path.stem.isdigit() else ():
                if line.strip():  # texts may hold other characters that end lines
                    row = json.loads(line)
                    rewards[path, row["input"]].append(float(row["score"]))
                    sizes[path, row["input"]] += len(row["input"]) + len(row["output"])
    zero_groups = []
    for group, values in rewards.items():
        scores = torch.tensor(values)
        # as verl computes advantages: eight rewards of 0.1 may differ from their mean
        if len(values) > 1 and not (scores - torch.mean(scores)).any():
            zero_groups.append(group)
    share = sum(sizes[group] for group in zero_groups) / max(sizes.total(), 1)
    how = f"at most: {len(zero_groups)} of {len(rewards)} groups, {share:.0%} of the text"
    return share, f"{how}; advantage 0 where rewards are compared in groups"


def format_seconds(value: float) -> str:
    """Returns a duration in seconds as text with three significant figures, in s or ms."""
    return f"{value:.3g} s" if value >= 0.1 else f"{value * 1000:.3g} ms"
