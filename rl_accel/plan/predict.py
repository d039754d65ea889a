"""Prediction of the step times of one run from another run, and comparison with the measured times (``rl-accel plan --check``)."""

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from rl_accel.config import Flags, resolve
from rl_accel.errors import RlAccelError
from rl_accel.features import REWARD_TIMEOUT, SAMPLER, SKIP_ZERO, TAIL_BATCHING
from rl_accel.files import BAD_RECORD
from rl_accel.plan.answers import PLAIN, Prediction, mean_of, outcome_of, rounds_of
from rl_accel.plan.setup import Setup, setup_of
from rl_accel.rollout.round_driver import METRICS_PREFIX
from rl_accel.rollout.workload import Floats
from rl_accel.telemetry.aggregates import POLL_SECONDS, Range
from rl_accel.telemetry.profile import Profile, format_seconds, read_run

_OURS, _MODE = "rl_accel.", "trainer.v1.trainer_mode="


def flags_of_words(words: Iterable[str]) -> Flags:
    """Returns the rl-accel flags among the words of a command, such as ``+rl_accel.gae.enable=True``.

    Raises:
        ConfigError: a flag is invalid.
    """
    own_words = [word for word in (word.lstrip("+") for word in words) if word.startswith(_OURS)]
    sections = OmegaConf.to_container(OmegaConf.from_dotlist(own_words)) if own_words else {}
    return resolve([("the command", sections.get("rl_accel", {}) if isinstance(sections, dict) else {})])


def asynchronous_mode(words: Iterable[str]) -> str:
    """Returns the word of a verl command that selects an asynchronous mode of the trainer; "" if there is none."""
    mode = next((word for word in reversed([*words]) if word.lstrip("+").startswith(_MODE)), "")
    return mode if "async" in mode else ""


def words_of_run(folder: Path, run: Profile) -> list[str]:
    """Returns the words of the command that started a run, if ``rl-accel ab`` has saved it in ``folder``.

    Otherwise, returns words that turn on the features that were on according to the run's log.
    """
    kept = (folder if folder.is_dir() else folder.parent) / "run.json"
    with contextlib.suppress(OSError, *BAD_RECORD):  # no such file, or a file of another program
        return [str(word) for word in json.loads(kept.read_text())["command"]]
    return [f"+{_OURS}{name}.enable=True" for name in run.on]


def predict(setup: Setup, flags: Flags, steps: int, draws: int, warmup: int) -> tuple[Prediction, Floats]:
    """Predicts the steps of a run with the rl-accel flags ``flags``. ``setup`` describes another run, which was measured.

    Args:
        steps, warmup: number of steps of the predicted run, and number of first steps to leave out.
        draws: number of random draws, each of which simulates the whole run.

    Returns:
        The mean prediction over all draws; the mean rollout seconds of each draw, shape [draws]. These seconds are multiplied by
            random ratios of measured to simulated seconds (``setup.uneven``), so that their spread includes the model's error.
    """
    in_rounds, limited = (flags.requested(feature) != "off" for feature in (TAIL_BATCHING, REWARD_TIMEOUT))
    poll = 0.0 if in_rounds or flags.requested(SAMPLER) != "off" else POLL_SECONDS
    setup = replace(setup, poll_seconds=poll)
    tails, first = flags[TAIL_BATCHING] if in_rounds else PLAIN, min(warmup, steps - 1)
    predictions, uneven = [], []
    for draw in range(draws):
        rounds = rounds_of(setup, tails, steps, draw, limited, ends=True)[first:]
        skipping = setup.skipping_zero(draw) if flags.requested(SKIP_ZERO) != "off" else setup
        predictions.append(outcome_of(skipping, rounds, ends=True))
        rng, seconds = np.random.default_rng(draw), [played.metrics.rollout_seconds for played in rounds]
        again = rng.choice(setup.uneven, len(setup.uneven))  # bootstrap, because a few ratios are uncertain
        uneven.append(predictions[-1].rollout_seconds * np.average(rng.choice(again, len(rounds)), weights=seconds))
    return mean_of(predictions), np.array(uneven)


def check_prediction(first: Path, second: Path, options: Mapping[str, Any], console: Console) -> None:
    """Predicts the run in ``second`` from the run in ``first``. Prints predicted and measured seconds and wasted tokens.

    ``options`` are those of ``rl-accel plan``, by name.

    Raises:
        RlAccelError: a run cannot be read, or the second run trains asynchronously.
    """
    draws, warmup = options["draws"], options["warmup"]
    target = read_run(second, warmup)
    words = words_of_run(second, target)
    if mode := asynchronous_mode(words):
        raise RlAccelError(f"--check: {second}: wanted a run whose rollouts end with their step, found {mode}")
    setup, _ = setup_of(read_run(first, warmup, options["responses"]), options)
    prediction, uneven = predict(setup, flags_of_words(words), len(target.steps) + warmup, draws, warmup)
    columns = ("", "predicted", "95% interval", "measured", "off by", "inside")
    table = Table(*columns, title=f"{second}, predicted from {first}")
    measured = {"rollout": target.stages.get("gen", 0.0), "step": target.step_seconds}
    for name, predicted in zip(measured, (prediction.rollout_seconds, prediction.step_seconds), strict=True):
        span = Range.of(uneven + predicted - prediction.rollout_seconds)
        inside = "yes" if span.low <= measured[name] <= span.high else "no"
        low, high, *seconds = map(format_seconds, (span.low, span.high, predicted, measured[name]))
        off = f"{predicted / measured[name] - 1:+.1%}"
        table.add_row(name, seconds[0], f"{low} to {high}", seconds[1], off, inside)
    log = target.metrics.values()  # not only measured steps: tokens may be wasted in a later step than launched
    generated, wasted = (
        sum(metrics.get(f"{METRICS_PREFIX}tokens_{what}", 0.0) for metrics in log) for what in ("generated", "wasted")
    )
    if generated:
        share = wasted / generated
        off = f"{100 * (prediction.wasted - share):+.1f} points"
        table.add_row("tokens wasted", f"{prediction.wasted:.1%}", "", f"{share:.1%}", off)
    console.print(table)
