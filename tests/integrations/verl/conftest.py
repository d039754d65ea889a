"""verl's configuration, and a Ray job whose driver is the process of the tests."""

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

SIZES = {"data.train_batch_size": 8, "actor_rollout_ref.actor.ppo_mini_batch_size": 4, "critic.ppo_mini_batch_size": 8}
SIZES |= {"trainer.n_gpus_per_node": 4, "actor_rollout_ref.rollout.tensor_model_parallel_size": 1}


@pytest.fixture(scope="session")
def composed() -> Any:
    """verl's default configuration with small sizes, an engine and folders."""
    given = {**SIZES, "trainer.default_local_dir": "/somewhere/run", "actor_rollout_ref.rollout.name": "vllm"}
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [f"{key}={value}" for key, value in given.items()])


@pytest.fixture
def configured(composed: Any) -> Callable[..., Any]:
    """``configured({"trainer.use_v1": False})`` returns a copy of verl's configuration with these values."""

    def change(keys: dict[str, Any]) -> Any:
        config = composed.copy()
        for key, value in keys.items():
            OmegaConf.update(config, key, value, force_add=True)
        return config

    return change


@pytest.fixture(scope="module")
def job(ray_address: str, forking: list[str], request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes this process the driver of a Ray job for a module's tests. Actors are forks; the test's classes are sent by value."""
    module = sys.modules[request.module.__name__]
    ray.cloudpickle.register_pickle_by_value(module)
    ray.init(address=ray_address, runtime_env={"py_executable": shlex.join(forking)})
    yield
    ray.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(scope="session")
def kill() -> Callable[[Any], None]:
    """``kill(actor)`` sends SIGKILL to the process of ``actor``, and returns once Ray has noticed."""

    def end(actor: Any) -> None:
        last_call = actor.__ray_call__.remote(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(last_call, timeout=60)

    return end
