"""A run predicted from another one, and how far off that was."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from rl_accel.config import Flags, resolve
from rl_accel.features import REWARD_TIMEOUT, SAMPLER, TAIL_BATCHING
from rl_accel.plan.answers import PLAIN, Outcome, mean_of, outcome_of, rounds_of
from rl_accel.plan.setup import POLL_SECONDS, Setup, setup_of
from rl_accel.rollout.driver import METRICS_PREFIX
from rl_accel.telemetry import stage_clock
from rl_accel.telemetry.profile import Profile, format_seconds, read_run

_OURS = "+rl_accel."


@dataclass(frozen=True)
class Measured:
    """Means of a run's measured steps; ``wasted`` is of all its steps, None without tail batching."""

    rollout_seconds: float
    step_seconds: float
    wasted: float | None


def flags_of_words(words: Iterable[str]) -> Flags:
    """Return the flags that the words of a command set, ``+rl_accel.…=…`` as verl takes them.

    Raises:
        ConfigError: a flag is wrong.
    """
    ours = [word.removeprefix("+") for word in words if word.startswith(_OURS)]
    given = OmegaConf.to_container(OmegaConf.from_dotlist(ours)) if ours else {}
    return resolve([("the command", given.get("rl_accel", {}) if isinstance(given, dict) else {})])


def flags_of_run(folder: Path, run: Profile) -> Flags:
    """Return the flags of a run: of the command that ``rl-accel ab`` kept, else what its log shows, with defaults."""
    kept = (folder if folder.is_dir() else folder.parent) / "run.json"
    if kept.is_file():
        return flags_of_words(json.loads(kept.read_text()).get("command", []))
    return flags_of_words(f"{_OURS}{name}.enable=True" for name in run.on)


def predict(setup: Setup, flags: Flags, steps: int, draws: int, warmup: int) -> Outcome:
    """Return what a run of ``steps`` steps with ``flags`` would measure in all but its first ``warmup``, the mean over draws."""
    in_rounds = flags.requested(TAIL_BATCHING) != "off"
    noticed_at_once = in_rounds or flags.requested(SAMPLER) != "off"
    found = []
    for draw in range(draws):
        played = rounds_of(
            setup,
            flags[TAIL_BATCHING] if in_rounds else PLAIN,
            steps,
            draw,
            timeout=flags.requested(REWARD_TIMEOUT) != "off",
            ends=True,
        )
        found.append(
            outcome_of(setup, played[min(warmup, steps - 1) :], 0.0 if noticed_at_once else POLL_SECONDS, ends=True)
        )
    return mean_of(found)


def measured(run: Profile) -> Measured:
    """Return what a run measured."""
    generated = wasted = 0.0
    for metrics in stage_clock.read_log(run.log).values():
        generated += metrics.get(METRICS_PREFIX + "tokens_generated", 0.0)
        wasted += metrics.get(METRICS_PREFIX + "tokens_wasted", 0.0)
    return Measured(run.stages.get("gen", 0.0), run.step_seconds, wasted / generated if generated else None)


def check(first: Path, second: Path, draws: int, warmup: int, console: Console) -> None:
    """Predict the run in ``second`` from the one in ``first``, and print both beside what was measured."""
    source, target = read_run(first, warmup), read_run(second, warmup)
    setup, _ = setup_of(source, {})
    steps = len(target.steps) + warmup
    table = Table("", "predicted", "measured", "off by", title=f"{second}, predicted from {first}")
    for column in table.columns[1:]:
        column.justify = "right"
    found, truth = predict(setup, flags_of_run(second, target), steps, draws, warmup), measured(target)
    for name, ours, theirs in (
        ("rollout", found.rollout_seconds, truth.rollout_seconds),
        ("step", found.step_seconds, truth.step_seconds),
    ):
        table.add_row(name, format_seconds(ours), format_seconds(theirs), f"{ours / theirs - 1:+.1%}")
    if truth.wasted is not None:
        off = 100 * (found.wasted - truth.wasted)
        table.add_row("tokens wasted", f"{found.wasted:.1%}", f"{truth.wasted:.1%}", f"{off:+.1f} points")
    console.print(table)
