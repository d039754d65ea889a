"""A run predicted from another one, and how far off that was."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from rl_accel.config import Flags, resolve
from rl_accel.errors import RlAccelError
from rl_accel.features import REWARD_TIMEOUT, SAMPLER, TAIL_BATCHING
from rl_accel.plan.answers import PLAIN, Outcome, mean_of, outcome_of, rounds_of
from rl_accel.plan.setup import POLL_SECONDS, Setup, setup_of
from rl_accel.rollout.driver import METRICS_PREFIX
from rl_accel.rollout.simulation import Floats
from rl_accel.telemetry.logs import read_log
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


def predict(setup: Setup, flags: Flags, steps: int, draws: int, warmup: int) -> tuple[Outcome, Floats]:
    """Return what a run of ``steps`` steps with ``flags`` would measure in all but its first ``warmup``: the mean over draws, and
    the rollout seconds of each draw if its rollouts are as uneven as those of the run that ``setup`` is of.
    """
    in_rounds, limited = (flags.requested(feature) != "off" for feature in (TAIL_BATCHING, REWARD_TIMEOUT))
    poll = 0.0 if in_rounds or flags.requested(SAMPLER) != "off" else POLL_SECONDS
    tails, first = flags[TAIL_BATCHING] if in_rounds else PLAIN, min(warmup, steps - 1)
    found, uneven = [], []
    for draw in range(draws):
        rounds = rounds_of(setup, tails, steps, draw, limited, ends=True)[first:]
        found.append(outcome_of(setup, rounds, poll, ends=True))
        rng, seconds = np.random.default_rng(draw), [played.metrics.rollout_seconds for played in rounds]
        again = rng.choice(setup.uneven, len(setup.uneven))  # what a few rollouts show is uncertain itself
        uneven.append(found[-1].rollout_seconds * np.average(rng.choice(again, len(rounds)), weights=seconds))
    return mean_of(found), np.array(uneven)


def interval(seconds: Floats) -> list[float]:
    """Return between which values 95% of the draws lie."""
    ends: list[float] = np.quantile(seconds, [0.025, 0.975]).tolist()
    return ends


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
    found, uneven = predict(setup, flags_of_words(words), len(target.steps) + warmup, draws, warmup)
    columns = ("", "predicted", "95% interval", "measured", "off by", "inside")
    table = Table(*columns, title=f"{second}, predicted from {first}")
    measured = {"rollout": target.stages.get("gen", 0.0), "step": target.step_seconds}
    for name, ours in zip(measured, (found.rollout_seconds, found.step_seconds), strict=True):
        theirs = measured[name]
        low, high = interval(uneven + ours - found.rollout_seconds)
        span = f"{format_seconds(low)} to {format_seconds(high)}"
        seconds = format_seconds(ours), span, format_seconds(theirs)
        table.add_row(name, *seconds, f"{ours / theirs - 1:+.1%}", "yes" if low <= theirs <= high else "no")
    log = read_log(target.log).values()  # of all steps: what is wasted in one may be launched in another
    generated, wasted = (
        sum(metrics.get(f"{METRICS_PREFIX}tokens_{what}", 0.0) for metrics in log) for what in ("generated", "wasted")
    )
    if generated:
        share = wasted / generated
        off = f"{100 * (found.wasted - share):+.1f} points"
        table.add_row("tokens wasted", f"{found.wasted:.1%}", "", f"{share:.1%}", off)
    console.print(table)
