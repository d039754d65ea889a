"""Connects grader processes, which Ray did not start, to the job's Ray cluster, namespace and runtime environment."""

import functools
import json
from collections.abc import Mapping
from typing import Any

from rl_accel.post_import import when_imported

SETUP = f"{__name__}:connect_when_needed"
_ADDRESS = "RAY_ADDRESS"
_JOB = "RL_ACCEL_RAY_JOB"


def environment() -> dict[str, str]:
    """Returns the environment variables with which a grader process can join this Ray job; {} if Ray is not initialised here."""
    import ray

    if not ray.is_initialized():
        return {}
    context = ray.get_runtime_context()
    # Tasks of the grader need the variables and packages of the job.
    job = {"namespace": context.namespace, "runtime_env": dict(context.runtime_env)}
    return {_ADDRESS: context.gcs_address, _JOB: json.dumps(job)}


def connect_when_needed(environment: Mapping[str, str]) -> None:
    """Makes a later call of ``ray.init`` in this grader process join the Ray job. Connects nothing itself.

    ``environment`` is the result of the function :func:`environment`.
    """
    if job := environment.get(_JOB):
        when_imported("ray", functools.partial(_set_defaults, json.loads(job)))


def _set_defaults(job: dict[str, Any], module: Any) -> None:
    init = module.init

    @functools.wraps(init)
    def init_in_job(*args: Any, **kwargs: Any) -> Any:
        return init(*args, **{**job, "log_to_driver": False, **kwargs})

    module.init = init_in_job
