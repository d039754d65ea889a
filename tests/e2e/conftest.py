"""Fixtures that run verl's trainer on a tiny model, as the recipe in ``examples/verl_ppo_cpu`` does.

When a fixture returns, all processes of the run have ended.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import psutil
import pytest
import yaml
from filelock import FileLock

from rl_accel.lab.ab.recipe import load, plan_runs, prepare_command
from rl_accel.lab.ab.runner import Stop, last_lines, prepare, ray_temp_dir, supervised

PROBE = Path(__file__).parent / "probe"
LOOPS = Path(__file__).parent / "loops"
SINGLE_TURN = "single_turn_agent"
MAIN = 'import runpy; runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)'
ROLES = ("TaskRunnerV1", "WorkerDict", "AgentLoopWorker", "RewardLoopWorker")
"""Names in the process titles that Ray gives to the trainer, FSDP workers, agent loops and reward workers."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks every test in this folder as ``e2e`` and raises its time limit."""
    item.add_marker("e2e")
    if not item.get_closest_marker("timeout"):
        item.add_marker(pytest.mark.timeout(1500))


@dataclass(frozen=True)
class Engine:
    """A rollout engine for tests: its name, the Python of its environment, and verl's overrides for it."""

    name: str
    python: str
    overrides: tuple[str, ...] = ()


@pytest.fixture(scope="module")
def engine(request, repo) -> Engine:
    """The CPU engine, or the engine that a test names as a parameter. "any" means vLLM if its environment exists."""
    name = getattr(request, "param", "hf_cpu")
    real = "vllm" if name == "any" else name
    python = Path(os.environ.get(f"{real.upper()}_PYTHON", repo / f".venv-{real}" / "bin" / "python"))
    if name == "any":
        name = "vllm" if python.exists() else "hf_cpu"
    if name == "hf_cpu":
        return Engine(name, sys.executable)
    if not python.exists():
        pytest.skip(f"real {name} is absent: `make {name}` builds its environment")
    return Engine(name, str(python), (f"actor_rollout_ref.rollout.name={name}",))


@pytest.fixture(scope="module")
def recipe_command(repo, workspace, clean_environment, engine) -> Callable[..., tuple[list[str], dict[str, str]]]:
    """``recipe_command(steps, batch=None)`` returns command and environment of the recipe's stock arm, for the fixture ``engine``.

    ``batch``: the number of prompts that a step trains, in one mini-batch, and of responses to each.
    """

    def plan(steps: int, batch: tuple[int, int] | None = None) -> tuple[list[str], dict[str, str]]:
        recipe_file = repo / "examples" / "verl_ppo_cpu" / "recipe.yaml"
        (run,) = plan_runs(load(recipe_file), recipe_file.parent, workspace, arms=["stock"], steps=steps)
        command = [engine.python, *run.command[1:], *engine.overrides]
        if batch:
            prompts, responses = batch
            command += [f"data.train_batch_size={prompts}", f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}"]
            command += [f"actor_rollout_ref.rollout.n={responses}"]
        added = {key: value for key, value in run.env.items() if value is not None}
        return command, {**clean_environment, **added, "PYTHONUNBUFFERED": "1"}

    return plan


@dataclass
class Features:
    """Status of one process of a run: its title and, for each feature, how it was requested and the states of its patches."""

    role: str
    requested: dict[str, str]
    states: dict[str, set[str]]


@dataclass
class Run:
    """Results of a run: log, metrics by step, ledger of tail batching, rows of the data, and processes."""

    log: str
    steps: dict[int, dict[str, float]]
    ledger: list[dict] = field(default_factory=list)
    data: pd.DataFrame | None = None
    processes: list[Features] = field(default_factory=list)

    @property
    def validated(self):
        """Steps with a validation."""
        return [step for step, metrics in self.steps.items() if any(name.startswith("val-") for name in metrics)]

    def numbers(self, name):
        return [metrics["rl_accel/" + name] for metrics in self.steps.values()]

    def settled(self, how):
        """Returns prompt id -> row of the data for all prompts that were ``trained``, ``rejected`` or ``failed``."""
        return {prompt_id: row for line in self.ledger for prompt_id, row in line[how].items()}

    def assert_on_policy(self):
        """Asserts that every step trained on samples from the weights that it then updated."""
        assert "dtype mismatch" not in self.log
        assert "could not be cleared" not in self.log
        for metrics in self.steps.values():
            assert metrics["training/rollout_probs_diff_max"] < 1e-4
            assert metrics["training/off_policy/trajectory_staleness/max"] == 0
            assert metrics["training/off_policy/trajectory_spans/max"] == 1
            assert 0 < metrics["actor/grad_norm"] < 1e4

    def assert_sound(self, steps, prompts, ghosts=False):
        """Asserts that every step trained a full batch on-policy."""
        assert list(self.steps) == [line["step"] for line in self.ledger] == list(range(1, steps + 1))
        self.assert_on_policy()
        assert set(self.numbers("tail_batching/prompts_trained")) == {prompts}
        assert ghosts or set(self.numbers("tail_batching/ghost_keys")) == {0.0}


@pytest.fixture(scope="session")
def supervise(forks, forked_workers) -> Callable[..., Run]:
    """``supervise(command, environment, folder, follow, completes)`` runs a trainer, whose processes are forks, in ``folder``.

    ``follow(metrics)`` is called a few times a second with the path of its metrics. ``completes``: whether it is to end by itself.
    """

    def run(command, environment, folder, follow=lambda metrics: None, completes=True) -> Run:
        metrics = folder / "metrics.jsonl"
        log = folder / "train.log"
        at = next(index for index, word in enumerate(command) if Path(word).name.startswith("python"))
        with ray_temp_dir() as ray_dir:
            environment = {**environment, "VERL_FILE_LOGGER_PATH": str(metrics), "RAY_TMPDIR": str(ray_dir)}
            with forks(command[at], environment) as start:
                forked = [*command[:at], *start, *command[at + 1 :]]
                variables = forked_workers(start, environment)
                outcome = supervised(forked, variables, folder, log, Stop(), lambda: bool(follow(metrics)), ray_dir)
        assert (outcome.exit_code == 0) == completes, last_lines(log, 80)
        return Run(log.read_text(errors="replace"), metrics_of(metrics))

    return run


@pytest.fixture(scope="session")
def read_processes() -> Callable[[Path], list[Features]]:
    """``read_processes(folder)`` returns what the status probe wrote to ``folder``, for processes with a role in a run of verl."""

    def read(folder: Path) -> list[Features]:
        processes = []
        for found in (json.loads(path.read_text()) for path in folder.glob("*.json")):
            features = found["status"]["features"]
            requested = {feature["name"]: feature["requested"] for feature in features}
            states = {feature["name"]: {switch["state"] for switch in feature["switches"]} for feature in features}
            processes += [Features(role, requested, states) for role in ROLES if role in found["title"]]
        return processes

    return read


@pytest.fixture(scope="session")
def workspace(repo, tmp_path_factory, clean_environment) -> Path:
    """Folder with the model and data of the recipe."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # all workers of xdist share this folder, so that the model is trained once
    recipe_file = repo / "examples" / "verl_ppo_cpu" / "recipe.yaml"
    command, env = prepare_command(load(recipe_file), recipe_file.parent, shared)
    with FileLock(shared / "prepare.lock"):
        prepare(command, {**clean_environment, **env}, recipe_file.parent, shared / "prepare.log", Stop())
    out = tmp_path_factory.mktemp("e2e")
    (out / "task").symlink_to(shared / "task")
    return out


@pytest.fixture(scope="session")
def probe_environment() -> Callable[[Path], dict[str, str]]:
    """Environment variables that make verl load the status probe, which writes to the folder, in every process of a run."""
    return lambda folder: {
        "STATUS_PROBE_DIR": str(folder),
        "PYTHONPATH": str(PROBE),
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu.plugin,rl_accel_status_probe",
    }


@pytest.fixture(scope="module")
def train(recipe_command, supervise, probe_environment, read_processes) -> Callable[..., Run]:
    """``train(*overrides, folder, begin="", steps=2, batch=None, **env)`` runs the stock arm in a script.

    It begins with ``begin``. ``folder`` must be new for each run.
    """

    def run(*overrides: str, folder: Path, begin: str = "", steps: int = 2, batch=None, **env: str) -> Run:
        command, environment = recipe_command(steps, batch)
        folder.mkdir(exist_ok=True)
        script, probes = folder / "driver.py", folder / "status"
        script.write_text(begin + MAIN)
        probes.mkdir()
        first = next(index for index, item in enumerate(command) if index and "=" in item)
        command = [command[0], str(script), *command[first:], *overrides]
        done = supervise(command, {**environment, **probe_environment(probes), **env}, folder)
        done.processes = read_processes(probes)
        return done

    return run


@pytest.fixture(scope="module")
def launch(recipe_command, supervise) -> Callable[..., Run]:
    """``launch(folder, steps, batch, *overrides, checkpoints, before, env, follow, completes)`` runs the stock arm in ``folder``.

    ``checkpoints`` is a folder in it unless given; ``before`` are words before the command, ``env`` are more variables.
    """

    def run(folder, steps, batch, *overrides, checkpoints=None, before=(), env=None, **how):
        checkpoints = checkpoints or folder / "checkpoints"
        planned, environment = recipe_command(steps, batch)
        command = [*before, *planned, *overrides, f"trainer.default_local_dir={checkpoints}"]
        done = supervise(command, {**environment, **(env or {})}, folder, **how)
        done.ledger = read_json_lines(checkpoints / "tail_batching" / "ledger.jsonl")
        return done

    return run


def read_json_lines(path):
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def metrics_of(path: Path) -> dict[int, dict[str, float]]:
    """Returns the metrics of training steps by step; empty while there is no file. A half-written last line is left out."""
    return {row["step"]: row["data"] for row in read_json_lines(path) if "training/global_step" in row["data"]}


@pytest.fixture(scope="session")
def read_lines() -> Callable[[Path], list[dict]]:
    """Returns the objects in a file of JSON lines, without a half-written last line; none while there is no file."""
    return read_json_lines


@pytest.fixture(scope="session")
def read_metrics() -> Callable[[Path], dict[int, dict[str, float]]]:
    return metrics_of


@pytest.fixture(scope="session")
def kill_first() -> Callable[[str, Path], int]:
    """``kill_first(part, metrics)`` kills a process with ``part`` in its command line, of the run that logs to ``metrics``.

    Returns the number of such processes.
    """

    def kill(part: str, metrics: Path) -> int:
        results = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = process.environ().get("VERL_FILE_LOGGER_PATH") == str(metrics)
                if ours and part in " ".join(process.cmdline()):
                    results.append(process)
        for process in results[:1]:
            process.kill()
        return len(results)

    return kill


@pytest.fixture(scope="module")
def tail_run(launch, workspace, tmp_path_factory):
    """``tail_run(name, steps, batch, *overrides, loops, agent_name, reward, follow, env)`` trains on rows of the recipe, each
    with the agent loop that ``agent_name(index)`` names, verl's own unless given.

    ``loops`` are entries of verl's agent_loop_config_path, in which ``{out}`` is a folder of the run's own; ``reward`` is
    the source of a reward module; ``follow`` and ``env`` are those of ``launch``.
    """

    def run(name, steps, batch, *overrides, loops=(), agent_name=lambda _: SINGLE_TURN, reward=None, env=None, **how):
        out = tmp_path_factory.mktemp(name)
        data = pd.read_parquet(workspace / "task" / "train.parquet").head(256)
        data["agent_name"] = [agent_name(index) for index in range(len(data))]
        data["data_source"] = [truth["ground_truth"] for truth in data["reward_model"]]
        data.to_parquet(out / "train.parquet")
        (out / "loops.yaml").write_text(yaml.safe_dump(loops).replace("{out}", str(out)))
        usual = [
            f"data.train_files={out / 'train.parquet'}",
            "data.shuffle=False",
            "data.max_response_length=160",
            "data.val_max_samples=4",
            "actor_rollout_ref.rollout.agent.num_workers=2",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={out / 'loops.yaml'}",
            "+rl_accel.tail_batching.enable=True",
        ]
        if reward is not None:
            (out / "reward.py").write_text(reward)
            usual.append(f"reward.custom_reward_function.path={out / 'reward.py'}")
        done = launch(out, steps, batch, *usual, *overrides, env={"PYTHONPATH": str(LOOPS), **(env or {})}, **how)
        done.data = data
        return done

    return run


@pytest.fixture(scope="session")
def ab(repo, clean_environment, forks, forked_workers) -> Callable[..., dict]:
    """``ab(recipe, out, *options, python=..., env={})`` runs ``rl-accel ab`` and returns its summary from the folder ``out``."""

    def run(recipe, out, *options, python=sys.executable, env=None):
        words = [python, "-m", "rl_accel", "ab", str(recipe), "--out", str(out), *options]
        environment = {**clean_environment, **(env or {})}
        with forks(python, environment) as start:
            variables = forked_workers(start, environment)
            done = subprocess.run(words, cwd=repo, env=variables, capture_output=True, text=True)
        assert (out / "summary.json").exists(), done.stdout[-4000:] + done.stderr[-4000:]
        print(done.stdout)
        return json.loads((out / "summary.json").read_text())

    return run
