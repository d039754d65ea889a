"""``rl-accel bench reward``: a fixed timeout against the adaptive one, with real processes that take published times."""

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from rl_accel.lab.bench.reward_run import (
    WrongResult,
    check_verdicts,
    cores,
    load,
    measure_overhead,
    nothing_left,
    run_arms,
)
from rl_accel.lab.bench.reward_summary import FASTER_GOAL, KILLED_GOAL, kills_too_many, summarise
from rl_accel.lab.bench.reward_workload import workload
from rl_accel.reward.adaptive_timeout import TimeoutSettings

SIZE = {"prompts": 112, "responses": 16, "epochs": 1, "batch": 14}
QUICK = {"prompts": 6, "responses": 6, "epochs": 2, "batch": 6}
NEVER = 10**9


def policies(scale: float) -> dict[str, TimeoutSettings]:
    """Return the settings of both arms, our defaults with every time multiplied by ``scale``; ``fixed`` never adapts."""
    ours = TimeoutSettings()
    ours = replace(ours, slack=ours.slack * scale, minimum=ours.minimum * scale, maximum=ours.maximum * scale)
    return {"fixed": replace(ours, min_correct=NEVER), "adaptive": ours}


@click.command("reward")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for reward.json and reward.png.")
@click.option("--quick", is_flag=True, help="Tiny sizes: does it work at all?")
@click.option("--prompts", type=click.IntRange(min=1), help=f"Prompts of an epoch.  [default: {SIZE['prompts']}]")
@click.option("--responses", type=click.IntRange(min=1), help=f"Responses of a prompt.  [default: {SIZE['responses']}]")
@click.option("--epochs", type=click.IntRange(min=1), help=f"How often each prompt comes.  [default: {SIZE['epochs']}]")
@click.option("--workers", type=click.IntRange(min=1), help="Executions at once.  [default: two a core]")
@click.option(
    "--scale", type=click.FloatRange(min=0.02), default=0.07, show_default=True, help="Of all times and limits."
)
@click.option(
    "--spread", type=click.FloatRange(min=0), default=0.3, show_default=True, help="Of times within a prompt."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--isolation", type=click.Choice(["process", "bubblewrap"]), help="[default: the best that works]")
@click.option("--only", type=click.Choice(["quiet", "loaded"]), help="Only one of the two conditions.")
def bench_reward(
    out: Path | None,
    quick: bool,
    prompts: int | None,
    responses: int | None,
    epochs: int | None,
    workers: int | None,
    scale: float,
    spread: float,
    seed: int,
    isolation: str | None,
    only: str | None,
) -> None:
    """Measure what the adaptive timeout saves and what it costs.

    Programs that take as long as published, wait or compute, are right or wrong, and never end in 5 % of the cases, run through the
    real executor in the real sandbox. Each batch is executed twice, under the fixed limit and under the adaptive one, first on the
    machine as it is, then with as many busy processes beside as there are cores. Verdicts and what is left behind are checked: if
    one is wrong there is no number, and exit status 1; so is it if too many correct answers were stopped. A ratio that is not
    reached is shown and does not change it: machines are shared and noisy.
    """
    console = Console(width=None if Console().is_terminal else 160)
    size = dict(QUICK if quick else SIZE)
    size |= {k: v for k, v in {"prompts": prompts, "responses": responses, "epochs": epochs}.items() if v is not None}
    size["batch"] = next(b for b in range(min(size["batch"], size["prompts"]), 0, -1) if size["prompts"] % b == 0)
    slots = workers or 2 * cores()
    settings = policies(scale)
    console.print(
        f"{size['prompts']} prompts x {size['responses']} responses x {size['epochs']} epochs, {slots} at once on {cores()} cores; "
        f"all times x {scale:g}; load average {os.getloadavg()[0]:.1f}"
    )
    conditions = [only] if only else ["quiet", "loaded"]
    rows: dict[str, Any] = {}
    try:
        with nothing_left():
            known = asyncio.run(check_verdicts(settings["fixed"], slots, isolation))
            overhead = asyncio.run(measure_overhead(slots, isolation))
            console.print(
                f"correct: {known} known programs, all verdicts right; the sandbox takes {overhead * 1000:.1f} ms of an execution"
            )
            batches = workload(**size, scale=scale, spread=spread, overhead=overhead, seed=seed)
            for condition in conditions:
                with load(cores() if condition == "loaded" else 0), console.status(condition):
                    before = os.getloadavg()[0]
                    arms = asyncio.run(run_arms(batches, settings, slots, isolation))
                    rows[condition] = {"load_average": [before, os.getloadavg()[0]]}
                    rows[condition]["arms"] = summarise(batches, arms, size["epochs"])
    except WrongResult as error:
        console.print("[red]WRONG: [/red]", end="")
        console.print(f"{error}\nno numbers", markup=False)
        raise SystemExit(1) from None
    console.print(
        f"correct: all verdicts of {len(conditions) * 2 * sum(map(len, batches)):,} executions, no process left"
    )
    red = _show(rows, console)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        given = {**size, "workers": slots, "cores": cores(), "scale": scale, "spread": spread, "seed": seed}
        given["overhead_s"] = overhead
        policy = {name: asdict(value) for name, value in settings.items()}
        (out / "reward.json").write_text(json.dumps({"given": given, "policies": policy, "found": rows}, indent=1))
        _plot(rows, scale, out / "reward.png")
        console.print(f"{out / 'reward.json'}, {out / 'reward.png'}", soft_wrap=True)
    if red:
        raise SystemExit(1)


def _show(rows: Mapping[str, Any], console: Console) -> bool:
    """Print the table and the goals; return whether too many correct answers were killed."""
    table = Table(title="Executions, and what stopped them", box=SIMPLE)
    headings = ("machine", "limit", "total s", "times less", "by epoch", "step s", "p50 s", "p99 s", "correct")
    for heading in (*headings, "killed wrongly", "rewards changed", "timeouts", "full budget", "saved s (estimate)"):
        table.add_column(heading, justify="right")
    for condition, found in rows.items():
        for name, row in found["arms"].items():
            struck = ", ".join(f"{count} {limit}" for limit, count in sorted(row["struck"].items()))
            table.add_row(
                condition,
                name,
                f"{row['seconds']:.1f}",
                f"{row['times_less']:.2f}",
                " ".join(f"{ratio:.1f}" for ratio in row["epoch_times_less"]),
                f"{row['step_s']:.2f}",
                f"{row['p50_s']:.3f}",
                f"{row['p99_s']:.2f}",
                f"{row['correct']:,}",
                f"{row['wrongly_killed']} ({row['wrongly_killed'] / max(row['correct'], 1):.2%})",
                str(row["changed"]),
                f"{row['timeouts']} ({struck})" if struck else "0",
                f"{row['counts'].get('timeouts_full', 0):.0f}",
                f"{row['saved_s']:.1f} ({row['saved_estimate_s']:.1f})",
            )
    console.print(table)
    console.print(
        "total s: of all executions. step s: from the start of a batch, all of it at once, to its last result, mean. p50, p99: of "
        "an execution. full budget: of the timeouts those that no limit had been learned for, or probes.",
        soft_wrap=True,
    )
    red = False
    for condition, found in rows.items():
        row = found["arms"]["adaptive"]
        load_average = "{:.1f} to {:.1f}".format(*found["load_average"])
        word = "met" if row["times_less"] >= FASTER_GOAL else "NOT met"
        ratios = (
            f"{row['times_less']:.2f} times less, {row['own_times_less']:.2f} less without their waits for a processor"
        )
        console.print(f"{condition} (load average {load_average}): {ratios}; goal {FASTER_GOAL:g}: {word}")
        share = row["wrongly_killed"] / max(row["correct"], 1)
        many = kills_too_many(row)
        red |= many
        word = "[red]NOT met[/red]" if many else "met"
        console.print(f"{condition}: {share:.2%} of correct answers killed; goal at most {KILLED_GOAL:.1%}: {word}")
    return red


def _plot(rows: Mapping[str, Any], scale: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (total, step) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    colors = {"fixed": "#c9c9c9", "adaptive": "#3b78b5"}
    for place, found in enumerate(rows.values()):
        for offset, (name, row) in zip((-0.2, 0.2), found["arms"].items(), strict=True):
            label = {"fixed": "fixed limit", "adaptive": "adaptive limit"}[name] if place == 0 else None
            for axes, value, shown in ((total, row["seconds"], label), (step, row["step_s"], None)):
                bars = axes.bar(place + offset, value, 0.38, color=colors[name], label=shown)
                axes.bar_label(bars, fmt="%.3g")
    for axes, title in ((total, "seconds of all executions"), (step, "seconds of a step's rewards")):
        names = ["{}\nload average {:.0f} to {:.0f}".format(name, *row["load_average"]) for name, row in rows.items()]
        axes.set(xticks=range(len(rows)), xticklabels=names, title=f"{title} (times scaled by {scale:g})")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncol=2, frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
