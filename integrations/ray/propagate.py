"""Passes the driver's flags to all Ray processes of the job, in one of two ways.

Ray not connected yet: ``ray.init`` calls ``RAY_RUNTIME_ENV_HOOK`` with the job's runtime environment, and our hook adds
one environment variable. This also reaches clusters that were started earlier. Ray already connected: the job's runtime
environment is fixed, so the payload goes into the cluster's key-value store under the job's id. :func:`received` reads
the payload when a worker of the job imports the framework.
"""

import os
import sys
from typing import Any

from rl_accel.runtime import SOURCES_VAR

HOOK_VAR = "RAY_RUNTIME_ENV_HOOK"
HOOK = "rl_accel.integrations.ray.propagate.add_to_runtime_env"
PREVIOUS_HOOK_VAR = "RL_ACCEL_PREVIOUS_RUNTIME_ENV_HOOK"
_NAMESPACE = "rl_accel"


def publish(payload: str | None) -> None:
    """Passes ``payload`` to Ray processes started from now on. None withdraws the payload; processes then decide by themselves.

    The runtime has put the payload into this process's environment, as :data:`~rl_accel.runtime.SOURCES_VAR`.
    """
    current = os.environ.get(HOOK_VAR)
    if payload is not None:
        if current and current != HOOK:
            os.environ[PREVIOUS_HOOK_VAR] = current
        os.environ[HOOK_VAR] = HOOK
    else:
        previous = os.environ.pop(PREVIOUS_HOOK_VAR, None)
        if current == HOOK and previous:
            os.environ[HOOK_VAR] = previous
        elif current == HOOK:
            del os.environ[HOOK_VAR]
    if _connected():
        from ray.experimental.internal_kv import _internal_kv_put

        # Empty payload instead of none: the job's environment variable may still hold an older payload.
        _internal_kv_put(_job_key(), payload or "{}", overwrite=True, namespace=_NAMESPACE)


def received() -> str | None:
    """Returns the payload for this process: from the key-value store (newest), else from the environment, else None."""
    if _connected():
        from ray.experimental.internal_kv import _internal_kv_get

        stored = _internal_kv_get(_job_key(), namespace=_NAMESPACE)
        if stored:
            return str(stored, "utf-8")
    return os.environ.get(SOURCES_VAR)


def add_to_runtime_env(runtime_env: Any) -> Any:
    """Adds our variable to the job's runtime environment (``RAY_RUNTIME_ENV_HOOK``). The user's own value takes precedence."""
    previous = os.environ.get(PREVIOUS_HOOK_VAR)
    if previous:
        from ray._common.utils import load_class

        runtime_env = load_class(previous)(runtime_env)
    payload = os.environ.get(SOURCES_VAR)
    if not payload:
        return runtime_env
    runtime_env = dict(runtime_env or {})
    runtime_env["env_vars"] = {SOURCES_VAR: payload, **(runtime_env.get("env_vars") or {})}
    return runtime_env


def _connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _job_key() -> str:
    import ray

    return f"sources:{ray.get_runtime_context().get_job_id()}"
