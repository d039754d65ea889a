"""Checks of replicas, server actors and weight updates in one Ray cluster, driven as verl drives them.

``test_server.py`` runs this script. Two replicas serve all of it: number 0 has one rank, the two ranks of number 1 share a
server. The folder of the model and the one for Ray are in the environment.
"""

import asyncio
import os

import pytest
import ray
import torch
from hydra import compose, initialize_config_module
from transformers import AutoModelForCausalLM
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class

with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose(
        "ppo_trainer",
        [
            "hydra.searchpath=[pkg://verl_on_cpu]",
            "+run_on=cpu",
            f"actor_rollout_ref.model.path={os.environ['MODEL']}",
            "data.max_prompt_length=16",
            "data.max_response_length=200",
            "actor_rollout_ref.rollout.max_num_seqs=4",
        ],
    )
rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
SEEDED = {**PARAMS, "seed": 3, "ignore_eos": True}
LONG = {**PARAMS, "ignore_eos": True, "max_tokens": 210}


def replica_of(number, **changes):
    return get_rollout_replica_class("hf_cpu")(number, {**rollout, **changes}, model)


def of_ranks(ranks, **options):
    return {"tensor_model_parallel_size": ranks, "engine_kwargs": {"hf_cpu": options}}


def zeros(taken):
    """Weights of 0 for the whole model; ``taken`` gets the names of those that were asked for."""
    for name, parameter in AutoModelForCausalLM.from_pretrained(os.environ["MODEL"]).named_parameters():
        taken.append(name)
        yield name, torch.zeros_like(parameter)


async def running(server, count):
    async with asyncio.timeout(60):
        while (await server.get_stats.remote()).running != count:
            await asyncio.sleep(0.02)


async def launch():
    """Start the replicas; one that gets a wrong option tells its caller."""
    replicas = [replica_of(0), replica_of(1, **of_ranks(2))]
    wrong = replica_of(5, **of_ranks(2, seconds=1))
    launched = [replica.launch_servers() for replica in (*replicas, wrong)]
    *ready, refused = await asyncio.gather(*launched, return_exceptions=True)
    assert ready == [None, None]
    assert "hf_cpu takes seconds_per_step, found seconds" in str(refused)
    assert [replica.server_address for replica in replicas] == ["hf_cpu_server_0", "hf_cpu_server_1"]
    return replicas


async def a_replica_of_several_servers_is_refused():
    with pytest.raises(ValueError, match="data_parallel_size"):
        await replica_of(8, data_parallel_size=2).launch_servers()


async def weights_of_a_shared_server_come_from_its_first_rank_and_reach_no_other(single, shared):
    a, b = await asyncio.gather(*[s.generate.remote([5, 6, 7], SEEDED, "a") for s in (single, shared)])
    assert a.token_ids == b.token_ids
    assert len(a.token_ids) == len(a.log_probs) == 200, "the configured length"
    assert (a.stop_reason, a.extra_fields) == ("completed", {"global_steps": None})
    pair = rollout.copy()
    pair.tensor_model_parallel_size = 2
    for rank, server_of_rank in ((5, 2), (3, 1), (2, 1)):
        os.environ["RANK"] = str(rank)
        adapter = get_rollout_class("hf_cpu")(pair, model, None)
        assert (adapter.replica_rank, adapter.is_leader_rank) == (server_of_rank, rank % 2 == 0), rank
        if rank == 5:
            continue
        taken = []
        await adapter.update_weights(zeros(taken), global_steps=rank)
        await adapter.release()
        assert taken == [name for name, _ in zeros([])], "every rank takes part in gathering"
        c, d = await asyncio.gather(*[s.generate.remote([5, 6, 7], SEEDED, "b") for s in (single, shared)])
        assert (d.token_ids == a.token_ids) == (rank == 3), rank
    assert d.extra_fields == {"global_steps": 2}
    assert (c.token_ids, c.extra_fields) == (a.token_ids, a.extra_fields)
    del os.environ["RANK"]


async def weights_of_a_server_of_one_rank_come_under_a_version(server):
    adapter = get_rollout_class("hf_cpu")(rollout, model, None, replica_rank=0)
    await adapter.resume(["weights"])
    await adapter.update_weights(zeros([]), global_steps=7)
    answer = await server.generate.remote([5, 6, 7], SEEDED, "r")
    assert answer.extra_fields == {"global_steps": 7}
    torch.testing.assert_close(torch.tensor(answer.log_probs), -torch.tensor(64.0).log().expand(200))
    with pytest.raises(ValueError, match="delta_flush"):
        await adapter.update_weights(iter(()), wire_format="delta_flush")
    await adapter.release()


async def a_request_that_cannot_be_served_fails_alone(server):
    good, *bad = await asyncio.gather(
        server.generate.remote([5], PARAMS, "good"),
        server.generate.remote([], PARAMS, "empty"),
        server.generate.remote([5] * 216, PARAMS, "long"),
        server.generate.remote([5], {**PARAMS, "temprature": 1}, "typo"),
        server.generate.remote([5], PARAMS, "seeing", image_data=[1]),
        return_exceptions=True,
    )
    assert good.stop_reason == "completed"
    for error, text in zip(bad, ("prompt is empty", "leaves no room", "'temprature'", "text only"), strict=True):
        assert isinstance(error, ValueError), error
        assert text in str(error), error


async def abort_all_answers_and_holds_or_turns_away_newcomers_until_resume(replica):
    server = replica.server_handle
    long = [server.generate.remote([5], LONG, f"l{i}") for i in range(6)]
    await running(server, 4)
    await replica.abort_all_requests()
    assert {(await ref).stop_reason for ref in long} == {"aborted"}
    waiting = server.generate.remote([5], PARAMS, "w")
    assert not ray.wait([waiting], timeout=0.5)[0]
    await replica.sleep()  # does not wait for a request that only resume can start
    await replica.resume_generation()
    assert (await waiting).stop_reason == "completed"
    await replica.abort_all_requests(reject_request=True)
    turned_away = await server.generate.remote([5], PARAMS, "late")
    assert (turned_away.stop_reason, turned_away.token_ids) == ("aborted", [])
    await replica.resume_generation()


async def single_requests_end_by_id_or_by_cancelling_their_reference(server):
    earlier = await server.get_stats.remote()
    # Four rows of the longest responses, again and again, leave time to interrupt.
    refs = [server.generate.remote([5], {**LONG, "seed": i}, f"r{i}") for i in range(40)]
    await running(server, 4)
    assert (await server.abort_request.remote("r39")) == {"aborted": True, "request_id": "r39"}
    assert (await refs[39]).stop_reason == "aborted"
    assert not (await server.abort_request.remote("nobody"))["aborted"]
    ray.cancel(refs[38])
    with pytest.raises((ray.exceptions.TaskCancelledError, ray.exceptions.RayTaskError, asyncio.CancelledError)):
        await refs[38]
    assert {(await ref).stop_reason for ref in refs[:38]} == {"completed"}
    stats = await server.get_stats.remote()
    ended = stats.completed - earlier.completed, stats.aborted - earlier.aborted
    assert (*ended, stats.running, stats.waiting) == (38, 2, 0, 0), stats


async def main():
    await a_replica_of_several_servers_is_refused()
    replicas = await launch()
    single, shared = [replica.server_handle for replica in replicas]
    await weights_of_a_shared_server_come_from_its_first_rank_and_reach_no_other(single, shared)
    await weights_of_a_server_of_one_rank_come_under_a_version(single)
    await a_request_that_cannot_be_served_fails_alone(single)
    await abort_all_answers_and_holds_or_turns_away_newcomers_until_resume(replicas[0])
    await single_requests_end_by_id_or_by_cancelling_their_reference(single)


ray.init(
    address="local",
    num_cpus=4,
    include_dashboard=False,
    object_store_memory=100_000_000,
    _temp_dir=os.environ["RAY_TEMP"],
)
try:
    asyncio.run(main())
finally:
    ray.shutdown()
