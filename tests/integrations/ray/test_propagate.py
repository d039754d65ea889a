"""Tests that a driver's flags reach real Ray processes of its job that import verl, however Ray was started."""

import json
import os
import shlex

import pytest

from rl_accel.integrations.ray import propagate

ACTOR = """
import json, os
import ray, rl_accel

@ray.remote(num_cpus=0, runtime_env={"py_executable": os.environ["FORKING"]})
class Parent:
    def status(self):
        import verl.trainer.ppo.core_algos  # what every verl worker process does, by way of its class
        return rl_accel.status().to_dict()

    def statuses(self, child):
        born = Parent.remote().status.remote() if child else None  # imports verl while this process does
        found = {"own": self.status()}
        return {**found, "child": ray.get(born)} if child else found

def report(label, child=False):
    print(json.dumps({"label": label, **ray.get(Parent.remote().statuses.remote(child))}), flush=True)
"""
LOCAL = 'ray.init(address="local", num_cpus=2, include_dashboard=False, _temp_dir=os.environ["FOLDER"])'
APPLIED = ("by name", ["applied"])


@pytest.fixture
def reports(python, forking):
    """``reports(script, **environment)`` runs a driver, whose actors are forks, and returns its reports by label."""

    def run(script, **environment):
        done = python(ACTOR + script, FORKING=shlex.join(forking), **environment)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"label"')]
        return {line["label"]: line for line in lines}

    return run


def gae_states(status: dict) -> tuple[str, list[str]]:
    (gae,) = [feature for feature in status["features"] if feature["name"] == "gae"]
    return gae["requested"], [switch["state"] for switch in gae["switches"]]


@pytest.mark.slow
def test_enable_and_disable_before_and_after_a_local_cluster_starts(reports, short_tmp):
    script = f"""
rl_accel.enable(gae=True)
{LOCAL}
report("before", child=True)
rl_accel.disable()
report("off")
rl_accel.enable(gae=True)
report("on")
"""
    result = reports(script, FOLDER=str(short_tmp))
    before = result["before"]
    assert gae_states(before["own"]) == gae_states(before["child"]) == gae_states(result["on"]["own"]) == APPLIED
    assert before["own"]["pid"] != before["child"]["pid"]
    assert gae_states(result["off"]["own"]) == ("off", [])


@pytest.mark.slow
def test_enable_then_connect_to_a_cluster_started_before(reports, ray_address):
    connect = 'ray.init(address=os.environ["CLUSTER"], runtime_env={"env_vars": {"MINE": "1"}})'
    result = reports(f'rl_accel.enable(gae=True)\n{connect}\nreport("far")', CLUSTER=ray_address)
    assert gae_states(result["far"]["own"]) == APPLIED

    other_job = reports('ray.init(address=os.environ["CLUSTER"])\nreport("other")', CLUSTER=ray_address)
    assert gae_states(other_job["other"]["own"]) == ("off", []), "flags must not leak into another job"


@pytest.mark.slow
def test_enable_then_connect_under_uv_run(reports, ray_address):
    """Ray then calls the hook that it has for uv, which this test replaces, and not that of the environment."""
    script = """
from ray._private.runtime_env import uv_runtime_env_hook
uv_runtime_env_hook._get_uv_run_cmdline = lambda: ["uv", "run"]
uv_runtime_env_hook.hook = lambda runtime_env: runtime_env
rl_accel.enable(gae=True)
ray.init(address=os.environ["CLUSTER"])
report("uv")
"""
    assert gae_states(reports(script, CLUSTER=ray_address)["uv"]["own"]) == APPLIED


def test_the_hook_keeps_what_it_finds(monkeypatch):
    monkeypatch.setenv("RAY_RUNTIME_ENV_HOOK", "builtins.dict")
    monkeypatch.setenv("RL_ACCEL_SOURCES", "{}")
    propagate.publish("{}")
    assert os.environ["RAY_RUNTIME_ENV_HOOK"] == propagate.HOOK
    given = {"working_dir": "x", "env_vars": {"MINE": "1"}}
    both = {"MINE": "1", "RL_ACCEL_SOURCES": "{}"}
    assert propagate.add_to_runtime_env(given) == {"working_dir": "x", "env_vars": both}
    assert given == {"working_dir": "x", "env_vars": {"MINE": "1"}}, "the caller's mapping is not ours to change"
    propagate.publish(None)
    assert os.environ["RAY_RUNTIME_ENV_HOOK"] == "builtins.dict"
