"""Command ``rl-accel bench tail``: measures the overhead of tail batching in whole rollout rounds on verl, without a model."""

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from rl_accel.console import say, show_table, wide_console
from rl_accel.lab.ab.runner import Stop, last_lines, ray_temp_dir, supervised
from rl_accel.lab.bench.helpers import met, out_option, results_file

# a round of the largest batch takes minutes: verl's agent loop needs about 20 CPU milliseconds per response
LOADS = ((32, 16, 3), (128, 16, 2), (512, 16, 1))
"""Batch sizes of the benchmark: number of prompts in a batch (P0), number of responses per prompt (R0), and number of rounds."""
LOAD_GOAL_S = 2.0
"""Goal for the overhead of a round: maximum CPU seconds of the trainer, and maximum seconds from the last response to the end.
Chosen by hand."""
LOAD_MODULE = "rl_accel.lab.bench.tail_load"
LONGEST_S = 900.0
"""Maximum seconds for all rounds of one batch size: several times the time on two quiet cores. Slower rounds count as failed."""


@click.command("tail")
@out_option("tail.json")
def bench_tail(out: Path | None) -> None:
    """Measure the overhead of tail batching in rollout rounds on verl, without a model.

    The overhead is the CPU time of the trainer process, and the time from the last response of a batch to the end of the round.
    Everything but the rollout servers is real and runs in its own process. The servers sleep for random times instead of decoding.

    Errors are a batch that is not exactly P0 prompts x R0 responses, an entry that a cancelled response leaves in TransferQueue
    (verl's store for responses), and a prompt that is lost or trained twice. After an error, the batch size gets no number, and the
    exit status is 1. Missed goals are shown but do not change the exit status, because machines are shared and noisy.
    """
    console = wide_console()
    missing = [name for name in ("verl", "transfer_queue", "ray") if importlib.util.find_spec(name) is None]
    if missing:
        raise click.ClickException(f"this benchmark runs on verl, and {', '.join(missing)} is not installed here")
    sizes: list[dict[str, Any]] = []
    problem = ""
    with Stop().listening() as stop:
        for prompts, responses, rounds in LOADS:
            label = f"{prompts} x {responses}"
            with console.status(f"{label}: {rounds} rounds"):
                measured, problem = _run_rounds(prompts, responses, rounds, stop)
            if stop:
                raise click.Abort
            if problem:
                console.print(f"[red]WRONG: {label}: [/red]", end="")
                console.print(problem, markup=False)
                break
            console.print(f"correct: {label}: exact batches, no key left behind, no prompt trained twice or lost")
            sizes.append({"prompts": prompts, "responses": responses, "rounds": measured})
    if sizes:
        _show_load(sizes, console)
        results_file(out, "tail.json", {"load": sizes}, console)
    if problem:
        raise SystemExit(1)


def _run_rounds(prompts: int, responses: int, rounds: int, stop: Stop) -> tuple[list[dict[str, Any]], str]:
    """Runs the rounds of one batch size in a new process.

    Returns the measurements of each round, and a message about what went wrong ("" if nothing did).
    """
    environment: dict[str, str | None] = {
        "RAY_ADDRESS": None,
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VERL_LOGGING_LEVEL": "ERROR",
    }
    with ray_temp_dir() as folder:
        results, log = folder / "results.json", folder / "log"
        command = [sys.executable, "-m", LOAD_MODULE, *map(str, (prompts, responses, rounds, results))]
        environment["RAY_TMPDIR"] = str(folder)
        deadline = time.monotonic() + LONGEST_S
        outcome = supervised(command, environment, folder, log, stop, lambda: time.monotonic() > deadline, temp=folder)
        if outcome.reason != "timeout" and not outcome.exit_code and results.exists():
            return json.loads(results.read_text()), ""
        slow = outcome.reason == "timeout"
        problem = f"it took more than {LONGEST_S:.0f} s" if slow else f"exit status {outcome.exit_code}"
        return [], f"{problem}; the end of its log:\n{last_lines(log)}"


def _show_load(sizes: list[dict[str, Any]], console: Console) -> None:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "round": lambda row: row["kind"],
        "launched": lambda row: f"{row['launched_responses']:,.0f}",
        "round s": lambda row: f"{row['seconds']:.1f}",
        "trainer CPU s": lambda row: f"{row['trainer_cpu_s']:.2f}",
        "of the round": lambda row: f"{row['trainer_cpu_s'] / row['seconds']:.1%}",
        "after last s": lambda row: f"{row['after_last_s']:.2f}",
        "events": lambda row: f"{row['events']:,}",
        "events / CPU s": lambda row: f"{row['events'] / row['trainer_cpu_s']:,.0f}",
        "trainer MiB": lambda row: f"{row['trainer_bytes'] / 2**20:,.0f}",
        "worker MiB": lambda row: f"{row['worker_bytes'] / 2**20:,.0f}",
        "workers CPU s": lambda row: f"{row['worker_cpu_s']:.1f}",
    }
    labelled = [(f"{size['prompts']} x {size['responses']}", row) for size in sizes for row in size["rounds"]]
    rows = [(label, *(cell(row) for cell in columns.values())) for label, row in labelled]
    show_table(console, ("P0 x R0", *columns), rows, "Rounds on verl without a model")
    say(
        console,
        "trainer CPU s: processor time of all threads of the trainer process during the round",
        "after last s: from the last response in TransferQueue until the batch is returned and all else is stopped and cleared",
        "MiB: resident memory after the round; of the workers, the largest",
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
