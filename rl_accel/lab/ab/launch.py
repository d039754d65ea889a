"""Shell script that ``rl-accel ab --launch`` prints. The script starts each run of a recipe as a separate job.

Each job calls ``rl-accel ab`` with ``--only RUN --resume``, so the job of an already completed run ends at once. If the script is
interrupted and submitted again, only unfinished runs are repeated. The last job makes the report.
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
"""Value of ``--only`` that selects the recipe's prepare command instead of a run."""

# sbatch prints id;cluster if there are several clusters
_SUBMIT = """submit() { sbatch --parsable --requeue --nodes=1 "$@" | cut -d';' -f1; }"""


def script(form: str, recipe: Recipe, plans: Sequence[RunPlan], call: Sequence[str], out: Path) -> str:
    """Returns a bash script that starts the runs ``plans`` of a recipe, with one command per line.

    Args:
        form: ``print`` for plain commands, ``slurm`` for ``sbatch``, or ``ray`` for ``ray job submit`` to a running cluster.
        call: words of the command ``rl-accel ab RECIPE ...``, with absolute paths. Each job runs it with ``--only RUN``.
        out: folder of the runs, on a file system that all nodes share.

    Raises:
        RecipeError: ``form`` is ``slurm`` and the recipe needs several nodes.
    """
    runs = [(plan, [*call, "--only", plan.name, "--resume"]) for plan in plans]
    prepare = shlex.join([*call, "--only", PREPARE])
    report = [*call[:2], "--report-only", str(out)]
    if form == "print":
        return "\n".join([prepare, *(shlex.join(words) for _, words in runs), shlex.join(report)])
    if form == "ray":
        asked = re.findall(r"\$\{oc\.env:(\w+)\}", repr(recipe))  # Ray jobs do not inherit shell variables
        shell = {name: os.environ[name] for name in asked if name in os.environ}
        lines = [f"{_ray_job(plan, words, shell)} || true" for plan, words in runs]
        return "\n".join(["set -e", prepare, *lines, shlex.join(report)])
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
    """Returns a shell command that submits a run to a Ray cluster and waits until the run ends."""
    # the job waits, because verl does not wait for GPUs of another job; Ray actors do not inherit a driver's variables
    variables = {**shell, **{key: value for key, value in plan.env.items() if value is not None}}
    variables["VERL_FILE_LOGGER_PATH"] = str(plan.directory / "metrics.jsonl")
    options = [f"--runtime-env-json={json.dumps({'env_vars': variables})}", "--", *words, "--ray-address", "auto"]
    return shlex.join(["ray", "job", "submit", *options])
