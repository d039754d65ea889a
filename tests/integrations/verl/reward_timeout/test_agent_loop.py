"""Tests that only responses of a validation are marked, and only for the reward worker."""

import asyncio
from unittest import mock

import pytest
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from rl_accel.integrations.verl.reward_worker_proxy import VALIDATION, ValidationTag

WorkerTQ = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__


@pytest.mark.parametrize("verls", [WorkerTQ, AgentLoopWorker])
async def test_only_validation_is_marked_and_only_for_the_reward_worker(verls, configure, monkeypatch):
    reward_worker = mock.Mock()
    reward_worker.compute_score.remote = mock.AsyncMock(return_value={"reward_score": 0.5, "reward_extra_info": {}})
    # the constructor wants a cluster; scoring wants these
    worker = object.__new__(type("Worker", (ValidationTag, verls), {}))
    worker.config, worker.background_tasks = configure(), set()
    worker.reward_loop_worker_handles = [reward_worker]
    worker.processor = worker.mm_processor_kwargs = None
    columns = [{"raw_prompt": "q", "uid": uid} for uid in ("validation", "training", "validation", "training")]

    async def score(self, output, validate, kwargs):
        await asyncio.sleep(0)  # other responses come in between
        await self._compute_score([output], kwargs=kwargs)

    for parent in (WorkerTQ, AgentLoopWorker):
        monkeypatch.setattr(parent, "_agent_loop_postprocess", score)

    def scored(kwargs):
        tokens = {"prompt_ids": [5], "response_ids": [6, 7], "response_mask": [1, 1]}
        output = AgentLoopOutput(**tokens, metrics=AgentLoopMetrics(), num_turns=2)
        return worker._agent_loop_postprocess(output, kwargs["uid"] == "validation", kwargs=kwargs)

    for kwargs in columns[:2]:
        await scored(kwargs)
    await asyncio.gather(*map(scored, columns[2:]))
    columns_sent = [call.args[0].non_tensor_batch for call in reward_worker.compute_score.remote.await_args_list]
    sent = [(row["uid"][0], VALIDATION in row) for row in columns_sent]
    assert sorted(sent) == [("training", False), ("training", False), ("validation", True), ("validation", True)]
    assert not any(VALIDATION in kwargs for kwargs in columns), "what is stored of the response is not marked"
