"""Connects grader processes, which Ray did not start, to the job's Ray cluster and namespace."""

import functools
from collections.abc import Mapping
from typing import Any

from rl_accel.post_import import when_imported

SETUP = f"{__name__}:connect_when_needed"
_ADDRESS, _NAMESPACE = "RAY_ADDRESS", "RL_ACCEL_RAY_NAMESPACE"


def environment() -> dict[str, str]:
    """Returns environment variables for grader processes with the Ray address and namespace of the job; {} without Ray."""
    import ray

    if not ray.is_initialized():
        return {}
    context = ray.get_runtime_context()
    return {_ADDRESS: context.gcs_address, _NAMESPACE: context.namespace}


def connect_when_needed(environment: Mapping[str, str]) -> None:
    """Makes ``ray.init`` use the namespace in ``environment`` if the grader in this process connects to Ray later."""
    if namespace := environment.get(_NAMESPACE):
        when_imported("ray", functools.partial(_set_namespace, namespace))


def _set_namespace(namespace: str, module: Any) -> None:
    init = module.init

    @functools.wraps(init)
    def init_in_namespace(*args: Any, **kwargs: Any) -> Any:
        return init(*args, **{"namespace": namespace, "log_to_driver": False, **kwargs})

    module.init = init_in_namespace
