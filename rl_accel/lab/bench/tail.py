"""``rl-accel bench tail``: what tail batching itself costs. First its core alone, then whole rounds on verl without a model.

The core has no clock, so that the calls of one simulated run can be written down and played back without the schedule between them.
"""

import gc
import heapq
import importlib.util
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from rl_accel.features.tail_batching import TailBatchingFlags
from rl_accel.lab.ab.runner import Stop, last_lines, ray_temp_dir, supervised
from rl_accel.lab.bench.measure import WrongResult, console_of_benchmark, met, output_folder, results_files
from rl_accel.rollout.tail_batching import TailBatching
from rl_accel.rollout.tail_decisions import Cancel, Decision, Finished, Launch, RequestPrompts, RoundEnded, TrainBatch
from rl_accel.rollout.tail_prompts import TailRun

CORE_SIZES = ((8, 8), (32, 16), (128, 16), (512, 16))
CORE_CALLS = 150_000
"""About so many calls are timed a size; small sizes play more rounds."""
CORE_GOAL = 100_000

LOADS = ((32, 16, 3), (128, 16, 2), (512, 16, 1))
"""P0, R0 and rounds. The largest takes minutes a round: verl's agent loop needs about 20 ms of a core for each response."""
QUICK_LOADS = ((4, 2, 2), (8, 4, 2))
LOAD_GOAL_S = 2.0
LOAD_MODULE = "rl_accel.lab.bench.tail_load"
RATIO = 1.25
TOKENS = 128
LONGEST_S = 900.0
"""A load that takes longer is ended and called failed."""
SCORING_S, ABORT_S = 0.3, 0.1
"""Seconds until a response is scored after it was generated, and until a cancelled one is acknowledged."""

Call = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True)
class CoreSpeed:
    """What one size gave. ``events`` are calls into the core; ``kinds`` counts rounds of each kind; ``seconds``
    are of processor time."""

    prompts: int
    responses: int
    prompt_ratio: str
    rounds: int
    kinds: dict[str, int]
    events: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and ``events_per_s``, ready for JSON."""
        return {**asdict(self), "events_per_s": self.events / self.seconds}


def time_core(run: TailRun, rounds: int, repeats: int = 3, seed: int = 0) -> CoreSpeed:
    """Play ``rounds`` batches of data to their end, check the result, then time the same calls on a fresh core.

    The core has no clock, so that the calls of one run can be written down and played back without the schedule between them.

    Args:
        run: P0, R0 and ratios.
        rounds: batches of data.
        repeats: how often the calls are played back; the fastest counts.
        seed: of the drawn times.

    Raises:
        WrongResult: a batch was not P0 x R0, or a prompt was not trained exactly once.
    """
    calls, batches = record(run, rounds, seed)
    check_batches(batches, run, rounds)
    best = float("inf")
    for _ in range(repeats):
        core = TailBatching(run)
        bound: list[tuple[Callable[..., list[Decision]], tuple[Any, ...]]] = [(getattr(core, n), a) for n, a in calls]
        gc.collect()
        started = time.process_time()  # others may use the machine meanwhile
        for method, arguments in bound:
            method(*arguments)
        best = min(best, time.process_time() - started)
        if core.unsettled_prompts():
            raise WrongResult("the same calls must lead to the same end, found prompts that are not settled")
    kinds = {kind: sum(batch.kind == kind for batch in batches) for kind in ("short", "long", "final")}
    return CoreSpeed(
        run.prompts_per_step,
        run.responses_per_prompt,
        str(run.flags.prompt_ratio),
        len(batches),
        kinds,
        len(calls),
        best,
    )


def record(run: TailRun, rounds: int, seed: int = 0) -> tuple[list[Call], list[TrainBatch]]:
    """Drive a core through ``rounds`` batches of data; return the calls made and the batches that came out."""
    core, rng = TailBatching(run), random.Random(seed)
    rows = rounds * run.prompts_per_step
    calls: list[Call] = []
    batches: list[TrainBatch] = []
    due: list[tuple[float, int, str, int, int]] = []
    cancelled: set[int] = set()
    difficulty: dict[str, float] = {}
    now, offered, serial, finished = 0.0, 0, 0, False

    def call(name: str, *arguments: Any) -> list[Decision]:
        calls.append((name, arguments))
        decisions: list[Decision] = getattr(core, name)(*arguments)
        return decisions

    while not finished:
        todo, ended = call("begin_round", now), False
        while not ended:
            for decision in todo if isinstance(todo, list) else ():
                match decision:
                    case Launch():
                        hard = difficulty.setdefault(decision.prompt_id, rng.gauss(0, 0.7))
                        for response_id in decision.response_ids:
                            after = rng.lognormvariate(hard, 0.7)
                            serial += 1
                            heapq.heappush(due, (now + after, serial, "generated", response_id, int(100 * after)))
                    case Cancel():
                        cancelled.update(decision.response_ids)
                        for response_id in decision.response_ids:
                            serial += 1
                            heapq.heappush(due, (now + ABORT_S, serial, "aborted", response_id, 50))
                    case TrainBatch():
                        batches.append(decision)
                    case RoundEnded():
                        ended = True
                    case Finished():
                        ended = finished = True
                    case RequestPrompts():
                        pass
            if ended:
                break
            wanted = next((sum(d.counts.values()) for d in todo if isinstance(d, RequestPrompts)), 0)
            if wanted:
                new = [f"1:{row + 1}" for row in range(offered, min(offered + wanted, rows))]
                offered += len(new)
                todo = call("offer", new, now) if new else call("data_exhausted", now)
                continue
            now, _, what, response_id, tokens = heapq.heappop(due)
            todo = []
            if what == "aborted":
                todo = call("response_aborted", response_id, tokens, now)
            elif response_id in cancelled:
                continue
            elif what == "generated":
                serial += 1
                heapq.heappush(due, (now + SCORING_S * rng.random(), serial, "scored", response_id, tokens))
                todo = call("response_generated", response_id, tokens, now)
            else:
                todo = call("response_scored", response_id, now)
    return calls, batches


def check_batches(batches: list[TrainBatch], run: TailRun, rounds: int) -> None:
    """Every batch has P0 groups of R0, every prompt of ``rounds`` batches of data was trained once, no response twice.

    Raises:
        WrongResult: it is not so.
    """
    prompts, responses_each = run.prompts_per_step, run.responses_per_prompt
    for batch in batches:
        sizes = {len(group.response_ids) for group in batch.groups}
        if len(batch.groups) != prompts or sizes != {responses_each}:
            raise WrongResult(
                f"a batch must have {prompts} x {responses_each} responses, found {len(batch.groups)} x {sizes}"
            )
    trained = [group.prompt_id for batch in batches for group in batch.groups]
    if len(trained) != len(set(trained)) or len(trained) != rounds * prompts:
        raise WrongResult(
            f"{rounds * prompts} prompts must be trained once each, found {len(trained)}, {len(set(trained))} of them distinct"
        )
    responses = [i for batch in batches for group in batch.groups for i in group.response_ids]
    if len(responses) != len(set(responses)):
        raise WrongResult("a response must be trained once, found one twice")


@click.command("tail")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for tail.json and tail.png.")
@click.option("--only", type=click.Choice(["core", "load"]), help="Only one of the two parts.")
@click.option("--quick", is_flag=True, help="Tiny sizes: does it work at all?")
@click.option("--workers", type=click.IntRange(min=1), default=2, show_default=True, help="Agent-loop workers.")
def bench_tail(out: Path | None, only: str | None, quick: bool, workers: int) -> None:
    """Measure what tail batching itself costs: events a second of its core, and seconds a round under load on verl.

    Core: the calls of a simulated run, played back on a fresh core. Load: TransferQueue, verl's load balancer and agent loop, our
    manager, workers and trainer side, each in its real process; only rollout servers sleep drawn times in place of decoding. A
    batch that is not exactly P0 x R0, a key left behind, a prompt lost or trained twice is an error: no number, and exit status 1.
    Goals that are not met are shown and do not change it: machines are shared and noisy.
    """
    console = console_of_benchmark()
    output_folder(out)
    core = [] if only == "load" else _core(quick, console)
    load, wrong = ([], False) if only == "core" else _load(quick, workers, console)
    if out is not None:
        parts = [(draw, rows) for draw, rows in ((_plot_core, core), (_plot_load, load)) if rows]
        results, width = {"core": core, "load": load}, max(len(parts), 1)
        with results_files(out, "tail", results, console, (5.5 * width, 4.5), width) as (_, axes):
            _plot(parts, axes)
    if wrong or (only != "load" and not core):
        raise SystemExit(1)


def _core(quick: bool, console: Console) -> list[dict[str, Any]]:
    speeds: list[dict[str, Any]] = []
    for prompts, responses in CORE_SIZES[:2] if quick else CORE_SIZES:
        rounds = max(6, CORE_CALLS // (prompts * responses * 3) // (10 if quick else 1))
        for ratio in (RATIO, "auto"):
            tail_run = TailRun(prompts, responses, TailBatchingFlags(prompt_ratio=ratio))
            try:
                speeds.append(time_core(tail_run, rounds).to_dict())
            except WrongResult as error:
                console.print(f"[red]WRONG: {prompts} x {responses}, prompt_ratio {ratio}: {error}; no numbers")
                return []
    table = Table(
        title="The core alone (seconds of one processor; every batch was P0 x R0, every prompt trained once)",
        box=SIMPLE,
    )
    for heading in ("P0 x R0", "prompt_ratio", "rounds", "short / long / final", "events", "events a second"):
        table.add_column(heading, justify="right")
    for row in speeds:
        kinds = " / ".join(str(row["kinds"][kind]) for kind in ("short", "long", "final"))
        size = f"{row['prompts']} x {row['responses']}"
        table.add_row(
            size, row["prompt_ratio"], str(row["rounds"]), kinds, f"{row['events']:,}", f"{row['events_per_s']:,.0f}"
        )
    console.print(table)
    slowest = min(row["events_per_s"] for row in speeds)
    console.print(f"slowest: {slowest:,.0f} events a second; goal at least {CORE_GOAL:,}: {met(slowest >= CORE_GOAL)}")
    return speeds


def plan_of(prompts: int, responses: int, rounds: int, workers: int) -> dict[str, Any]:
    """Return the plan for :mod:`rl_accel.lab.bench.tail_load`: one size and how to load it.

    The median of the drawn times grows with the size, so that responses become complete no faster than two cores can take them in.
    """
    return {
        "prompts": prompts,
        "responses": responses,
        "rounds": rounds,
        "median_s": max(0.2, prompts * responses / 270),
        "tokens": TOKENS,
        "workers": workers,
        "servers": 2,
        "prompt_ratio": RATIO,
        "response_ratio": RATIO,
        "queue_threshold": None,
    }


def _load(quick: bool, workers: int, console: Console) -> tuple[list[dict[str, Any]], bool]:
    """Return what each size gave, and whether one of them was wrong."""
    missing = [name for name in ("verl", "transfer_queue", "ray", "psutil") if importlib.util.find_spec(name) is None]
    if missing:
        console.print(f"load left out: {', '.join(missing)} not installed here")
        return [], False
    sizes: list[dict[str, Any]] = []
    with Stop().listening() as stop:
        for size in QUICK_LOADS if quick else LOADS:
            plan = plan_of(*size, workers)
            label = f"{plan['prompts']} x {plan['responses']}"
            with console.status(f"{label}: {plan['rounds']} rounds"):
                result, problem = _run(plan, stop)
            if stop:
                raise click.Abort
            if problem:
                console.print(f"[red]WRONG: {label}: [/red]", end="")
                console.print(problem, markup=False)
                _show_load(sizes, console)
                return sizes, True
            console.print(f"correct: {label}: exact batches, no key left behind, no prompt trained twice or lost")
            sizes.append({**plan, **result})
    _show_load(sizes, console)
    return sizes, False


def _run(plan: dict[str, Any], stop: Stop) -> tuple[dict[str, Any], str]:
    """Run one size in processes of its own; return its numbers, and what was wrong ("" if nothing)."""
    with ExitStack() as stack:
        folder = stack.enter_context(ray_temp_dir())
        given, answer, log = folder / "plan.json", folder / "results.json", folder / "log"
        given.write_text(json.dumps(plan))
        environment: dict[str, str | None] = {
            "RAY_TMPDIR": str(folder),
            "RAY_ADDRESS": None,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RL_ACCEL_CONFIG": None,
            "RL_ACCEL_SOURCES": None,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "VERL_LOGGING_LEVEL": "ERROR",
            "PYTHONUNBUFFERED": "1",
        }
        ends = _deadline(LONGEST_S)
        command = [sys.executable, "-m", LOAD_MODULE, str(given), str(answer)]
        outcome = supervised(command, environment, folder, log, stop, ends, temp=folder)
        if outcome.reason == "timeout":
            return {}, f"it took more than {LONGEST_S:.0f} s; the end of its log:\n{last_lines(log)}"
        if outcome.exit_code or not answer.exists():
            return {}, f"exit status {outcome.exit_code}; the end of its log:\n{last_lines(log)}"
        result: dict[str, Any] = json.loads(answer.read_text())
    errors = result.pop("errors")
    return result, "; ".join(errors)


def _deadline(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def _show_load(sizes: list[dict[str, Any]], console: Console) -> None:
    if not sizes:
        return
    table = Table(title="Rounds on verl without a model", box=SIMPLE)
    headings = ("P0 x R0", "round", "launched", "round s", "trainer CPU s", "of the round", "after last s", "events")
    for heading in (*headings, "events / CPU s", "trainer MiB", "worker MiB", "workers CPU s"):
        table.add_column(heading, justify="right")
    for size in sizes:
        for number, row in enumerate(size["rounds"], 1):
            table.add_row(
                f"{size['prompts']} x {size['responses']}",
                f"{number} {row['kind']}",
                f"{row['launched_responses']:,.0f}",
                f"{row['seconds']:.1f}",
                f"{row['trainer_cpu_s']:.2f}",
                f"{row['trainer_cpu_s'] / row['seconds']:.1%}",
                f"{row['after_last_s']:.2f}",
                f"{row['events']:,}",
                f"{row['events'] / row['trainer_cpu_s']:,.0f}",
                f"{row['trainer_bytes'] / 2**20:,.0f}",
                f"{row['worker_bytes'] / 2**20:,.0f}",
                f"{row['worker_cpu_s']:.1f}",
            )
    console.print(table)
    console.print(
        "trainer CPU s: processor time of the trainer process during the round, all threads. after last s: from the moment the "
        "last response of the batch lies in TransferQueue until the batch is returned with everything else stopped and cleared. "
        "MiB: resident after the round, of workers the largest.",
        soft_wrap=True,
    )
    first, last = sizes[0], sizes[-1]
    for name, meaning in (("trainer_cpu_s", "trainer CPU"), ("after_last_s", "after the last response")):
        least, most = _mean(first, name), _mean(last, name)
        label = f"{last['prompts']} x {last['responses']}"
        word = met(most < LOAD_GOAL_S)
        console.print(f"{label}: {most:.2f} s {meaning} a round; goal under {LOAD_GOAL_S:g} s: {word}")
        times = last["prompts"] * last["responses"] / (first["prompts"] * first["responses"])
        console.print(f"growth: {times:.0f} times the responses take {most / least:.1f} times the seconds ({meaning})")


def _mean(size: dict[str, Any], name: str) -> float:
    return float(sum(row[name] for row in size["rounds"]) / len(size["rounds"]))


def _plot(parts: Sequence[tuple[Callable[[Any, Any], None], list[dict[str, Any]]]], all_axes: Any) -> None:
    for axes, (draw, rows) in zip(all_axes, parts, strict=False):
        draw(axes, rows)
        ticks = sorted({row["prompts"] * row["responses"] for row in rows})
        axes.set_xscale("log")
        axes.set_xlabel("P0 x R0")
        axes.set_xticks(ticks, labels=[str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()


def _plot_core(axes: Any, core: list[dict[str, Any]]) -> None:
    for ratio in dict.fromkeys(row["prompt_ratio"] for row in core):
        rows = [row for row in core if row["prompt_ratio"] == ratio]
        sizes = [row["prompts"] * row["responses"] for row in rows]
        axes.plot(sizes, [row["events_per_s"] / 1e3 for row in rows], marker="o", label=f"prompt_ratio {ratio}")
    axes.axhline(CORE_GOAL / 1e3, color="black", linestyle=":", label="goal")
    axes.set(ylim=(0, None), ylabel="thousand events a second", title="The core alone")


def _plot_load(axes: Any, load: list[dict[str, Any]]) -> None:
    sizes = [size["prompts"] * size["responses"] for size in load]
    for name, label in (("trainer_cpu_s", "trainer process, CPU"), ("after_last_s", "after the last response")):
        axes.plot(sizes, [_mean(size, name) for size in load], marker="o", label=label)
    axes.axhline(LOAD_GOAL_S, color="black", linestyle=":", label="goal")
    axes.set(yscale="log", ylabel="seconds a round", title="Rounds on verl without a model")
