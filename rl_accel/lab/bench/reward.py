"""Command ``rl-accel bench reward``: compares a fixed and the adaptive time limit for programs that a reward function executes.

:func:`workload` draws programs with published durations. :func:`run_arms` executes them in real processes, batch by batch under
each limit in turn, and checks the verdicts. :func:`summarise` aggregates the results.
"""

import asyncio
import contextlib
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
from rich.console import Console

from rl_accel.console import say, show_table, wide_console
from rl_accel.features import RewardTimeoutFlags
from rl_accel.lab.bench.helpers import met, number_option, out_option, results_file
from rl_accel.ops.inputs import usable_cores
from rl_accel.reward.adaptive_timeout import PROGRAM_BUDGET, AdaptiveTimeout
from rl_accel.reward.anchor_store import LocalAnchors
from rl_accel.reward.execution import ExecutionResult
from rl_accel.reward.limited_executor import LimitedExecutor, execute_program
from rl_accel.reward.sandbox import Case, Graders, Sandbox

PROMPTS, BATCH = 112, 14
"""Numbers of prompts in an epoch and in a batch. Chosen so that the benchmark, with 16 programs per prompt, takes ten minutes."""
CONDITIONS = ("quiet", "loaded")
"""Load of the machine during a measurement. quiet: no extra load. loaded: one extra busy process per core."""
CALLS = 500
"""Number of measured calls of a grader that never hangs. With this number, single slow calls do not change the median."""
FASTER_GOAL = 3.0
"""Goal: minimum ratio of the seconds of all executions under the fixed limit to those under the adaptive limit. Chosen by hand."""
KILLED_GOAL = 0.002
"""Goal: maximum share of correct answers that the adaptive limit stops. Chosen by hand."""
CALL_GOAL = 0.001
"""Goal: maximum extra seconds per call of a grader that never hangs, compared with stock verl. Chosen by hand."""

HANGING = 0.0505
"""Share of executions that hit a fixed limit of 30 s, read from Fig. 7a of RollPacker (NSDI'26)."""
# fmt: off
SECONDS = (
    0.116, 0.147, 0.164, 0.185, 0.2, 0.252, 0.29, 0.361, 0.393, 0.441, 0.489, 0.565, 0.652, 0.694, 0.74, 0.788, 0.833, 0.955, 1.065,
    1.237, 1.62, 2.264, 2.79, 15.09, 23.55, 29.0,
)
SHARES = (
    0.0, 0.039, 0.077, 0.126, 0.165, 0.302, 0.446, 0.609, 0.642, 0.686, 0.73, 0.756, 0.798, 0.821, 0.85, 0.873, 0.89, 0.919, 0.931,
    0.936, 0.939, 0.9405, 0.943, 0.945, 0.947, 0.9495,
)
# fmt: on
"""Cumulative distribution of published durations, from the same figure as HANGING: ``SHARES[i]`` is the share of executions that
take at most ``SECONDS[i]`` seconds."""
CORRECT = (0.2, 1.0)
"""Shares of correct responses to the hardest and to the easiest prompt. The shares of the other prompts are spaced evenly between
these. Chosen by hand: nothing is published."""
ANSWER = "42"

_Pool = TypeVar("_Pool", Sandbox, Graders)


class WrongResult(Exception):
    """Error for an execution whose verdict (such as passed or timeout) is not the expected one."""


@dataclass(frozen=True)
class Program:
    """A response to ``prompt``: the code of a Python program, which takes ``seconds`` seconds; None for a program that never ends.

    ``correct``: whether the program would print the right answer without a time limit.
    """

    prompt: str
    code: str
    correct: bool
    seconds: float | None


CASE = Case("stdin", "", ANSWER)


def workload(
    prompts: int,
    responses: int,
    epochs: int,
    batch: int,
    scale: float,
    spread: float,
    overhead: float = 0.0,
    seed: int = 0,
) -> list[list[Program]]:
    """Returns batches of random programs. Each batch has ``batch`` prompts, and ``responses`` programs per prompt.

    Each prompt has a typical duration from the published distribution (:data:`SHARES`). A program sleeps or computes for this
    duration, multiplied by a log-normal factor. A share :data:`HANGING` of all programs never ends; all of these are wrong.

    Args:
        prompts: number of prompts in an epoch. Each epoch has a new order of prompts.
        scale: factor on all seconds.
        spread: standard deviation of the logarithm of the log-normal factor.
        overhead: seconds that the sandbox adds to an execution. Programs are shorter by this, so that executions take the published
            durations.
    """
    rng = random.Random(seed)
    shares = [(i + 0.5) / prompts for i in range(prompts)]
    typical = [published_seconds(share) for share in shares]
    correct = [CORRECT[0] + (CORRECT[1] - CORRECT[0]) * share for share in shares]
    rng.shuffle(typical)
    rng.shuffle(correct)
    visits = [(epoch, prompt) for epoch in range(epochs) for prompt in range(prompts)]
    is_right = {visit: [rng.random() < correct[visit[1]] for _ in range(responses)] for visit in visits}
    wrong = [(visit, index) for visit, answers in is_right.items() for index, right in enumerate(answers) if not right]
    hanging = set(rng.sample(wrong, round(HANGING * len(visits) * responses)))

    def draw(visit: tuple[int, int], index: int, right: bool) -> Program:
        _, prompt = visit
        seconds = min(typical[prompt] * rng.lognormvariate(0, spread), SECONDS[-1]) * scale
        program_seconds = None if (visit, index) in hanging else max(seconds - overhead, 0.0)
        code = program_code(rng.choice((False, True)), program_seconds, ANSWER if right else "41")
        return Program(f"prompt-{prompt}", code, right, program_seconds)

    batches = []
    for epoch in range(epochs):
        order = list(range(prompts))
        rng.shuffle(order)
        for first in range(0, prompts, batch):
            visited = [(epoch, prompt) for prompt in order[first : first + batch]]
            drawn = [draw(visit, index, right) for visit in visited for index, right in enumerate(is_right[visit])]
            rng.shuffle(drawn)
            batches.append(drawn)
    return batches


def published_seconds(share: float) -> float:
    """Returns the quantile ``share`` (from 0 to 1) of the published durations in seconds, without executions that never end."""
    return float(np.interp(share * SHARES[-1], SHARES, SECONDS))


def program_code(computes: bool, seconds: float | None, answer: str) -> str:
    """Returns Python code that prints ``answer`` after ``seconds`` seconds, or never ends if ``seconds`` is None.

    The program computes (for ``seconds`` seconds of CPU time) if ``computes``, else it sleeps.
    """
    if seconds is None:
        return "while True:\n    pass" if computes else "import time\nwhile True:\n    time.sleep(9)"
    wait = f"while time.process_time() < {seconds}:\n    pass" if computes else f"time.sleep({seconds})"
    return f"import time\n{wait}\nprint({answer})"


@dataclass
class PolicyResults:
    """Measurements under one policy for time limits, such as "fixed" or "adaptive".

    Attributes:
        results: result of each execution, in the order of the batches.
        makespans: seconds from the start of each batch to its last result.
        counts: counters of the executor, by name.
    """

    results: list[ExecutionResult] = field(default_factory=list)
    makespans: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


async def run_arms(
    batches: Sequence[Sequence[Program]], policies: Mapping[str, RewardTimeoutFlags], slots: int
) -> dict[str, PolicyResults]:
    """Executes every batch under each time limit policy in turn. Returns the results of each policy, by name.

    All responses of a batch are submitted at once, as after a rollout. At most ``slots`` of them run at once.

    Raises:
        WrongResult: a verdict is wrong, see :func:`require_expected_verdicts`.
    """
    arms = {name: PolicyResults() for name in policies}
    executors = {name: LimitedExecutor(LocalAnchors(AdaptiveTimeout(flags)), slots) for name, flags in policies.items()}
    async with _closing(Sandbox(slots)) as sandbox:
        for number, batch in enumerate(batches):
            for name in list(policies)[:: -1 if number % 2 else 1]:  # no policy is first in every batch
                began = time.monotonic()
                cases = await asyncio.gather(
                    *(execute_program(executors[name], sandbox, r.prompt, r.code, [CASE]) for r in batch)
                )
                arms[name].makespans.append(time.monotonic() - began)
                results = [result for (result,) in cases]
                require_expected_verdicts(batch, results)
                arms[name].results += results
                arms[name].counts.update(executors[name].anchors.take_delta().counts)
    return arms


def require_expected_verdicts(batch: Sequence[Program], results: Sequence[ExecutionResult]) -> None:
    """Raises WrongResult unless each program of ``batch`` has a possible verdict.

    This is "timeout" for a program that never ends, else "timeout" or the verdict of the program's answer ("passed" or "wrong").
    """
    for response, result in zip(batch, results, strict=True):
        earned = "passed" if response.correct else "wrong"
        allowed = ("timeout",) if response.seconds is None else (earned, "timeout")
        if result.verdict not in allowed:
            raise WrongResult(
                f"wanted {' or '.join(allowed)}, found {result.verdict} ({result.reason}):\n{response.code}"
            )


async def measure_overhead(slots: int) -> float:
    """Returns the median seconds that the sandbox takes to execute a trivial program. Executes one program at a time."""
    async with _closing(Sandbox(slots)) as sandbox:
        return statistics.median([(await sandbox.run(f"print({ANSWER})", CASE)).wall for _ in range(30)])


def grade_at_once(answer: str) -> float:
    """Returns 1.0 for the right answer, else 0.0. Stands for a grader that never hangs and takes no time."""
    return float(answer == ANSWER)


async def measure_call_cost() -> dict[str, float]:
    """Returns the median seconds of a call of :func:`grade_at_once`: in a thread as in verl ("stock"), and in a persistent worker
    process as in rl-accel ("pack")."""
    executor = LimitedExecutor(LocalAnchors(AdaptiveTimeout(RewardTimeoutFlags())), 1)
    loop = asyncio.get_running_loop()
    seconds: dict[str, list[float]] = {"stock": [], "pack": []}
    async with _closing(Graders(f"{__file__}:{grade_at_once.__name__}", 1)) as graders:
        for number in range(CALLS):
            began = time.perf_counter()
            score = await loop.run_in_executor(None, grade_at_once, ANSWER)
            between = time.perf_counter()
            result = await executor.execute(
                str(number), "case", lambda limits: graders.call({"answer": ANSWER}, limits), lambda _: True
            )
            seconds["stock"].append(between - began)
            seconds["pack"].append(time.perf_counter() - between)
            if (result.verdict, result.value) != ("done", score):
                raise WrongResult(f"wanted {score}, found {result.verdict} ({result.reason})")
    return {name: statistics.median(each) for name, each in seconds.items()}


@contextlib.asynccontextmanager
async def _closing(pool: _Pool) -> AsyncIterator[_Pool]:
    try:
        yield pool
    finally:
        await pool.close()


@contextlib.contextmanager
def busy_processes(processes: int) -> Iterator[None]:
    """Runs ``processes`` extra processes in an endless loop during the ``with`` block, to keep cores busy."""
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def summarise(batches: Sequence[Sequence[Program]], arms: Mapping[str, PolicyResults]) -> dict[str, Any]:
    """Returns a mapping from time limit policy to measured numbers, among them these:

    - ``seconds``: wall-clock seconds of all executions together; ``own_seconds``: without waits for a processor.
    - ``times_less``: ``seconds`` of the first policy divided by ``seconds`` of this policy.
    - ``step_s``: mean seconds from the start of a batch to the last result of the batch.
    - ``wrongly_killed``: number of correct answers that did not pass.
    - ``struck``: number of executions stopped by each limit, by name of the limit (such as ``wall``).
    - ``full_budget``: number of executions that were stopped although they had the longest limit (the full budget).
    """
    is_correct = [response.correct for batch in batches for response in batch]
    rows: dict[str, Any] = {}
    for name, arm in arms.items():
        results, seconds = arm.results, [result.wall for result in arm.results]
        stopped = [result for result in results if result.verdict == "timeout"]
        killed = [right and result.verdict != "passed" for right, result in zip(is_correct, results, strict=True)]
        rows[name] = {
            "executions": len(results),
            "seconds": sum(seconds),
            "own_seconds": sum(result.wall - result.waited for result in results),
            "step_s": statistics.mean(arm.makespans),
            "p99_s": float(np.quantile(seconds, 0.99)),
            "correct": sum(is_correct),
            "wrongly_killed": sum(killed),
            "timeouts": len(stopped),
            "struck": dict(Counter(result.reason.split()[0] for result in stopped)),
            "full_budget": int(arm.counts["timeouts_full"]),
        }
    first = next(iter(rows.values()))
    for row in rows.values():
        row["times_less"] = first["seconds"] / row["seconds"]
        row["own_times_less"] = first["own_seconds"] / row["own_seconds"]
    return rows


def kill_verdict(killed: int, correct: int) -> str:
    """Returns "met", "NOT met" or "too few to tell" for the goal on the share of wrongly stopped correct answers.

    ``killed`` of ``correct`` correct answers did not pass. "met" needs evidence that the true share is below the goal: with a true
    share equal to the goal, so few would be stopped in at most 5% of cases (binomial test).
    """
    # a single stopped answer may be chance
    if killed > max(1.0, KILLED_GOAL * correct):
        return "NOT met"
    chances = (math.comb(correct, k) * KILLED_GOAL**k * (1 - KILLED_GOAL) ** (correct - k) for k in range(killed + 1))
    return "met" if killed <= KILLED_GOAL * correct and sum(chances) <= 0.05 else "too few to tell"


def policies(scale: float) -> dict[str, RewardTimeoutFlags]:
    """Returns the flags of two policies: "fixed" always has the longest limit, "adaptive" learns limits from correct executions.

    All default times of rl-accel are multiplied by ``scale``.
    """
    defaults = RewardTimeoutFlags()
    slack, minimum = defaults.slack * scale, defaults.minimum * scale
    adaptive = replace(defaults, slack=slack, minimum=minimum, maximum=PROGRAM_BUDGET * scale)
    return {"fixed": replace(adaptive, min_correct=10**9), "adaptive": adaptive}


@click.command("reward")
@out_option("reward.json")
@number_option("--responses", type=click.IntRange(min=1), default=16, help="Responses per prompt.")
@number_option("--epochs", type=click.IntRange(min=1), default=1, help="Times that each prompt is seen.")
@number_option("--scale", type=click.FloatRange(min=0.02), default=0.07, help="Factor on all times and limits.")
@number_option("--spread", type=click.FloatRange(min=0), default=0.3, help="Sigma of log(time) within a prompt.")
def bench_reward(out: Path | None, responses: int, epochs: int, scale: float, spread: float) -> None:
    """Measure the savings and the cost of the adaptive time limit for programs that a reward function executes.

    The real executor runs programs with published durations in the real sandbox. The programs sleep or compute, give right or wrong
    answers, and one in 20 never ends. Each batch is executed under the fixed and under the adaptive limit, first on the machine as
    it is, then with one extra busy process per core.

    A wrong verdict is an error: there is no number, and the exit status is 1. Too many stopped correct answers also give exit
    status 1. A missed ratio is shown but does not change the exit status, because machines are shared and noisy.
    """
    console = wide_console()
    cores = usable_cores()
    slots = 2 * cores
    settings = policies(scale)
    console.print(
        f"{PROMPTS} prompts x {responses} responses x {epochs} epochs, {slots} at once on {cores} cores; "
        f"all times x {scale:g}; load average {os.getloadavg()[0]:.1f}"
    )
    rows: dict[str, Any] = {}
    try:
        overhead = asyncio.run(measure_overhead(slots))
        console.print(f"the sandbox takes {overhead * 1000:.1f} ms of an execution")
        call = asyncio.run(measure_call_cost())
        added = call["pack"] - call["stock"]
        console.print(
            f"a grader that never hangs: {call['stock'] * 1000:.2f} ms a call in a thread, as in verl, "
            f"{call['pack'] * 1000:.2f} ms here; goal at most {CALL_GOAL * 1000:g} ms more: {met(added <= CALL_GOAL)}"
        )
        batches = workload(PROMPTS, responses, epochs, BATCH, scale, spread, overhead)
        for condition in CONDITIONS:
            with busy_processes(cores if condition == "loaded" else 0), console.status(condition):
                before = os.getloadavg()[0]
                arms = asyncio.run(run_arms(batches, settings, slots))
                rows[condition] = {"load_average": [before, os.getloadavg()[0]], "arms": summarise(batches, arms)}
    except WrongResult as error:
        console.print("[red]WRONG: [/red]", end="")
        console.print(f"{error}\nno numbers", markup=False)
        raise SystemExit(1) from None
    console.print(f"correct: all verdicts of {len(CONDITIONS) * 2 * sum(map(len, batches)):,} executions")
    red = _show_results(rows, console)
    size = {"prompts": PROMPTS, "responses": responses, "epochs": epochs, "batch": BATCH}
    options = {**size, "workers": slots, "cores": cores, "scale": scale, "spread": spread}
    policy = {name: asdict(value) for name, value in settings.items()}
    results = {"given": {**options, "overhead_s": overhead, "call_s": call}, "policies": policy, "found": rows}
    results_file(out, "reward.json", results, console)
    if red:
        raise SystemExit(1)


def _show_results(rows: Mapping[str, Any], console: Console) -> bool:
    """Prints the results as a table, and whether the goals are met. Returns True if too many correct answers were stopped."""
    headings = ("machine", "limit", "total s", "times less", "step s", "p99 s", "correct", "killed wrongly", "timeouts")
    cells = []
    for condition, measured in rows.items():
        for name, row in measured["arms"].items():
            struck = ", ".join(f"{count} {limit}" for limit, count in sorted(row["struck"].items()))
            numbers = [f"{row['seconds']:.1f}", *(f"{row[key]:.2f}" for key in ("times_less", "step_s", "p99_s"))]
            killed = f"{row['wrongly_killed']} ({row['wrongly_killed'] / max(row['correct'], 1):.2%})"
            timeouts = f"{row['timeouts']} ({struck})" if struck else "0"
            cells.append((condition, name, *numbers, f"{row['correct']:,}", killed, timeouts, row["full_budget"]))
    show_table(console, (*headings, "full budget"), cells, "Executions, and what stopped them")
    say(
        console,
        "total s: seconds of all executions. p99 s: seconds of one execution",
        "step s: mean seconds from the start of a batch, which begins at once, to its last result",
        "full budget: timeouts of executions for which no limit was learned, and of probes",
    )
    red = False
    for condition, measured in rows.items():
        row = measured["arms"]["adaptive"]
        load_average = "{:.1f} to {:.1f}".format(*measured["load_average"])
        less, own_less = row["times_less"], row["own_times_less"]
        console.print(
            f"{condition} (load average {load_average}): {less:.2f} times less, {own_less:.2f} less without their waits "
            f"for a processor; goal {FASTER_GOAL:g}: {met(less >= FASTER_GOAL)}"
        )
        killed, correct = row["wrongly_killed"], row["correct"]
        word = kill_verdict(killed, correct)
        red |= word == "NOT met"
        console.print(
            f"{condition}: {killed} of {correct:,} correct answers killed ({killed / max(correct, 1):.2%}); "
            f"goal at most {KILLED_GOAL:.1%}: {word}",
            style="red" if word == "NOT met" else None,
        )
    return red
