"""The report of an A/B: ``summary.json``, plots and a self-contained ``report.html``; and its console form."""

import base64
import shlex
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_accel.lab.ab import plots, summary
from rl_accel.lab.ab.extra import needs
from rl_accel.lab.ab.recipe import Recipe
from rl_accel.lab.ab.rollout import ALL, KINDS
from rl_accel.lab.ab.runner import RunResult, last_lines

_COLOURS = {"green": "green", "red": "red", "skipped": "yellow"}


def build(recipe: Recipe, recipe_file: Path, out: Path, results: Sequence[RunResult], asked: int) -> dict[str, Any]:
    """Write summary.json, the plots and report.html into ``out`` and return the summary."""
    found = summary.summarise(recipe, recipe_file, out, results, asked)
    summary.write(found, out / "summary.json")
    pictures = plots.draw(found, out)
    tails = {r.name: last_lines(out / r.name / "train.log") for r in results if r.status in ("failed", "timeout")}
    (out / "report.html").write_text(render(found, pictures, tails), encoding="utf-8")
    return found


def render(found: dict[str, Any], pictures: Sequence[Path], tails: dict[str, str]) -> str:
    """Return the HTML of a summary, pictures embedded; ``tails`` are the last log lines of failed runs."""
    jinja2 = needs("jinja2")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {
        "seconds": lambda value: "-" if value is None else summary.seconds(value),
        "figures": lambda value: "-" if value is None else f"{value:.6g}",
        "small": lambda value: "-" if value is None else f"{value:.1e}",
        "times": lambda value: "-" if value is None else f"{value:.2f}x",
        "command": shlex.join,
    }
    text = resources.files("rl_accel.lab.ab").joinpath("report.html.j2").read_text(encoding="utf-8")
    images = [(path.stem.replace("_", " "), base64.b64encode(path.read_bytes()).decode()) for path in pictures]
    arms = [arm for arm in found["recipe"]["arms"] if any(run["arm"] == arm for run in found["runs"])]
    others = [arm for arm in arms if arm != found["recipe"]["baseline"]]
    html: str = environment.from_string(text).render(
        s=found, images=images, tails=tails, arms=arms, others=others, warmup=warmup_text(found), kinds=_kinds(found)
    )
    return html


def warmup_text(found: dict[str, Any]) -> str:
    """Say which steps the stage times are taken from."""
    spans = {tuple(ends) for ends in found["measured_steps"].values() if ends}
    skipped = found["recipe"]["metrics"]["warmup_steps"]
    text = ", ".join(f"{first}-{last}" for first, last in sorted(spans))
    return f"steps {text}; the first {skipped} of each run are warm-up and not counted" if spans else "no steps"


def show(found: dict[str, Any], console: Console) -> None:
    """Print stage table, checks and verdicts."""
    names, baseline = found["recipe"]["metrics"], found["recipe"]["baseline"]
    arms = [arm for arm in found["recipe"]["arms"] if any(arm in row["arms"] for row in found["stages"])]
    others = [arm for arm in arms if arm != baseline]
    if found["stages"]:
        console.print(
            f"{names['average'].capitalize()} time of each stage, {warmup_text(found)}", highlight=False, soft_wrap=True
        )
        table = Table()
        table.add_column("stage")
        for arm in arms:
            table.add_column(escape(arm), justify="right")
        for arm in others:
            table.add_column(f"{escape(baseline)}/{escape(arm)}" if len(others) > 1 else "ratio", justify="right")
            table.add_column("95% interval", justify="right")
        for row in found["stages"]:
            cells = [summary.seconds(row["arms"][a][names["average"]]) if a in row["arms"] else "" for a in arms]
            for arm in others:
                cells += _ratio_cells(row["ratios"].get(arm))
            table.add_row(row["stage"], *cells, style="bold" if row["stage"] == names["step"] else "")
        console.print(table)
    if found["rollout"]:
        console.print(_rollout_table(found))
    checks = Table(title="Checks", title_justify="left")
    for column in ("check", "result", "detail"):
        checks.add_column(column)
    for check in found["checks"]:
        colour = _COLOURS[check["status"]]
        note = " (warning only)" if check["warn_only"] and check["status"] == "red" else ""
        checks.add_row(check["name"], f"[{colour}]{check['status']}{note}[/]", escape(check["detail"]))
    console.print(checks)
    for line in found["headline"]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _kinds(found: dict[str, Any]) -> list[str]:
    """The kinds of rounds that any arm had."""
    rows = found["rollout"]["arms"] if found["rollout"] else []
    return [kind for kind in (*KINDS, ALL) if any(kind in row["kinds"] for row in rows)]


def _rollout_table(found: dict[str, Any]) -> Table:
    table = Table(title="Mean rollout seconds a step", title_justify="left")
    kinds = _kinds(found)
    lost = ["prompts lost"] if any(row["lost"] is not None for row in found["rollout"]["arms"]) else []
    table.add_column("arm")
    for column in ("all steps", "ratio", "95% interval", *kinds, "wasted tokens", *lost):
        table.add_column(column, justify="right")
    for row in found["rollout"]["arms"]:
        cells = [summary.seconds(row["seconds"]) if row["seconds"] is not None else ""]
        cells += _ratio_cells(row if row.get("ratio") else None)
        for kind in kinds:
            part = row["kinds"].get(kind)
            cells.append(f"{summary.seconds(part['seconds'])} x {part['steps']}" if part else "")
        cells.append(f"{row['wasted']:.1%}" if row["wasted"] is not None else "")
        if lost:
            cells.append(f"{row['lost']:.0f}" if row["lost"] is not None else "")
        table.add_row(escape(row["arm"]), *cells)
    return table


def _ratio_cells(ratio: dict[str, Any] | None) -> list[str]:
    if ratio is None or ratio["ratio"] is None:
        return ["", ""]
    interval = f"{ratio['low']:.2f}-{ratio['high']:.2f}" if ratio["low"] is not None else ""
    return [f"{ratio['ratio']:.2f}x", interval]
