"""Hands a driver's flags to every Ray process of its job, through two of Ray's own doors.

Ray not started yet: ``RAY_RUNTIME_ENV_HOOK``, which ``ray.init`` calls with the job's runtime environment, adds one
environment variable; that also reaches a cluster that was started long before. Ray already connected: the runtime
environment of the job can no longer change, so the payload goes into the cluster's key-value store under the job's
id, where :func:`received` finds it when a worker of the job imports the framework.
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
    """Hand ``payload`` to Ray processes started from now on; None: take back what was handed out, so that they decide themselves.

    The runtime has put it into this process's environment, as :data:`~rl_accel.runtime.SOURCES_VAR`.
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

        # An empty payload, not a missing one: the job's environment variable may still hold an older one.
        _internal_kv_put(_job_key(), payload or "{}", overwrite=True, namespace=_NAMESPACE)


def received() -> str | None:
    """Return the payload meant for this process, newest first: key-value store, then environment; None without any."""
    if _connected():
        from ray.experimental.internal_kv import _internal_kv_get

        stored = _internal_kv_get(_job_key(), namespace=_NAMESPACE)
        if stored:
            return str(stored, "utf-8")
    return os.environ.get(SOURCES_VAR)


def add_to_runtime_env(runtime_env: Any) -> Any:
    """``RAY_RUNTIME_ENV_HOOK``: the job's runtime environment plus our variable; the user's own value wins."""
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
