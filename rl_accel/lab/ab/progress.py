"""Progress of the runs: one bar a run on a terminal, plain lines now and then elsewhere."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from rl_accel.lab.ab.plan import RunPlan
from rl_accel.lab.ab.runner import RunResult

_PLAIN_EVERY_S = 15.0


@dataclass
class _Clock:
    """Arrival times of a run's steps, from which the time left is estimated."""

    start: float
    arrivals: list[float] = field(default_factory=list)

    @property
    def step_s(self) -> float | None:
        gaps = [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]
        return statistics.median(gaps) if gaps else None


class ProgressView:
    """The :class:`~rl_accel.lab.ab.runner.Watcher` of the command line. Use it as a context manager."""

    def __init__(self, console: Console, plans: Sequence[RunPlan], reward: str) -> None:
        self._console = console
        self._reward = reward
        self._left = {plan.name: plan for plan in plans}
        self._clocks: dict[str, _Clock] = {}
        self._durations: list[float] = []
        self._last_line = 0.0
        self._tasks: dict[str, TaskID] = {}
        self._width = max((len(plan.name) for plan in plans), default=0)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> "ProgressView":
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.stop()

    def started(self, plan: RunPlan) -> None:
        self._clocks[plan.name] = _Clock(time.monotonic())
        self._tasks[plan.name] = self._bars.add_task(
            plan.name.ljust(self._width), total=plan.steps, note="starting the trainer"
        )
        self._plain(f"{plan.name}: starting, {plan.steps} steps, log {plan.directory / 'train.log'}", always=True)

    def step(self, plan: RunPlan, step: int, metrics: Mapping[str, float]) -> None:
        if step < 1:
            return
        clock = self._clocks[plan.name]
        clock.arrivals.append(time.monotonic())
        reward = metrics.get(self._reward, math.nan)
        note = f"reward {reward:.4g}"
        if clock.step_s is not None:
            note += f" | {clock.step_s:.2f} s/step | {_clock_text(self._seconds_left(plan, step))} left"
        self._bars.update(self._tasks[plan.name], completed=step, note=note)
        self._plain(f"{plan.name}: step {step}/{plan.steps} | {note}", always=step >= plan.steps)

    def tick(self) -> None:
        for name, task in self._tasks.items():
            clock = self._clocks[name]
            if not clock.arrivals and name in self._left:
                self._bars.update(task, note=f"starting the trainer, {time.monotonic() - clock.start:.0f} s")

    def ended(self, plan: RunPlan, result: RunResult) -> None:
        self._left.pop(plan.name, None)
        self._durations.append(result.seconds)
        clock = self._clocks.get(plan.name)
        verb = result.status if clock else "kept from an earlier call"
        text = f"{plan.name}: {verb}, {result.message}, {result.seconds:.0f} s"
        if plan.name in self._tasks:
            colour = "green" if result.status == "done" else "red"
            self._bars.update(self._tasks[plan.name], note=f"[{colour}]{result.status}[/], {result.seconds:.0f} s")
            self._plain(text, always=True)
        else:
            self._console.print(text, highlight=False, markup=False)

    def _seconds_left(self, plan: RunPlan, step: int) -> float:
        clock = self._clocks[plan.name]
        step_s = clock.step_s or 0.0
        start_up = clock.arrivals[0] - clock.start - step_s
        others = [other for name, other in self._left.items() if name != plan.name]
        whole = statistics.mean(self._durations) if self._durations else start_up + plan.steps * step_s
        return (plan.steps - step) * step_s + len(others) * whole

    def _plain(self, text: str, always: bool = False) -> None:
        if self._console.is_terminal:
            return
        if always or time.monotonic() - self._last_line > _PLAIN_EVERY_S:
            self._last_line = time.monotonic()
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _clock_text(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    return f"{minutes}:{rest:02d}"
