"""Tests the process of a grader on a real Ray cluster."""

import asyncio

import pytest
import ray

from rl_accel.integrations.ray import grader_cluster
from rl_accel.reward.execution import Limits
from rl_accel.reward.sandbox import Graders

pytestmark = pytest.mark.slow

GRADER = """
import os, ray

@ray.remote(num_cpus=0)
def variable():
    return os.environ.get("RLA_OF_JOB")

def compute():
    ray.init(ignore_reinit_error=True)
    return ray.get_runtime_context().namespace, ray.get(variable.remote())
"""


def test_what_a_grader_starts_on_ray_has_the_namespace_and_the_variables_of_the_job(ray_address, tmp_path):
    (tmp_path / "grader.py").write_text(GRADER)
    ray.init(address=ray_address, namespace="of a job", runtime_env={"env_vars": {"RLA_OF_JOB": "yes"}})

    async def main():
        environment = grader_cluster.environment()
        pool = Graders(f"{tmp_path}/grader.py:compute", 1, environment=environment, setup=grader_cluster.SETUP)
        try:
            return await pool.call({}, Limits(wall=100.0, cpu=100.0))
        finally:
            await pool.close()

    try:
        assert asyncio.run(main()).value == ("of a job", "yes")
    finally:
        ray.shutdown()
