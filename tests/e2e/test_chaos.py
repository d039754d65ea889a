"""Kills processes of runs at random moments. Every prompt is still trained once, and nothing hangs.

test_tail_batching_killed_servers.py kills servers and engines that are started again within the run; those of SGLang are not.

Each schedule is a run of a recipe's arm "tail": six steps on two replicas, with a checkpoint every second step and two kills. A run
that fails is launched again.
"""

import contextlib
import json
import math
import random
import time

import psutil
import pytest

from rl_accel.lab.ab.recipe import load, plan_runs, prepare_command
from rl_accel.lab.ab.runner import Stop, last_lines, prepare, ray_temp_dir, supervised
from rl_accel.rollout.saved import FOLDER

pytestmark = [pytest.mark.full, pytest.mark.timeout(4800)]

VICTIMS = {
    "engine": ("VLLM::EngineCore", "sglang::scheduler", "CPURolloutServer"),
    "server": ("vLLMHttpServer", "SGLangHttpServer", "CPURolloutServer"),
    "agent-loop worker": ("AgentLoopWorker",),
    "reward worker": ("RewardLoopWorker",),
    "anchor store": ("AnchorStore",),
    "trainer": ("TaskRunnerV1",),
}
"""Mapping from kind of process to strings, of which the command line of such a process has at least one."""
STEPS = 6
PROMPTS = 8
KILLS = 2
OVERRIDES = (
    f"data.train_batch_size={PROMPTS}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
    "data.max_response_length=512",
    "trainer.n_gpus_per_node=2",
    "trainer.save_freq=2",
    "trainer.resume_mode=auto",
    "+rl_accel.reward_timeout.enable=True",
)
STANDSTILL_S = 1200.0
"""Seconds without a completed training step after which a run counts as hung, the start of verl included."""


def schedule(seed):
    """Returns the planned kills as ``(kind, step, seconds)``: a SIGKILL some seconds after a training step has completed."""
    rng = random.Random(seed)
    kinds = tuple(VICTIMS)
    chosen = [kinds[seed % len(kinds)], *rng.choices(kinds, k=KILLS - 1)]
    # verl is still starting before step 1, and the run may be over after the last of these steps
    steps = sorted(rng.sample(range(1, STEPS - 1), KILLS))
    return [(kind, step, rng.uniform(0.0, 4.0)) for kind, step in zip(chosen, steps, strict=True)]


class Killer:
    """Follows a run by its ledger, and kills processes by the schedule of ``seed``.

    If a step took less time than a kill would wait, the kill comes after the time of the shortest step, while the next one runs.
    """

    def __init__(self, seed, ledger, metrics):
        self.due = schedule(seed)
        self.killed = []
        self._ledger = ledger
        self._metrics = metrics
        self._shortest = math.inf
        self.begin_launch()

    def begin_launch(self):
        self._settled = -1
        self._since = time.monotonic()

    def stands_still(self):
        """Kills a process if one is due. Returns whether the run must be ended."""
        now = time.monotonic()
        steps = len(lines_of(self._ledger))
        if steps != self._settled:
            if self._settled >= 0:
                self._shortest = min(self._shortest, now - self._since)
            self._settled = steps
            self._since = now
        waited = now - self._since
        if self.due:
            kind, step, seconds = self.due[0]
            if steps >= step and waited >= min(seconds, self._shortest) and self._kill(kind):
                self.killed.append(kind)
                self.due.pop(0)
        return waited > STANDSTILL_S

    def _kill(self, kind):
        """Kills a process of this kind in the run that logs to the file of metrics. Returns False if there is none."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                name = " ".join(process.cmdline())
                is_victim = any(word in name for word in VICTIMS[kind])
                if is_victim and process.environ().get("VERL_FILE_LOGGER_PATH") == str(self._metrics):
                    process.kill()
                    return True
        return False


def lines_of(path):
    """Returns the complete lines of a file of JSON lines; none if there is no file."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@pytest.fixture
def play(engine, clean_environment, forks, forked_workers):
    """``play(plan, seed, folder)`` launches the run of ``plan`` until it ends well, at most once more for each kill.

    Returns the kinds of processes killed, and the number of launches.
    """

    def run(plan, seed, folder):
        folder.mkdir()
        ledger = folder / "checkpoints" / FOLDER / "ledger.jsonl"
        metrics = folder / "metrics.jsonl"
        log = folder / "train.log"
        killer = Killer(seed, ledger, metrics)
        overrides = [*OVERRIDES, f"trainer.default_local_dir={folder / 'checkpoints'}"]
        launches = 0
        exit_code = None
        while exit_code != 0 and launches <= KILLS:
            launches += 1
            killer.begin_launch()
            killed_before = len(killer.killed)
            with ray_temp_dir() as ray_dir:
                environment = {key: value for key, value in plan.env.items() if value is not None}
                environment |= {"VERL_FILE_LOGGER_PATH": str(metrics), "RAY_TMPDIR": str(ray_dir)}
                with forks(engine.python, {**clean_environment, **environment}) as start:
                    variables = forked_workers(start, environment)
                    command = [*start, *plan.command[1:], *overrides]
                    outcome = supervised(command, variables, folder, log, Stop(), killer.stands_still, ray_dir)
            assert outcome.reason != "timeout", f"no step in {STANDSTILL_S:.0f} s: {last_lines(log, 3)}"
            exit_code = outcome.exit_code
            assert exit_code == 0 or len(killer.killed) > killed_before, last_lines(log)
        trained = [line["trained"] for line in lines_of(ledger)]
        assert [line["step"] for line in lines_of(ledger)] == list(range(1, STEPS + 1))
        assert {len(prompts) for prompts in trained} == {PROMPTS}
        assert len({prompt for prompts in trained for prompt in prompts}) == STEPS * PROMPTS, "none was trained twice"
        assert not any(line["failed"] for line in lines_of(ledger)), "no prompt was given up"
        return killer.killed, launches

    return run


@pytest.mark.parametrize(
    ("engine", "example", "seed", "victims"),
    [
        ("hf_cpu", "verl_tail_batching", 16, [["anchor store", "agent-loop worker"], ["trainer", "reward worker"]]),
        pytest.param("sglang", "verl_sglang_cpu", 1, [["server", "engine"]], marks=pytest.mark.sglang),
    ],
    indirect=["engine"],
    scope="module",
)
def test_every_prompt_is_trained_once_whatever_dies(repo, play, engine, example, seed, victims, tmp_path):
    """Two kills in each schedule. Only a dead trainer ends a run, and on SGLang a dead engine or server."""
    recipe_file = repo / "examples" / example / "recipe.yaml"
    recipe = load(recipe_file)
    (plan,) = plan_runs(recipe, recipe_file.parent, tmp_path, arms=["tail"], seeds=recipe.seeds[:1], steps=STEPS)
    prepare(
        *prepare_command(recipe, recipe_file.parent, tmp_path), recipe_file.parent, tmp_path / "prepare.log", Stop()
    )
    ends = {"trainer"} if engine.name == "hf_cpu" else {"trainer", "engine", "server"}
    for number, planned in enumerate(victims):
        killed, launches = play(plan, seed + number, tmp_path / str(number))
        assert killed == planned
        assert launches == 1 + sum(kind in ends for kind in killed)
