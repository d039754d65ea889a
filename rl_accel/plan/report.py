"""Output of ``rl-accel plan``: tables on the terminal, ``plan.json``, one HTML page and one PNG chart."""

import base64
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rl_accel.files import strict_json, write_atomically
from rl_accel.plan.answers import CANCEL_SECONDS, EVENTS_PER_SECOND, Answer, best_of
from rl_accel.plan.fit import Fit
from rl_accel.plan.setup import Setup
from rl_accel.telemetry.profile import format_seconds

SCHEMA = "rl_accel.plan/1"
OWN_LIMIT = 0.1
"""Share of the rollout seconds above which the time that rl-accel itself needs is reported as a bottleneck."""
FIT_LIMIT = 0.5
"""Relative error of the fitted engine model above which the output warns that the plan cannot be trusted."""
_WANTS = {
    "drafts": "--tokens-a-step says what they give, 1 and what `rl-accel bench drafts` prints as accepted",
    "tp_replan": "how fast the engine is at another size is known of published ones alone",
    "skip_zero": "it wants groups of equal rewards in a trainer.rollout_data_dir below LOG, in a run without it and without a"
    " critic, KL or entropy term",
    "balance": "it wants several replicas with fewer slots than requests, and --slots says how many they have",
}
"""Text that says which inputs the evaluation of a feature needs, by feature. Printed for features that were not evaluated."""
_ANSWERS: Mapping[str, Callable[[Answer], str]] = {
    "": lambda a: a.option.name,
    "rollout": lambda a: format_seconds(a.outcome.rollout_seconds),
    "step": lambda a: format_seconds(a.outcome.step_seconds),
    "times less": lambda a: "nothing" if a.is_nothing and a.ratio >= 1 else f"{a.ratio:.2f}",
    "95% interval": lambda a: f"{a.low:.2f} to {a.high:.2f}",
    "wasted": lambda a: f"{a.outcome.wasted:.0%}" if a.outcome.wasted > 0.0005 else "",
    "cache": lambda a: f"{a.more_memory:+.0%}",
    "staleness": lambda a: f"{a.outcome.staleness:.1f}" if a.outcome.staleness else "",
    "what it costs, what to set": lambda a: "; ".join(filter(None, (a.option.cost, a.option.how))),
}


def _seconds(name: str) -> Callable[[Mapping[str, float]], str]:
    return lambda row: format_seconds(row[name])


_CURVES = {
    "rollout": "rollout",
    "tail": "its tail",
    "tail_batching": "tail batching",
    "end": "round's end",
    "trainer": "trainer",
}
_SCALE: Mapping[str, Callable[[Mapping[str, float]], str]] = {
    "GPUs": lambda row: f"{row['gpus']:,.0f}",
    "prompts": lambda row: f"{row['prompts']:,.0f}",
    **{label: _seconds(name) for name, label in _CURVES.items()},
    "times less": lambda row: f"{row['rollout'] / row['tail_batching']:.2f}",
    "own share": lambda row: f"{row['own_share']:.1%}",
}


@dataclass(frozen=True)
class Plan:
    """Results of ``rl-accel plan``.

    Attributes:
        setup: the run that was simulated.
        fit: fit of the engine model to the run's telemetry; None if the user has described the engine.
        answers: result for the unchanged run, then one result per option (a feature or an alternative).
        curves: results of :func:`~rl_accel.plan.answers.scale`, one row per number of GPUs.
        drawn: sentence with the number of random draws.
        advice: sentences with advice on verl's own settings.
        preemptions: measured number of preemptions per step of the run.
    """

    setup: Setup
    fit: Fit | None
    answers: Sequence[Answer]
    curves: Sequence[Mapping[str, float]]
    drawn: str
    advice: Sequence[str] = ()
    preemptions: float = 0.0

    def basis(self) -> Iterator[str]:
        """Yields sentences that describe the inputs of the plan: batch size, response lengths and engine speed."""
        setup, fit, tokens = self.setup, self.fit, self.setup.workload.tokens
        yield self.drawn
        replicas = f"{setup.replicas} replica{'s' * (setup.replicas > 1)}"
        yield f"{setup.prompts} prompts of {setup.responses} responses on {replicas}."
        half, most, longest = (f"{int(tokens[int(share * (len(tokens) - 1))]):,}" for share in (0.5, 0.9, 1))
        alike = f"intraclass correlation within a prompt {setup.workload.alike:.2f}"
        source = setup.workload.source
        yield f"Lengths: median {half} tokens, nine in ten below {most}, the longest {longest}; {alike}. From {source}."
        steps = ", ".join(f"{format_seconds(s)} with {n:,}" for n, s in sorted(setup.engine.step_seconds.items()))
        yield f"A decoding step takes {steps} running requests."
        if fit is not None:
            widths = ", ".join(f"{name} ±{width:.2g} s" for name, width in fit.intervals.items())
            how = f"Fitted to {fit.responses:,} responses, error {fit.error:.1%} of their seconds"
            yield f"{how}; 95% intervals: {widths}."
        if not setup.stages:
            yield "A step is its rollout here: --other-seconds says what else it does."

    def conclusions(self) -> Iterator[str]:
        """Yields the conclusions of the plan as sentences."""
        stock, *priced = self.answers
        if self.fit is not None and self.fit.error > FIT_LIMIT:
            why = "--slots and --cache-tokens say how many requests run at once and what they may take"
            yield f"Do not trust this plan: the fitted engine is {self.fit.error:.0%} off for a response; {why}."
        if self.preemptions and self.setup.engine.cache_tokens == math.inf:
            how = "--cache-tokens, which vLLM logs as the size of its KV cache, has them preempt here as well"
            yield f"The engines preempted {self.preemptions:,.0f} requests a step: {how}."
        best = best_of(priced)
        if best is None:
            yield "Nothing of the pack would shorten a step of this run by more than can be told."
        else:
            before, after = (format_seconds(answer.outcome.step_seconds) for answer in (stock, best))
            ratio = f"{best.ratio:.2f} times less, {best.low:.2f} to {best.high:.2f}"
            step = f"A step of {before} would take {after} ({ratio})"
            yield f"Best of the pack: {best.option.name}. {step}. Set {best.option.how}"
            if best.more_memory > 0.05:
                yield f"It needs {best.more_memory:.0%} more key-value cache at its peak than stock."
        if none := [found.option.name for found in priced if found.option.ours and found.is_nothing]:
            yield f"Nothing to gain from: {', '.join(none)}."
        names = {found.option.name.partition(" ")[0] for found in priced}
        yield from (f"Not priced: {name}, {why}." for name, why in _WANTS.items() if name not in names)
        if self.curves:
            own = f"{EVENTS_PER_SECOND:,} events and {1 / CANCEL_SECONDS:,.0f} cancels a processor second"
            over = next((row["gpus"] for row in self.curves if row["own_share"] > OWN_LIMIT), None)
            upto = f"stays below {OWN_LIMIT:.0%} of a rollout up to {self.curves[-1]['gpus']:,.0f} GPUs"
            from_ = f"takes more than {OWN_LIMIT:.0%} of a rollout from {over or 0:,.0f} GPUs on"
            yield f"The pack's own work ({own}) {upto if over is None else from_}."
        yield from self.advice

    def show(self, console: Console) -> None:
        """Prints the inputs, tables and conclusions of the plan to ``console``."""
        tables: Sequence[tuple[str, Mapping[str, Callable[[Any], str]], Sequence[Any]]] = (
            ("What it would do to a step", _ANSWERS, self.answers),
            ("With as many prompts for each GPU", _SCALE, self.curves),
        )
        console.print("\n".join(self.basis()), markup=False, highlight=False, soft_wrap=True)
        for title, columns, rows in tables:
            table = Table(*columns, title=title)
            for row in rows:
                table.add_row(*(cell(row) for cell in columns.values()))
            if rows:
                console.print(table)
        console.print("\n".join(self.conclusions()), markup=False, highlight=False, soft_wrap=True)

    def write(self, folder: Path) -> list[Path]:
        """Writes plan.json, plan.png and plan.html into ``folder`` and returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"plan.{kind}" for kind in ("json", "png", "html")]
        write_atomically(paths[0], strict_json(self.summary()))
        self.draw(paths[1])
        page = Console(record=True, width=180, file=io.StringIO())
        self.show(page)
        picture = base64.b64encode(paths[1].read_bytes()).decode()
        picture = f'<img alt="Seconds of a step" src="data:image/png;base64,{picture}"></body>'
        paths[2].write_text(page.export_html(inline_styles=True).replace("</body>", picture), encoding="utf-8")
        return paths

    def summary(self) -> dict[str, Any]:
        """Returns the content of ``plan.json`` as a dictionary."""
        rows = [{**vars(found), **asdict(found.outcome), "nothing": found.is_nothing} for found in self.answers]
        for row in rows:
            option = row.pop("option")
            row |= {"name": option.name, "set": option.how, "ours": option.ours, "cost": option.cost}
            del row["outcome"]
        return {
            "schema": SCHEMA,
            "basis": list(self.basis()),
            "engine": {**asdict(self.setup.engine), "intervals": dict(self.fit.intervals) if self.fit else {}},
            "stages": dict(self.setup.stages),
            "stock": rows[0],
            "answers": rows[1:],
            "scale": [dict(row) for row in self.curves],
            "conclusions": list(self.conclusions()),
        }

    def draw(self, path: Path) -> None:
        """Draws two charts to the PNG file ``path``.

        The first chart shows the speedup of a step with each option. The second chart shows the parts of a step in seconds, over
        the number of GPUs.
        """
        from matplotlib.figure import Figure

        found = self.answers[:0:-1]
        heights = [0.32 * len(found) + 1, 3][: 1 + bool(self.curves)]
        figure = Figure(figsize=(9, sum(heights)), layout="constrained")
        axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        errors = [[max(a.ratio - a.low, 0) for a in found], [max(a.high - a.ratio, 0) for a in found]]
        colours = ["#4878a8" if a.option.ours else "#b7b7a4" for a in found]
        axes[0].barh(
            [a.option.name for a in found], [a.ratio for a in found], xerr=errors, color=colours, ecolor="#555555"
        )
        axes[0].axvline(1, color="black", lw=0.8)
        axes[0].set_xlabel("times less seconds a step, with 95% of the draws (blue: of the pack)")
        if self.curves:
            sizes = [row["gpus"] for row in self.curves]
            for name, label in _CURVES.items():
                axes[1].plot(sizes, [max(row[name], 1e-4) for row in self.curves], marker="o", label=label)
            axes[1].set(
                xscale="log", yscale="log", xlabel="GPUs, with as many prompts for each", ylabel="seconds a step"
            )
            axes[1].set_xticks(sizes, labels=[f"{size:,.0f}" for size in sizes])
            axes[1].minorticks_off()
            axes[1].legend(frameon=False, fontsize=8)
        figure.savefig(path, dpi=120, facecolor="white")
