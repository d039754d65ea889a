"""The log of a run, whatever logger wrote it: metrics by step, and settings of the launch line."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from rl_accel.telemetry.stage_clock import OVERLAPPING, PREFIX

TELEMETRY = "rl_accel/telemetry/"
"""Prefix of the metrics of the feature telemetry."""
_LAUNCH_CHARACTERS = 1_000_000
"""Characters at the start of a file in which its kind, the launch line and the configuration are searched."""
_MOST_CONSOLES = 8
"""Maximum number of console files beside a log in which its launch line is searched: more are of other runs."""


@dataclass
class Logged:
    """Log of one run.

    Attributes:
        source: kind of log, such as "TensorBoard".
        files: log files that were read.
        steps: metrics of each step, by step number.
        restarts: steps at which the run was restarted.
        workers: Ray's prefixes of the processes that logged the steps, see :func:`read_console`. Only for verl's console.
        responses: number of trained responses of a step, if slime logged it; otherwise 0.
        given: batch size and number of responses per prompt that the user gave, which count before those of the log.
    """

    source: str = ""
    files: list[Path] = field(default_factory=list)
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    restarts: list[int] = field(default_factory=list)
    workers: list[str] = field(default_factory=list)
    responses: int = 0
    given: tuple[int | None, int | None] = (None, None)

    def __str__(self) -> str:
        words = [self.source, _counted(len(self.steps), "step")]
        if self.restarts:
            words.append(_counted(len(self.restarts), "restart"))
        has_telemetry = any(name.startswith(TELEMETRY) for name in self.metric_names)
        return ", ".join([*words, "telemetry" if has_telemetry else "no telemetry"])

    @property
    def metric_names(self) -> set[str]:
        """Names of all metrics of all steps."""
        return set().union(*self.steps.values())

    @property
    def is_mixed(self) -> bool:
        """True if several processes logged steps in turns: steps of several runs cannot be told apart."""
        return len(set(self.workers)) < len(self.workers)

    @property
    def notes(self) -> list[str]:
        """Sentences about data that were left out, and about several runs on one console."""
        notes = []
        if self.restarts:
            steps = ", ".join(map(str, self.restarts))
            notes.append(f"the run began again at step {steps}: what was logged before from there on is left out")
        if self.is_mixed:
            names = ", ".join(sorted({worker.strip() for worker in self.workers}))
            notes.append(f"several processes log steps in turns ({names}): runs on one console cannot be told apart")
        training = [
            step for step in self.steps.values() if any(name.startswith(("actor/", "critic/")) for name in step)
        ]
        cut = sum(f"{PREFIX}step" not in step for step in training)
        if 0 < cut < len(training):
            why = "because other output cuts their lines"
            notes.append(f"{cut} of {len(training)} steps are left out: they have no timing_s/step, perhaps {why}")
        return notes

    @property
    def is_slime(self) -> bool:
        """True for a log of slime, False for a log of verl."""
        return any("perf/step_time" in step for step in self.steps.values())

    @property
    def overlaps(self) -> bool:
        """True if rollouts run during training, as with slime's ``train_async.py``, and one_step_off and fully_async of verl."""
        steps = self.steps.values()
        needed = ("perf/rollout_time", "perf/train_wait_time")
        late = [step[needed[0]] > step[needed[1]] for step in steps if all(name in step for name in needed)]
        return 2 * sum(late) > len(late) or not all(map(OVERLAPPING.isdisjoint, steps))

    @cached_property
    def launch_texts(self) -> tuple[Sequence[str], Sequence[str]]:
        """Texts in which the launch line or the configuration may stand: of the log itself, and of consoles beside it."""
        folders = dict.fromkeys(file.parent for file in self.files)
        commands = [file for folder in folders for file in folder.glob("run.json")]
        own = [file for file in self.files if "tfevents" not in file.name] + commands
        beside = [file for folder in folders for name in ("*.log", "*.out") for file in folder.glob(name)]
        if "console" in self.source or len(beside) > _MOST_CONSOLES:
            beside = []
        return [head_of(file) for file in own], [head_of(file) for file in beside]

    def settings(self, name: str) -> list[str]:
        """Returns the values of the option or configuration key ``name`` of the launched run, as text, in the order of the log.

        ``name`` is a pattern. If the log has none, the values are of consoles beside it, if their last ones agree.
        """
        pattern = re.compile(rf"(?<![A-Za-z0-9_]){name}['\"]?[ .=:]+['\"]?([\w+-][\w.+-]*)")
        own, others = ([pattern.findall(text) for text in texts] for texts in self.launch_texts)
        known = [str(value) for values in own for value in values]
        beside = [str(value) for values in others for value in values]
        agree = len({values[-1] for values in others if values}) == 1
        return known or (beside if agree else [])

    def setting(self, name: str) -> str | None:
        """Returns the last value of the :meth:`settings` ``name``; None if it is unknown."""
        values = self.settings(name)
        return values[-1] if values else None

    def number(self, name: str) -> int | None:
        """Returns the whole number that is the :meth:`setting` ``name``; None if it is unknown."""
        value = self.setting(name)
        return int(value) if value and value.isdigit() else None

    def is_off(self, name: str, default: bool = False) -> bool:
        """True if the log shows that the setting ``name`` is false: by its values, or by a launch line of verl without it.

        ``default`` is verl's default, which holds without a value.
        """
        values = self.settings(name)
        if values:
            return all(value.lower() == "false" for value in values)
        texts = [text for texts in self.launch_texts for text in texts]
        return not default and any("main_ppo" in text or "actor_rollout_ref." in text for text in texts)

    @property
    def batch(self) -> tuple[int | None, int | None]:
        """Number of prompts in a batch and of responses per prompt: as given by the user or in the log; None if unknown."""
        prompts = self.given[0] or self.number(r"(?:train_batch_size|rollout[-_]batch[-_]size)")
        responses = self.given[1] or self.number(r"(?:rollout[._]n|n[-_]samples[-_]per[-_]prompt)")
        if self.responses and responses and not prompts:
            prompts = self.responses // responses
        if self.responses and prompts and not responses:
            responses = self.responses // prompts
        return prompts, responses


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def head_of(file: Path, size: int = _LAUNCH_CHARACTERS) -> str:
    """Returns the first ``size`` characters of a file; bytes that are no UTF-8 become ``\ufffd``."""
    with file.open(encoding="utf-8", errors="replace") as text:
        return text.read(size)
