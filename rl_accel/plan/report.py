"""Output of ``rl-accel plan``: a table on the terminal, and ``plan.json``."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from rl_accel.console import say
from rl_accel.plan.answers import Answer, best_of
from rl_accel.plan.fit import Fit
from rl_accel.plan.setup import Setup
from rl_accel.telemetry.profile import format_seconds
from rl_accel.telemetry.savings import NOTHING_HELPS

SCHEMA = "rl_accel.plan/2"
FIT_LIMIT = 0.5
"""Relative error of the fitted engine model above which the output warns that the plan cannot be trusted. Chosen by hand."""
_WANTS = {
    "drafts": "`rl-accel bench drafts` replays them with the texts of a run",
    "skip_zero": "it wants groups of equal rewards in a trainer.rollout_data_dir below LOG, in a run without it and without a"
    " critic, KL or entropy term",
    "balance": "it wants several replicas with fewer slots than requests, and --slots says how many they have",
}
"""Text for each feature that says what its prediction needs. Printed if the plan has no prediction for the feature."""
_ANSWERS: Mapping[str, Callable[[Answer], str]] = {
    "": lambda a: a.option.name,
    "rollout": lambda a: format_seconds(a.outcome.rollout_seconds),
    "step": lambda a: format_seconds(a.outcome.step_seconds),
    "times less": lambda a: "nothing" if a.is_nothing and a.ratio >= 1 else f"{a.ratio:.2f}",
    "95% interval": lambda a: f"{a.low:.2f} to {a.high:.2f}",
    "wasted": lambda a: f"{a.outcome.wasted:.0%}" if a.outcome.wasted > 0.0005 else "",
    "cache": lambda a: f"{a.more_memory:+.0%}",
    "what it costs, what to set": lambda a: "; ".join(filter(None, (a.option.cost, a.option.how))),
}


@dataclass(frozen=True)
class Plan:
    """Results of ``rl-accel plan``.

    Attributes:
        setup: the run that was simulated.
        fit: fit of the engine model to the run's telemetry; None without telemetry.
        answers: prediction for the unchanged run, then one per option (a feature or an alternative).
        drawn: sentence with the numbers of random draws and rollouts.
        advice: sentences with advice on verl's own settings.
        preemptions: measured number of preemptions per step.
    """

    setup: Setup
    fit: Fit | None
    answers: Sequence[Answer]
    drawn: str
    advice: Sequence[str] = ()
    preemptions: float = 0.0

    def basis(self) -> Iterator[str]:
        """Yields sentences about the inputs of the plan: batch size, response lengths and engine speed."""
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
            yield f"Fitted to {fit.responses:,} responses, error {fit.error:.1%} of their seconds."
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
            yield NOTHING_HELPS
        else:
            before, after = (format_seconds(answer.outcome.step_seconds) for answer in (stock, best))
            ratio = f"{best.ratio:.2f} times less, {best.low:.2f} to {best.high:.2f}"
            step = f"A step of {before} would take {after} ({ratio})"
            yield f"Best of the pack: {best.option.name}. {step}. Set {best.option.how}"
            if best.more_memory > 0.05:
                yield f"It needs {best.more_memory:.0%} more key-value cache at its peak than stock."
        if none := [answer.option.name for answer in priced if answer.option.ours and answer.is_nothing]:
            yield f"Nothing to gain from: {', '.join(none)}."
        names = {answer.option.name.partition(" ")[0] for answer in priced}
        names |= {"skip_zero", "balance"} if self.setup.is_slime else set()  # features for verl
        yield from (f"Not priced: {name}, {why}." for name, why in _WANTS.items() if name not in names)
        yield from self.advice

    def show(self, console: Console) -> None:
        """Prints the inputs, the table and the conclusions of the plan to ``console``."""
        table = Table(*_ANSWERS, title="What it would do to a step")
        for answer in self.answers:
            table.add_row(*(cell(answer) for cell in _ANSWERS.values()))
        say(console, *self.basis())
        console.print(table)
        say(console, *self.conclusions())

    def summary(self) -> dict[str, Any]:
        """Returns the content of ``plan.json`` as a dictionary."""

        def row(answer: Answer) -> dict[str, Any]:
            option = answer.option
            names = {"name": option.name, "set": option.how, "ours": option.ours, "cost": option.cost}
            gains = {name: getattr(answer, name) for name in ("ratio", "low", "high", "more_memory")}
            return {**names, **asdict(answer.outcome), **gains, "nothing": answer.is_nothing}

        stock, *answers = map(row, self.answers)
        return {
            "schema": SCHEMA,
            "basis": list(self.basis()),
            "engine": asdict(self.setup.engine),
            "stages": dict(self.setup.stages),
            "stock": stock,
            "answers": answers,
            "conclusions": list(self.conclusions()),
        }
