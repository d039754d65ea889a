"""Responses of a validation are marked on their way to the reward worker, and nowhere else."""

import asyncio
from types import SimpleNamespace

import pytest
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from rl_accel.integrations.verl import reward_worker_proxy
from rl_accel.integrations.verl.reward_worker_proxy import VALIDATION, Marking

WorkerTQ = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__


class V1(Marking, WorkerTQ):
    pass


class Legacy(Marking, AgentLoopWorker):
    pass


WORKERS = [V1, Legacy]


class RewardWorker:
    """Keeps what it is sent."""

    def __init__(self):
        self.sent = []
        self.compute_score = self

    async def remote(self, data):
        self.sent.append(data)
        return {"reward_score": 0.5, "reward_extra_info": {}}


def output():
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    return AgentLoopOutput(
        prompt_ids=[5], response_ids=[6, 7], response_mask=[1, 1], metrics=AgentLoopMetrics(), num_turns=2
    )


@pytest.mark.parametrize("kind", WORKERS)
def test_only_validation_is_marked_and_only_for_the_reward_worker(kind, configure):
    judge = RewardWorker()
    worker = object.__new__(kind)  # its constructor wants a cluster; scoring wants these
    worker.config = configure()
    worker.reward_loop_worker_handles = [judge]
    worker.processor = worker.mm_processor_kwargs = None
    kwargs = {"raw_prompt": "q", "uid": "u"}

    async def score_all():
        async def one(validate):
            reward_worker_proxy._validating.set(validate)
            await worker._compute_score([output()], kwargs=kwargs)

        for validate in (True, False):
            await asyncio.create_task(one(validate))

    asyncio.run(score_all())
    validation, training = (data.non_tensor_batch for data in judge.sent)
    assert VALIDATION in validation
    assert VALIDATION not in training
    assert kwargs == {"raw_prompt": "q", "uid": "u"}, "what is stored of the response is not marked"


@pytest.mark.parametrize("kind", WORKERS)
def test_the_mark_is_of_the_response_that_is_being_scored(kind, configure, monkeypatch):
    seen = []
    worker = object.__new__(kind)
    worker.config, worker.background_tasks = configure(), set()

    async def stored(self, output, validate, **kwargs):
        await asyncio.sleep(0)
        seen.append((validate, reward_worker_proxy._validating.get()))

    for parent in (WorkerTQ, AgentLoopWorker):
        monkeypatch.setattr(parent, "_agent_loop_postprocess", stored)

    async def all_at_once():
        some = SimpleNamespace()
        await asyncio.gather(
            *(worker._agent_loop_postprocess(some, validate, uid="u") for validate in (True, False, True))
        )
        assert reward_worker_proxy._validating.get() is False

    asyncio.run(all_at_once())
    assert sorted(seen) == [(False, False), (True, True), (True, True)]
