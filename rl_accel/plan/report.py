"""A plan as tables, ``plan.json``, one HTML page and a PNG."""

import base64
import importlib.resources
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_accel.files import write_atomically
from rl_accel.plan.answers import CANCEL_SECONDS, EVENTS_PER_SECOND, Answer, Outcome, best_of
from rl_accel.plan.setup import Fit, Setup
from rl_accel.telemetry.profile import format_seconds

SCHEMA = "rl_accel.plan/1"
COLUMNS = (
    "",
    "rollout",
    "step",
    "times less",
    "95% interval",
    "wasted",
    "cache",
    "staleness",
    "what it costs, what to set",
)
SCALE_COLUMNS = (
    "GPUs",
    "prompts",
    "rollout",
    "its tail",
    "tail batching",
    "times less",
    "round's end",
    "trainer",
    "own share",
)
CURVES = {
    "rollout": "rollout",
    "tail": "its tail",
    "tail_batching": "tail batching",
    "end": "round's end",
    "trainer": "trainer",
}
OWN_LIMIT = 0.1
"""Share of a rollout above which the pack's own work is called a bottleneck."""


def summarise(
    setup: Setup,
    fit: Fit | None,
    stock: Outcome,
    answers: Sequence[Answer],
    curves: Sequence[Mapping[str, float]],
    drawn: str,
) -> dict[str, Any]:
    """Return a plan ready for JSON."""
    rows = [
        {
            "name": found.option.name,
            "set": found.option.how,
            "ours": found.option.ours,
            "cost": found.option.cost,
            **asdict(found.outcome),
            "ratio": found.ratio,
            "low": found.low,
            "high": found.high,
            "more_memory": found.more_memory,
            "nothing": found.is_nothing,
        }
        for found in answers
    ]
    return {
        "schema": SCHEMA,
        "basis": [drawn, *_basis(setup, fit)],
        "engine": {**asdict(setup.engine), "intervals": dict(fit.intervals) if fit else {}},
        "batch": [setup.prompts, setup.responses],
        "replicas": setup.replicas,
        "stages": dict(setup.stages),
        "stock": asdict(stock),
        "answers": rows,
        "scale": [dict(row) for row in curves],
        "conclusions": list(_conclusions(stock, answers, curves)),
    }


def _basis(setup: Setup, fit: Fit | None) -> Iterator[str]:
    tokens = setup.workload.tokens
    replicas = f"{setup.replicas} replica{'s' * (setup.replicas > 1)}"
    yield f"{setup.prompts} prompts of {setup.responses} responses on {replicas}."
    half, most, longest = (f"{int(tokens[int(share * (len(tokens) - 1))]):,}" for share in (0.5, 0.9, 1))
    alike = f"{setup.workload.alike:.0%} of the responses are of their prompt's class of lengths"
    source = setup.workload.source
    yield f"Lengths: median {half} tokens, nine in ten below {most}, the longest {longest}; {alike}. From {source}."
    steps = ", ".join(f"{format_seconds(s)} with {n:,}" for n, s in sorted(setup.engine.step_seconds.items()))
    yield f"A decoding step takes {steps} running requests."
    if fit is not None:
        widths = ", ".join(f"{name} ±{width:.2g} s" for name, width in fit.intervals.items())
        yield f"Fitted to {fit.responses:,} responses, error {fit.error:.1%} of their seconds; 95% intervals: {widths}."
    if not setup.stages:
        yield "A step is its rollout here: --other-seconds says what else it does."


def _conclusions(stock: Outcome, answers: Sequence[Answer], curves: Sequence[Mapping[str, float]]) -> Iterator[str]:
    best = best_of(answers)
    if best is None:
        yield "Nothing of the pack would shorten a step of this run by more than can be told."
    else:
        before, after = (format_seconds(outcome.step_seconds) for outcome in (stock, best.outcome))
        ratio = f"{best.ratio:.2f} times less, {best.low:.2f} to {best.high:.2f}"
        yield f"Best of the pack: {best.option.name}. A step of {before} would take {after} ({ratio}). Set {best.option.how}"
        if best.more_memory > 0.05:
            yield f"It needs {best.more_memory:.0%} more key-value cache at its peak than stock."
    if none := [found.option.name for found in answers if found.option.ours and found.is_nothing]:
        yield f"Nothing to gain from: {', '.join(none)}."
    if not any(found.option.name == "drafts" for found in answers):
        yield "Drafts are not priced: --tokens-a-step says what they accept, as `rl-accel bench drafts` prints it."
    if curves:
        own = f"The pack's own work ({EVENTS_PER_SECOND:,} events and {1 / CANCEL_SECONDS:,.0f} cancels a processor second)"
        over = next((f"{row['gpus']:,.0f}" for row in curves if row["own_share"] > OWN_LIMIT), None)
        upto = f"stays below {OWN_LIMIT:.0%} of a rollout up to {curves[-1]['gpus']:,.0f} GPUs"
        yield f"{own} {upto if over is None else f'takes more than {OWN_LIMIT:.0%} of a rollout from {over} GPUs on'}."


def rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the table of answers, stock first."""
    stock = summary["stock"]
    yield ("as it is", *(format_seconds(stock[f"{which}_seconds"]) for which in ("rollout", "step")), *[""] * 6)
    for row in summary["answers"]:
        yield (
            row["name"],
            format_seconds(row["rollout_seconds"]),
            format_seconds(row["step_seconds"]),
            "nothing" if row["nothing"] and row["ratio"] >= 1 else f"{row['ratio']:.2f}",
            f"{row['low']:.2f} to {row['high']:.2f}",
            f"{row['wasted']:.0%}" if row["wasted"] > 0.0005 else "",
            f"{row['more_memory']:+.0%}",
            f"{row['staleness']:.1f}" if row["staleness"] else "",
            "; ".join(part for part in (row["cost"], row["set"]) if part),
        )


def scale_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the table of sizes."""
    for row in summary["scale"]:
        before, tail, after, end, trainer = (format_seconds(row[name]) for name in CURVES)
        less = f"{row['rollout'] / row['tail_batching']:.2f}"
        yield (
            f"{row['gpus']:,.0f}",
            f"{row['prompts']:,.0f}",
            before,
            tail,
            after,
            less,
            end,
            trainer,
            f"{row['own_share']:.1%}",
        )


def write(summary: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write plan.json, plan.png and plan.html into ``folder`` and return their paths."""
    import jinja2

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"plan.{kind}" for kind in ("json", "png", "html")]
    write_atomically(paths[0], json.dumps(summary, indent=1).replace("Infinity", "null"))
    draw(summary, paths[1])
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    text = importlib.resources.files("rl_accel.plan").joinpath("plan.html.j2").read_text(encoding="utf-8")
    picture = base64.b64encode(paths[1].read_bytes()).decode()
    tables = [(COLUMNS, list(rows(summary))), (SCALE_COLUMNS, list(scale_rows(summary)))]
    paths[2].write_text(
        environment.from_string(text).render(s=summary, tables=tables, picture=picture), encoding="utf-8"
    )
    return paths


def draw(summary: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a plan: how much shorter a step would be, and how seconds grow with GPUs."""
    from matplotlib.figure import Figure

    found, curves = summary["answers"][::-1], summary["scale"]
    heights = [0.32 * len(found) + 1, 3][: 1 + bool(curves)]
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    ratios = [row["ratio"] for row in found]
    errors = [
        [max(ratio - row["low"], 0) for ratio, row in zip(ratios, found, strict=True)],
        [max(row["high"] - ratio, 0) for ratio, row in zip(ratios, found, strict=True)],
    ]
    colours = ["#4878a8" if row["ours"] else "#b7b7a4" for row in found]
    axes[0].barh([row["name"] for row in found], ratios, xerr=errors, color=colours, ecolor="#555555")
    axes[0].axvline(1, color="black", lw=0.8)
    axes[0].set_xlabel("times less seconds a step, with 95% of the draws (blue: of the pack)")
    if curves:
        sizes = [row["gpus"] for row in curves]
        for name, label in CURVES.items():
            axes[1].plot(sizes, [max(row[name], 1e-4) for row in curves], marker="o", label=label)
        axes[1].set(xscale="log", yscale="log", xlabel="GPUs, with as many prompts for each", ylabel="seconds a step")
        axes[1].set_xticks(sizes, labels=[f"{size:,.0f}" for size in sizes])
        axes[1].minorticks_off()
        axes[1].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120, facecolor="white")
