"""Passes the rl-accel flags of a Ray job's driver process to all other processes of the job, in two ways.

If Ray is not connected yet, ``ray.init`` calls the function in ``RAY_RUNTIME_ENV_HOOK`` with the runtime environment of the job.
Our function adds the flags, as JSON in an environment variable.

Under ``uv run``, ``ray.init`` ignores ``RAY_RUNTIME_ENV_HOOK``. And if Ray is already connected, the runtime environment of the job
is fixed. The flags are therefore also stored in the key-value store of the cluster. A worker process of the job calls
:func:`received` when it imports the framework.
"""

import os
import sys
from types import ModuleType
from typing import Any

from rl_accel.post_import import when_imported
from rl_accel.runtime import SOURCES_VAR

HOOK_VAR = "RAY_RUNTIME_ENV_HOOK"
HOOK = "rl_accel.integrations.ray.propagate.add_to_runtime_env"
PREVIOUS_HOOK_VAR = "RL_ACCEL_PREVIOUS_RUNTIME_ENV_HOOK"
_NAMESPACE = "rl_accel"


def publish(payload: str | None) -> None:
    """Passes rl-accel's flags to the processes of this Ray job that start from now on; withdraws them if ``payload`` is None.

    The flags are read from the environment variable :data:`~rl_accel.runtime.SOURCES_VAR`, which the caller must set first.
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
    if is_connected():
        _store()
    elif payload is not None:
        when_imported("ray._private.worker", _store_when_connected)


def _store_when_connected(worker: ModuleType) -> None:
    hooks = getattr(worker, "_post_init_hooks", [])
    if _store not in hooks:
        hooks.append(_store)


def _store() -> None:
    # Withdrawn flags are stored as "{}", because the job's environment variable may still hold earlier flags.
    put("sources", os.environ.get(SOURCES_VAR, "{}"))


def received() -> str | None:
    """Returns rl-accel's flags in this Ray job as JSON, from Ray's key-value store or the environment; None if there are none."""
    return (get("sources") if is_connected() else None) or os.environ.get(SOURCES_VAR)


def put(name: str, text: str, job: str = "") -> None:
    """Stores ``text`` in the Ray cluster's key-value store, under ``name`` and ``job``, the id of a job; "" stands for this job.

    Replaces an earlier text.
    """
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(_key(name, job), text, overwrite=True, namespace=_NAMESPACE)


def get(name: str, job: str = "") -> str | None:
    """Returns the text under ``name`` that was stored for ``job`` with :func:`put`; None if there is none."""
    from ray.experimental.internal_kv import _internal_kv_get

    stored = _internal_kv_get(_key(name, job), namespace=_NAMESPACE)
    return None if stored is None else str(stored, "utf-8")


def names(prefix: str, job: str = "") -> list[str]:
    """Returns the names that begin with ``prefix`` and have a text for ``job``."""
    from ray.experimental.internal_kv import _internal_kv_list

    keys = [str(key, "utf-8") for key in _internal_kv_list(prefix, namespace=_NAMESPACE)]
    return [key.removesuffix(_key("", job)) for key in keys if key.endswith(_key("", job))]


def add_to_runtime_env(runtime_env: Any) -> Any:
    """Returns a Ray job's runtime environment with rl-accel's flags added: variable :data:`~rl_accel.runtime.SOURCES_VAR`.

    ``ray.init`` calls this function through ``RAY_RUNTIME_ENV_HOOK``. If the user has set this variable for the job, its value is
    kept.
    """
    if previous := os.environ.get(PREVIOUS_HOOK_VAR):
        from ray._common.utils import load_class

        runtime_env = load_class(previous)(runtime_env)
    if not (payload := os.environ.get(SOURCES_VAR)):
        return runtime_env
    runtime_env = dict(runtime_env or {})
    runtime_env["env_vars"] = {SOURCES_VAR: payload, **(runtime_env.get("env_vars") or {})}
    return runtime_env


def is_connected() -> bool:
    """Returns True if this process is connected to a Ray cluster."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _key(name: str, job: str = "") -> str:
    import ray

    return f"{name}:{job or ray.get_runtime_context().get_job_id()}"
