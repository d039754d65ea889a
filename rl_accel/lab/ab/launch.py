"""Making each run of a recipe a job of its own: the shell commands that ``rl-accel ab --launch`` prints.

Each job is a call of ``rl-accel ab`` with ``--only RUN --resume``: a run that completed ends at once, so a script that is
given again goes on where it was interrupted, arm by arm. The last job makes the report.
"""

import json
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl_accel.errors import RecipeError
from rl_accel.lab.ab.recipe import Recipe, RunPlan

FORMS = ("print", "slurm", "ray")
PREPARE = "prepare"
"""What ``--only`` calls the recipe's prepare command; no run has a name without a seed."""

_SUBMIT = (
    """submit() { sbatch --parsable --requeue --nodes=1 "$@" | cut -d';' -f1; }"""  # id;cluster where there are several
)


def script(form: str, recipe: Recipe, plans: Sequence[RunPlan], call: Sequence[str], out: Path) -> str:
    """Return what to type, or to give to bash, one command a line.

    Args:
        form: one of :data:`FORMS`: plain commands, ``sbatch``, or ``ray job submit`` to a cluster that is there.
        recipe: its name, GPUs and time limit are asked for.
        plans: the runs.
        call: the words ``rl-accel ab RECIPE ...`` that plan these runs again, paths absolute.
        out: the folder of the runs, on a file system that all nodes see.

    Raises:
        RecipeError: a Slurm job is one node, and the recipe wants several.
    """
    runs = [(plan, [*call, "--only", plan.name, "--resume"]) for plan in plans]
    prepare, report = shlex.join([*call, "--only", PREPARE]), [*call[:2], "--report-only", str(out)]
    if form == "print":
        return "\n".join([prepare, *(shlex.join(words) for _, words in runs), shlex.join(report)])
    if form == "ray":
        asked = re.findall(r"\$\{oc\.env:(\w+)\}", repr(recipe))  # a job is not of this shell
        shell = {name: os.environ[name] for name in asked if name in os.environ}
        jobs = [_ray_job(plan, words, shell) for plan, words in runs]
        return "\n".join(["set -e", prepare, *(f"{job} || true" for job in jobs), shlex.join(report)])
    if recipe.nodes > 1:
        raise RecipeError(
            f"--launch slurm wants nodes: 1, found {recipe.nodes}: start a Ray cluster in a Slurm job, then --launch ray"
        )
    limit = [] if recipe.timeout_s is None else [f"--time={math.ceil(recipe.timeout_s / 60) + 10}"]

    def submit(name: str, options: Sequence[str], words: Sequence[str]) -> str:
        log = out / f"{name}.slurm.log"
        named = [f"--job-name={recipe.name}-{name}", f"--output={log}", "--open-mode=append"]
        return shlex.join(["submit", *named, *options, f"--wrap={shlex.join(words)}"])

    jobs = [f"jobs+=:$({submit(plan.name, [f'--gpus-per-node={recipe.gpus}', *limit], words)})" for plan, words in runs]
    last = submit("report", [], report).replace("submit ", 'submit "--dependency=afterany$jobs" ', 1)
    return "\n".join(
        ["set -euo pipefail", _SUBMIT, f"{prepare}  # here: nodes may have no internet", "jobs=", *jobs, last]
    )


def _ray_job(plan: RunPlan, words: Sequence[str], shell: Mapping[str, str]) -> str:
    """Submit and wait: verl does not wait for GPUs that another job holds. Actors see variables of the job, not of its driver."""
    variables = {**shell, **{key: value for key, value in plan.env.items() if value is not None}}
    variables["VERL_FILE_LOGGER_PATH"] = str(plan.directory / "metrics.jsonl")
    options = [f"--runtime-env-json={json.dumps({'env_vars': variables})}", "--", *words, "--ray-address", "auto"]
    return shlex.join(["ray", "job", "submit", *options])
