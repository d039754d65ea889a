"""The pictures of a report about rollouts: seconds by kind of round, queue, lengths trained on, reward against time and prompts."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rl_accel.lab.ab.rollout import ALL

_KIND_MARKS = {"short": "o", "long": "s", "final": "^", ALL: "."}


def seconds(figure: Any, summary: Mapping[str, Any], colours: Mapping[str, str]) -> bool:
    """Rollout seconds of each step of the first seed; a mark says the kind of its round."""
    axes = figure.subplots()
    for arm, series in _first_seed(summary):
        axes.plot(series["steps"], series["seconds"], color=colours[arm], lw=1, label=arm)
        for kind, mark in _KIND_MARKS.items():
            points = [index for index, found in enumerate(series["kind"]) if found == kind]
            axes.plot(
                [series["steps"][i] for i in points],
                [series["seconds"][i] for i in points],
                mark,
                color=colours[arm],
                ms=5 if kind != ALL else 3,
            )
    axes.set_title(
        "Rollout seconds (circle: short round, square: long, triangle: final, dot: waits for all)", fontsize=10
    )
    axes.set_xlabel("training step")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    return bool(axes.lines)


def queue(figure: Any, summary: Mapping[str, Any], colours: Mapping[str, str]) -> bool:
    """Deferred prompts that wait, step by step, first seed."""
    axes = figure.subplots()
    for arm, series in _first_seed(summary):
        if any(value is not None for value in series["queue"]):
            axes.step(series["steps"], series["queue"], where="post", color=colours[arm], label=arm)
    axes.set_title("Prompts that wait for a long round", fontsize=10)
    axes.set_xlabel("training step")
    axes.set_ylabel("prompts")
    return bool(axes.lines)


def lengths(figure: Any, summary: Mapping[str, Any], colours: Mapping[str, str]) -> bool:
    """Distribution of the lengths trained on, all seeds: what tail batching does to it, if anything, shows here."""
    left, right = figure.subplots(1, 2)
    share = np.linspace(0, 1, 101)
    for row in summary["rollout"]["arms"]:
        if row["lengths"]:
            for axes in (left, right):
                axes.plot(row["lengths"]["quantiles"], share, color=colours[row["arm"]], lw=1.5, label=row["arm"])
    left.set_xscale("symlog", linthresh=10)
    left.set_title("Lengths of all responses trained on", fontsize=10)
    right.set_ylim(0.9, 1.002)
    right.set_title("The longest tenth", fontsize=10)
    for axes in (left, right):
        axes.set_xlabel("characters")
        axes.set_ylabel("share of responses")
    return bool(left.lines)


def reward(figure: Any, summary: Mapping[str, Any], colours: Mapping[str, str]) -> bool:
    """Reward against wall-clock seconds of training and against prompts trained, every seed."""
    by_time, by_prompts = figure.subplots(1, 2, sharey=True)
    labelled = set()
    for run in summary["runs"]:
        series, arm = summary["rollout"]["series"].get(run["name"]), run["arm"]
        if series is None:
            continue
        style = {"color": colours[arm], "lw": 1.2, "alpha": 0.85, "label": None if arm in labelled else arm}
        labelled.add(arm)
        by_time.plot(series["wall_seconds"], series["reward"], **style)
        if series["prompts"]:
            by_prompts.plot(series["prompts"], series["reward"], **style)
    by_time.set_title("Reward against wall-clock time", fontsize=10)
    by_time.set_xlabel("seconds of training")
    by_time.set_ylabel("reward")
    by_prompts.set_title("Reward against prompts trained", fontsize=10)
    by_prompts.set_xlabel("prompts")
    return bool(by_time.lines)


def _first_seed(summary: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Each arm with the series of its first run."""
    found: dict[str, Mapping[str, Any]] = {}
    for run in summary["runs"]:
        series = summary["rollout"]["series"].get(run["name"])
        if series is not None:
            found.setdefault(run["arm"], series)
    return list(found.items())
