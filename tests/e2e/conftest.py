"""The real verl trainer on a tiny model, as the shipped recipe runs it; every process of a run is gone when it returns."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl_accel.compare.plan import plan_runs, prepare_command
from rl_accel.compare.recipe import load
from rl_accel.compare.runner import Stop, last_lines, prepare, supervised

PROBE = Path(__file__).parent / "probe"
ROLES = ("TaskRunnerV1", "WorkerDict", "AgentLoopWorker", "RewardLoopWorker")
"""Names that Ray shows in the titles of the trainer, of FSDP workers, of agent loops and of reward workers."""


@dataclass
class Features:
    """One process of a run: what it was, and of each feature how it was requested and the states of its patches."""

    role: str
    requested: dict[str, str]
    states: dict[str, set[str]]


@dataclass
class Run:
    """What a finished trainer left: its log, metrics by step, and the features in each of its processes."""

    log: str
    steps: list[dict[str, float]]
    processes: list[Features]


@pytest.fixture(scope="session")
def read_processes() -> Callable[[Path], list[Features]]:
    """``read_processes(folder)``: what the status probe left there, of the processes that have a role in a run of verl."""

    def read(folder: Path) -> list[Features]:
        processes = []
        for found in (json.loads(path.read_text()) for path in folder.glob("*.json")):
            features = found["status"]["features"]
            processes += [
                Features(
                    role,
                    {feature["name"]: feature["requested"] for feature in features},
                    {feature["name"]: {patch["state"] for patch in feature["patches"]} for feature in features},
                )
                for role in ROLES
                if role in found["title"]
            ]
        return processes

    return read


@pytest.fixture(scope="session")
def workspace(repo, tmp_path_factory, clean_environment) -> Path:
    """A folder with the recipe's model and data in it."""
    out = tmp_path_factory.mktemp("e2e")
    recipe_file = repo / "examples" / "verl_ppo_cpu" / "recipe.yaml"
    command, env = prepare_command(load(recipe_file), recipe_file.parent, out)
    prepare(command, {**clean_environment, **env}, recipe_file.parent, out / "prepare.log", Stop())
    return out


@pytest.fixture(scope="session")
def probe_environment() -> Callable[[Path], dict[str, str]]:
    """What makes verl load the status probe in every process that sees these variables; it writes to the folder given."""
    return lambda folder: {
        "STATUS_PROBE_DIR": str(folder),
        "PYTHONPATH": str(PROBE),
        "VERL_USE_EXTERNAL_MODULES": "rl_accel_status_probe",
    }


@pytest.fixture
def train(
    repo, workspace, clean_environment, probe_environment, read_processes, tmp_path, short_tmp
) -> Callable[..., Run]:
    """``train(driver, *overrides, steps=2, **env)``: run a driver script with the recipe's overrides of the stock arm.

    The driver gets verl's overrides as its arguments.
    """

    def run(driver: str, *overrides: str, steps: int = 2, **env: str) -> Run:
        recipe_file = repo / "examples" / "verl_ppo_cpu" / "recipe.yaml"
        (plan,) = plan_runs(load(recipe_file), recipe_file.parent, workspace, arms=["stock"], steps=steps)
        script, log, metrics, probes = (tmp_path / n for n in ("driver.py", "train.log", "metrics.jsonl", "status"))
        script.write_text(driver)
        probes.mkdir()
        first = next(index for index, item in enumerate(plan.command) if "=" in item)
        command = [sys.executable, str(script), *plan.command[first:], *overrides]
        environment = {
            **clean_environment,
            **{key: value for key, value in plan.env.items() if value is not None},
            **probe_environment(probes),
            "VERL_FILE_LOGGER_PATH": str(metrics),
            "PYTHONUNBUFFERED": "1",
            "RAY_TMPDIR": str(short_tmp),
            **env,
        }
        outcome = supervised(command, environment, tmp_path, log, Stop(), lambda: False)
        assert outcome.exit_code == 0, last_lines(log, 60)
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        steps = [row["data"] for row in rows if row["step"] >= 1]
        return Run(log.read_text(errors="replace"), steps, read_processes(probes))

    return run
