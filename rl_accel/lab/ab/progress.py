"""Progress display of ``rl-accel ab``."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

from rich.console import Console
from rich.text import Text

from rl_accel.lab.ab.recipe import RunPlan

_PLAIN_EVERY_S = 15.0
"""Minimum seconds between two progress lines if the output goes to a file or a pipe, so that an hour is a page of lines."""


class ProgressView:
    """Progress of the runs: one line that changes on a terminal (the context manager ``line``), else printed lines."""

    def __init__(self, console: Console, plans: Sequence[RunPlan], reward: str) -> None:
        self.line = console.status("")
        self._console = console
        self._reward = reward
        self._runs_left = len(plans)
        self._durations: list[float] = []
        self._steps = 0
        """Number of logged steps of the current run."""
        self._began = self._first_step = self._last_line = 0.0

    def started(self, plan: RunPlan) -> None:
        self._began = time.monotonic()
        self._steps = 0
        self._show(f"{plan.name}: starting, {plan.steps} steps, log {plan.directory / 'train.log'}", always=True)

    def step(self, plan: RunPlan, step: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        self._steps += 1
        text = f"{plan.name}: step {step}/{plan.steps} | reward {metrics.get(self._reward, math.nan):.4g}"
        if self._steps == 1:
            self._first_step = now
        else:
            step_s = (now - self._first_step) / (self._steps - 1)
            this_run = self._first_step - self._began + (plan.steps - 1) * step_s
            later_runs = (self._runs_left - 1) * statistics.mean(self._durations or [this_run])
            time_left = timedelta(seconds=round((plan.steps - step) * step_s + later_runs))
            text += f" | {step_s:.2f} s/step | {time_left} left"
        self._show(text, always=step >= plan.steps)

    def tick(self, plan: RunPlan) -> None:
        if not self._steps:
            self._show(f"{plan.name}: waiting for Ray and the trainer, {time.monotonic() - self._began:.0f} s")

    def ended(self, plan: RunPlan, status: str, seconds: float, first_step_at: float | None) -> None:
        self._runs_left -= 1
        self._durations.append(seconds)
        text = f"{plan.name}: {status}, {seconds:.0f} s"
        if first_step_at is not None:
            text += f", of which {first_step_at:.0f} s until the first step had ended"
        self._console.print(text, soft_wrap=True)

    def _show(self, text: str, always: bool = False) -> None:
        """Shows ``text``. If the output is no terminal, prints it only every ``_PLAIN_EVERY_S`` seconds, unless ``always``."""
        self.line.update(Text(text))
        if not self._console.is_terminal and (always or time.monotonic() - self._last_line > _PLAIN_EVERY_S):
            self._last_line = time.monotonic()
            self._console.print(text, soft_wrap=True)
