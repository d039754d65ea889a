"""Text tables of an A/B report, for the HTML page and the console."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_accel.lab.ab.convergence import AXES
from rl_accel.lab.ab.stats import ALL, KINDS
from rl_accel.telemetry.profile import format_seconds

_ROLLOUT = {"wasted": ".1%", "lost": ".0f"}
_EPOCH = ("epoch", "prompts", "once", "again", "rejected", "failed", "missing")


@dataclass(frozen=True)
class TextTable:
    """A table of a report, with text cells. ``notes`` are sentences shown below the table."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def tables(summary: Mapping[str, Any]) -> list[TextTable]:
    """Returns the tables of an A/B report, without those that have neither rows nor notes."""
    shown = [_stages(summary), *(_rollouts(summary["rollout"]) if summary["rollout"] else ()), *_learning(summary)]
    rows = []
    for check in summary["checks"]:
        note = " (warning only)" if check["warn_only"] and check["status"] == "red" else ""
        rows.append([check["name"], check["status"] + note, check["detail"]])
    shown.append(TextTable("Checks", ["check", "result", "detail"], rows))
    return [table for table in shown if table.rows or table.notes]


def _stages(summary: Mapping[str, Any]) -> TextTable:
    baseline = summary["recipe"]["baseline"]
    arms = [arm for arm in summary["recipe"]["arms"] if any(arm in row["arms"] for row in summary["stages"])]
    others = [arm for arm in arms if arm != baseline]
    rows = []
    for row in summary["stages"]:
        cells = [cell_text(row["arms"].get(arm, {}).get("mean"), "s") for arm in arms]
        for ratio in (row["ratios"].get(arm, {}) for arm in others):
            cells += [*_ratio(ratio), cell_text(ratio.get("saved_s"), ".3f")]
        rows.append([row["stage"], *cells])
    names = [[f"{baseline}/{arm}" if len(others) > 1 else "ratio", "95% interval", "seconds saved"] for arm in others]
    spans = sorted({tuple(ends) for ends in summary["measured_steps"].values() if ends})
    title = f"Mean time of each stage, steps {', '.join('{}-{}'.format(*ends) for ends in spans)}; "
    title += f"at most {summary['recipe']['metrics']['warmup_steps']} steps of warm-up of each run are not counted"
    note = f"Ratios are {baseline} divided by the arm; intervals are noise between steps, not between machines."
    return TextTable(title, ["stage", *arms, *itertools.chain(*names)], rows, [note] if others else [])


def _rollouts(section: Mapping[str, Any]) -> Iterator[TextTable]:
    kinds = [kind for kind in (*KINDS, ALL) if any(kind in row["kinds"] for row in section["arms"])]
    used = [key for key in _ROLLOUT if any(row.get(key) is not None for row in section["arms"])]
    rows = []
    for row in section["arms"]:
        parts = [row["kinds"].get(kind) for kind in kinds]
        cells = [f"{format_seconds(part['seconds'])} x {part['steps']}" if part else "" for part in parts]
        cells += [cell_text(row[key], _ROLLOUT[key]) for key in used]
        rows.append([row["arm"], cell_text(row["seconds"], "s"), *_ratio(row), *cells])
    columns = ["arm", "all steps", "ratio", "95% interval", *kinds, *used]
    note = "all: rounds that wait for each response. wasted: share of generated tokens. lost: number of prompts."
    yield TextTable("Mean rollout seconds a step", columns, rows, [note])
    epochs = [(run["run"], epoch) for run in section["ledgers"] for epoch in run["epochs"]]
    counts = [[run, *(str(epoch[key]) for key in _EPOCH)] for run, epoch in epochs]
    yield TextTable("Every prompt of an epoch is trained once", ["run", *_EPOCH], counts)


def _learning(summary: Mapping[str, Any]) -> Iterator[TextTable]:
    section = summary["convergence"]
    baseline = summary["recipe"]["baseline"]
    arms = list(summary["recipe"]["arms"])
    levels = []
    for row in section["rows"]:
        last = f" of {cell_text(row['last'], '.4g')}" if row["end"] < row["last"] else ""
        start = [row["arm"], row["metric"], f"{cell_text(row['end'], '.4g')}{last} {AXES[row['axis']]}"]
        low, high = (cell_text(row[key], "+.3g") for key in ("low", "high"))
        numbers = [cell_text(row["baseline"], ".4g"), cell_text(row["value"], ".4g"), f"{row['difference']:+.3g}"]
        levels.append([*start, *numbers, low and f"{low} to {high}", f"{row['margin']:.3g}", row["answer"]])
    columns = ["arm", "metric", "at", baseline, "arm's", "difference", "95% interval", "margin", "answer"]
    yield TextTable("Did it change learning?", columns, levels, section["notes"])
    data = [[label, *(cell_text(means.get(arm), ".4g") for arm in arms)] for label, means in summary["data"].items()]
    yield TextTable("What changed in the data", ["mean over runs", *arms], data)


def _ratio(row: Mapping[str, Any]) -> list[str]:
    low, high = (cell_text(row.get(key), ".2f") for key in ("low", "high"))
    return [cell_text(row.get("ratio"), ".2fx"), low and f"{low}-{high}"]


def cell_text(value: float | None, form: str) -> str:
    """Formats a number for a table cell; "" if ``value`` is None or not finite.

    ``form``: a Python number format such as ``.2f``; ``.2fx`` for a text such as "1.50x"; ``s`` for a duration in seconds.
    """
    if value is None or not math.isfinite(value):
        return ""
    if form == ".4g" and abs(value) >= 1000:  # a number of prompts should not look like 2.3e+04
        form = ",.0f"
    return format_seconds(value) if form == "s" else f"{value:{form.rstrip('x')}}{'x' * form.endswith('x')}"
