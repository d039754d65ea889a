"""Command ``rl-accel bench chaos``: trains a recipe with tail batching on real verl, and kills processes at random moments."""

import contextlib
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console

from rl_accel.console import show_table, wide_console
from rl_accel.lab.ab.recipe import RunPlan, load, plan_runs, prepare_command
from rl_accel.lab.ab.runner import Stop, last_lines, prepare, ray_temp_dir, supervised
from rl_accel.lab.bench.helpers import number_option, out_option
from rl_accel.rollout.round_driver import METRICS_PREFIX
from rl_accel.rollout.saved import FOLDER

VICTIMS: dict[str, tuple[str, ...]] = {
    "engine": ("VLLM::EngineCore", "sglang::scheduler", "CPURolloutServer"),
    "server": ("vLLMHttpServer", "SGLangHttpServer", "CPURolloutServer"),
    "agent-loop worker": ("AgentLoopWorker",),
    "reward worker": ("RewardLoopWorker",),
    "anchor store": ("AnchorStore",),
    "trainer": ("TaskRunnerV1",),
}
"""Kinds of processes to kill. Mapping from kind to strings, of which the command line of such a process has at least one."""

STEPS, PROMPTS, KILLS = 6, 8, 2
"""Training steps of a run, prompts of a batch, and kills in a run. Small numbers, so that a run takes minutes."""
OVERRIDES = (
    f"data.train_batch_size={PROMPTS}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
    "data.max_response_length=512",
    "trainer.n_gpus_per_node=2",
    "trainer.save_freq=2",
    "trainer.resume_mode=auto",
    "+rl_accel.reward_timeout.enable=True",
)
LAUNCHES = KILLS + 1
"""Maximum number of launches of a run. Each kill may end one launch."""
STANDSTILL_S = 600.0
"""Seconds without a completed training step after which a run counts as hung. The start of verl, which counts too, may take
minutes."""


@dataclass(frozen=True)
class Kill:
    """A planned SIGKILL to one process of kind ``victim``, sent ``seconds`` seconds after training step ``step`` has completed.

    If a training step has taken less than ``seconds``, the signal is sent earlier: after the time of the shortest step so far. The
    next step is then still running.
    """

    victim: str
    step: int
    seconds: float


@dataclass
class Result:
    """Result of one schedule, which is a run with planned kills. The schedule passes if there are no ``problems``.

    ``kills`` are the kills that hit a process. ``seconds`` and ``failed_responses`` are sums over all ``launches`` of the trainer.
    """

    seed: int
    kills: list[Kill] = field(default_factory=list)
    launches: int = 0
    seconds: float = 0.0
    failed_responses: int = 0
    problems: list[str] = field(default_factory=list)


def schedule(seed: int) -> list[Kill]:
    """Returns the planned kills for a seed, ordered by step. Consecutive seeds first kill different kinds of processes."""
    rng, victims = random.Random(seed), tuple(VICTIMS)
    chosen = [victims[seed % len(victims)], *rng.choices(victims, k=KILLS - 1)]
    # verl is still starting before step 1, and the run may be over after the last of these steps
    steps = sorted(rng.sample(range(1, STEPS - 1), KILLS))
    return [Kill(victim, step, rng.uniform(0.0, 4.0)) for victim, step in zip(chosen, steps, strict=True)]


def play(plan: RunPlan, seed: int, folder: Path, stop: Stop) -> Result:
    """Launches the run of ``plan``, kills processes by the schedule of ``seed``, and launches the run again if a kill ended it.

    Finally checks tail batching's ledger, the log of the prompts that each step trained or gave up.
    """
    folder.mkdir(parents=True)
    result, due, began = Result(seed), schedule(seed), time.monotonic()
    checkpoints, log, metrics = folder / "checkpoints", folder / "train.log", folder / "metrics.jsonl"
    ledger = checkpoints / FOLDER / "ledger.jsonl"
    command = [*plan.command, *OVERRIDES, f"trainer.default_local_dir={checkpoints}"]
    settled, since, shortest = -1, began, math.inf

    def follow() -> bool:
        nonlocal settled, since, shortest
        steps, now = len(_lines(ledger)), time.monotonic()
        if steps != settled:
            if settled >= 0:
                shortest = min(shortest, now - since)  # after a longer wait, the run could have ended already
            settled, since = steps, now
        waited = now - since
        if due and steps >= due[0].step and waited >= min(due[0].seconds, shortest) and _kill(due[0].victim, metrics):
            result.kills.append(due.pop(0))
        return waited > STANDSTILL_S

    for result.launches in range(1, LAUNCHES + 1):
        settled, kills_before = -1, len(result.kills)
        with ray_temp_dir() as ray_dir:
            environment = {**plan.env, "VERL_FILE_LOGGER_PATH": str(metrics), "RAY_TMPDIR": str(ray_dir)}
            outcome = supervised(command, environment, folder, log, stop, follow, ray_dir)
        failed = f"{METRICS_PREFIX}responses_failed"
        result.failed_responses += int(sum(row["data"].get(failed, 0) for row in _lines(metrics)))
        metrics.unlink(missing_ok=True)  # the next launch starts a new metrics file
        if outcome.reason == "timeout":
            result.problems.append(f"no step in {STANDSTILL_S:.0f} s: {last_lines(log, 3)}")
        elif outcome.exit_code and len(result.kills) == kills_before:
            result.problems.append(f"launch {result.launches} ended although nothing was killed: {last_lines(log, 3)}")
        if stop or not outcome.exit_code or result.problems:
            break
    result.seconds = time.monotonic() - began
    result.problems += _problems_of_ledger(_lines(ledger))
    return result


def _problems_of_ledger(ledger: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns errors in tail batching's log of trained prompts: missing or repeated steps, batches of another size than
    :data:`PROMPTS`, prompts trained twice or given up."""
    problems = []
    steps, sizes = [line["step"] for line in ledger], [len(line["trained"]) for line in ledger]
    if steps != list(range(1, STEPS + 1)):
        problems.append(f"the ledger has the steps {steps}")
    if set(sizes) != {PROMPTS}:
        problems.append(f"batches had {sizes} prompts")
    trained = [prompt_id for line in ledger for prompt_id in line["trained"]]
    if twice := len(trained) - len(set(trained)):
        problems.append(f"{twice} prompts were trained twice")
    if lost := sum(len(line["failed"]) for line in ledger):
        problems.append(f"{lost} prompts were given up")
    return problems


def _lines(path: Path) -> list[dict[str, Any]]:
    """Returns the complete lines of a file of JSON lines; none if there is no file."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _kill(victim: str, metrics: Path) -> bool:
    """Kills a process of kind ``victim`` in the run that logs to the file ``metrics``. Returns False if there is none."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            name = " ".join(process.cmdline())
            is_victim = any(word in name for word in VICTIMS[victim])
            if is_victim and process.environ().get("VERL_FILE_LOGGER_PATH") == str(metrics):
                process.kill()
                return True
    return False


@click.command("chaos")
@click.argument("recipe_path", metavar="RECIPE", type=click.Path(exists=True, path_type=Path))
@number_option("--schedules", type=click.IntRange(min=1), default=20)
@number_option("--first-seed", type=click.IntRange(min=0), default=0)
@out_option("chaos.json, logs and checkpoints", default=Path("out/chaos"), show_default=True)
def bench_chaos(recipe_path: Path, schedules: int, first_seed: int, out: Path) -> None:
    """Kill processes of a run at random moments and check that every prompt is still trained exactly once.

    Each schedule is a run of the recipe's arm "tail": six steps on two replicas, with a checkpoint every second step and two
    kills. A kill hits an engine, a rollout server, an agent-loop worker, a reward worker, the store of learned reward time limits
    or the trainer. A run that fails is launched again. Errors are prompts that are trained twice, given up or missing, and runs
    that hang. After an error, the exit status is 1.
    """
    console = wide_console()
    recipe_file = (recipe_path / "recipe.yaml" if recipe_path.is_dir() else recipe_path).absolute()
    recipe = load(recipe_file)
    out = out.absolute()
    (plan,) = plan_runs(recipe, recipe_file.parent, out, arms=["tail"], seeds=recipe.seeds[:1], steps=STEPS)
    results = []
    with Stop().listening() as stop:
        prepared = prepare_command(recipe, recipe_file.parent, out)
        prepare(*prepared, recipe_file.parent, out / "prepare.log", stop)
        for seed in range(first_seed, first_seed + schedules):
            with console.status(f"schedule {seed}"):
                results.append(play(plan, seed, out / f"{time.time_ns()}-{seed}", stop))
            if stop:
                raise click.Abort
            _show_schedules(results[-1:], console)
    _show_schedules(results, console)
    (out / "chaos.json").write_text(json.dumps([vars(result) for result in results], indent=2, default=vars))
    if any(result.problems for result in results):
        raise SystemExit(1)


def _show_schedules(results: Sequence[Result], console: Console) -> None:
    rows = []
    for result in results:
        killed = ", ".join(f"{kill.victim} after step {kill.step}" for kill in result.kills)
        verdict = "; ".join(result.problems) or "every prompt once"
        rows.append((result.seed, killed, result.launches, f"{result.seconds:.0f}", result.failed_responses, verdict))
    show_table(console, ("seed", "killed", "launches", "seconds", "responses failed", "verdict"), rows)
