"""A run predicted from another one, and how far off that was."""

import json
from collections.abc import Iterable
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from rl_accel.config import Flags, resolve
from rl_accel.errors import RlAccelError
from rl_accel.features import REWARD_TIMEOUT, SAMPLER, TAIL_BATCHING
from rl_accel.plan.answers import PLAIN, Outcome, mean_of, outcome_of, rounds_of
from rl_accel.plan.setup import POLL_SECONDS, Setup, setup_of
from rl_accel.rollout.driver import METRICS_PREFIX
from rl_accel.telemetry import stage_clock
from rl_accel.telemetry.profile import Profile, format_seconds, read_run

_OURS, _MODE = "+rl_accel.", "trainer.v1.trainer_mode="


def flags_of_words(words: Iterable[str]) -> Flags:
    """Return the flags that the words of a command set, ``+rl_accel.…=…`` as verl takes them.

    Raises:
        ConfigError: a flag is wrong.
    """
    ours = [word.removeprefix("+") for word in words if word.startswith(_OURS)]
    given = OmegaConf.to_container(OmegaConf.from_dotlist(ours)) if ours else {}
    return resolve([("the command", given.get("rl_accel", {}) if isinstance(given, dict) else {})])


def asynchronous_mode(words: Iterable[str]) -> str:
    """Return the last word that sets verl's trainer mode, if that one is asynchronous: such a run is not predicted."""
    mode = next((word for word in reversed([*words]) if word.startswith(_MODE)), "")
    return mode if "async" in mode else ""


def words_of_run(folder: Path, run: Profile) -> list[str]:
    """Return the command of a run that ``rl-accel ab`` kept, else the features that its log shows, with defaults."""
    kept = (folder if folder.is_dir() else folder.parent) / "run.json"
    if kept.is_file():
        return list(json.loads(kept.read_text()).get("command", []))
    return [f"{_OURS}{name}.enable=True" for name in run.on]


def predict(setup: Setup, flags: Flags, steps: int, draws: int, warmup: int) -> Outcome:
    """Return what a run of ``steps`` steps with ``flags`` would measure in all but its first ``warmup``, the mean over draws."""
    in_rounds, limited = (flags.requested(feature) != "off" for feature in (TAIL_BATCHING, REWARD_TIMEOUT))
    poll = 0.0 if in_rounds or flags.requested(SAMPLER) != "off" else POLL_SECONDS
    tails, first = flags[TAIL_BATCHING] if in_rounds else PLAIN, min(warmup, steps - 1)
    played = (rounds_of(setup, tails, steps, draw, limited, ends=True) for draw in range(draws))
    return mean_of([outcome_of(setup, rounds[first:], poll, ends=True) for rounds in played])


def check(first: Path, second: Path, draws: int, warmup: int, console: Console) -> None:
    """Predict the run in ``second`` from the one in ``first``, and print both beside what was measured.

    Raises:
        RlAccelError: a run cannot be read, or the second one trains asynchronously.
    """
    target = read_run(second, warmup)
    words = words_of_run(second, target)
    if mode := asynchronous_mode(words):
        raise RlAccelError(f"--check: {second}: wanted a run whose rollouts end with their step, found {mode}")
    setup, _ = setup_of(read_run(first, warmup), {})
    found = predict(setup, flags_of_words(words), len(target.steps) + warmup, draws, warmup)
    table = Table("", "predicted", "measured", "off by", title=f"{second}, predicted from {first}")
    measured = {"rollout": target.stages.get("gen", 0.0), "step": target.step_seconds}
    for name, ours in zip(measured, (found.rollout_seconds, found.step_seconds), strict=True):
        theirs = measured[name]
        table.add_row(name, format_seconds(ours), format_seconds(theirs), f"{ours / theirs - 1:+.1%}")
    log = stage_clock.read_log(target.log).values()  # of all steps: what is wasted in one may be launched in another
    generated, wasted = (
        sum(metrics.get(f"{METRICS_PREFIX}tokens_{what}", 0.0) for metrics in log) for what in ("generated", "wasted")
    )
    if generated:
        share = wasted / generated
        table.add_row(
            "tokens wasted", f"{found.wasted:.1%}", f"{share:.1%}", f"{100 * (found.wasted - share):+.1f} points"
        )
    console.print(table)
