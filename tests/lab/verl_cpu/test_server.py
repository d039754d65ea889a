"""Replica, server actor and weight updates in a real Ray cluster, driven as verl drives them."""

import importlib.util

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed"),
]

_START = """
import asyncio, os, time
import ray, torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM
from hydra import compose, initialize_config_module
from verl.workers.rollout.replica import get_rollout_replica_class
from verl.workers.rollout.base import get_rollout_class

with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", [
        "hydra.searchpath=[pkg://rl_accel.lab.verl_cpu]", "+run_on=cpu",
        "actor_rollout_ref.model.path=" + os.path.abspath("model"),
        "data.max_prompt_length=16", "data.max_response_length=200", "actor_rollout_ref.rollout.max_num_seqs=4",
    ])
rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
ENDLESS = {**PARAMS, "ignore_eos": True, "max_tokens": 10_000}

async def running(server, count):
    while (await server.get_stats.remote()).running != count:
        await asyncio.sleep(0.02)

ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=100_000_000,
         _temp_dir=os.environ["RAY_TEMP"])
try:
    asyncio.run(main())
finally:
    ray.shutdown()
"""


@pytest.fixture
def serve(python, make_model, tmp_path, short_tmp):
    """Run ``body``, the source of ``async def main()``, with a model on disk and a cluster around it."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    make_model().save_pretrained(tmp_path / "model")
    vocabulary = {"<pad>": 0, "<bos>": 1, "<unk>": 2, "<x>": 3, "<end>": 4} | {chr(60 + i): i for i in range(5, 64)}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    ).save_pretrained(tmp_path / "model")

    def run(body: str):
        main, _, rest = _START.partition("ray.init(")
        indented = "\n".join(f"    {line}" for line in body.strip().splitlines())
        source = f"{main}\nasync def main():\n{indented}\n\nray.init({rest}"
        result = python(source, VERL_PLATFORM="cpu", RAY_TEMP=str(short_tmp))
        assert result.returncode == 0, result.stderr[-4000:]

    return run


def test_replicas_serve_take_weights_abort_and_resume(serve):
    serve(
        """
replicas = [get_rollout_replica_class("hf_cpu")(rank, rollout, model) for rank in (0, 1)]
await asyncio.gather(*[replica.launch_servers() for replica in replicas])
assert [replica.server_address for replica in replicas] == ["hf_cpu_server_0", "hf_cpu_server_1"]
zero, one = [replica.server_handle for replica in replicas]

# the same request gives the same tokens on either replica; the default length is the configured one
seeded = {**PARAMS, "seed": 3, "ignore_eos": True}
a, b = await asyncio.gather(*[s.generate.remote([5, 6, 7], seeded, "r") for s in (zero, one)])
assert a.token_ids == b.token_ids and len(a.token_ids) == len(a.log_probs) == 200
assert (a.stop_reason, a.extra_fields) == ("completed", {"global_steps": None})

# a request that cannot be served fails alone, with a message for its caller
good, *bad = await asyncio.gather(
    zero.generate.remote([5], PARAMS, "good"),
    zero.generate.remote([], PARAMS, "empty"),
    zero.generate.remote([5] * 216, PARAMS, "long"),
    zero.generate.remote([5], {**PARAMS, "temprature": 1}, "typo"),
    zero.generate.remote([5], PARAMS, "seeing", image_data=[1]),
    return_exceptions=True,
)
assert good.stop_reason == "completed"
for error, text in zip(bad, ("prompt is empty", "leaves no room", "'temprature'", "text only"), strict=True):
    assert isinstance(error, ValueError) and text in str(error), error

# weights go to one replica under a version; the other stays
source = AutoModelForCausalLM.from_pretrained("model")
adapter = get_rollout_class("hf_cpu")(rollout, model, None, replica_rank=0)
await adapter.resume(["weights"])
await adapter.update_weights(((n, torch.zeros_like(p)) for n, p in source.named_parameters()), global_steps=7)
c, d = await asyncio.gather(*[s.generate.remote([5, 6, 7], seeded, "r") for s in (zero, one)])
assert c.extra_fields == {"global_steps": 7} and d.extra_fields == {"global_steps": None}
assert c.token_ids != a.token_ids and d.token_ids == a.token_ids
torch.testing.assert_close(torch.tensor(c.log_probs), -torch.tensor(64.0).log().expand(200))
try:
    await adapter.update_weights(iter(()), wire_format="delta_flush")
except ValueError as error:
    assert "delta_flush" in str(error)
else:
    raise AssertionError("a delta was taken for weights")
await adapter.release()

# abort everything: callers get what they have; newcomers wait until resume, or are turned away
long = [one.generate.remote([5], {**ENDLESS, "max_tokens": 210}, f"l{i}") for i in range(6)]
await running(one, 4)
await replicas[1].abort_all_requests()
assert {(await ref).stop_reason for ref in long} == {"aborted"}
waiting = one.generate.remote([5], PARAMS, "w")
assert not ray.wait([waiting], timeout=0.5)[0]
await replicas[1].sleep()  # does not wait for a request that only resume can start
await replicas[1].resume_generation()
assert (await waiting).stop_reason == "completed"
await replicas[1].abort_all_requests(reject_request=True)
turned_away = await one.generate.remote([5], PARAMS, "late")
assert (turned_away.stop_reason, turned_away.token_ids) == ("aborted", [])
await replicas[1].resume_generation()
        """
    )


def test_a_server_with_little_memory_preempts_answers_the_same_and_tells(serve):
    serve(
        """
def with_memory(tokens):
    return {**rollout, "engine_kwargs": {"hf_cpu": {"kv_tokens": tokens}}}

tight = with_memory(300)
replicas = [get_rollout_replica_class("hf_cpu")(rank, config, model) for rank, config in enumerate((rollout, tight))]
await asyncio.gather(*[replica.launch_servers() for replica in replicas])
answers = [
    await asyncio.gather(
        *[r.server_handle.generate.remote([5, 6, 7], {**PARAMS, "seed": i, "ignore_eos": True}, f"r{i}") for i in range(8)]
    )
    for r in replicas
]
for free, found in zip(*answers, strict=True):
    assert (found.token_ids, found.stop_reason, len(found.token_ids)) == (free.token_ids, "completed", 200)
    torch.testing.assert_close(torch.tensor(found.log_probs), torch.tensor(free.log_probs), atol=2e-5, rtol=0)
    assert free.num_preempted == 0
free, found = await asyncio.gather(*[r.server_handle.get_stats.remote() for r in replicas])
assert found.preemptions == sum(answer.num_preempted for answer in answers[1]) > 0
assert found.kv_tokens == 300 and 270 < found.kv_peak <= 300, found
assert (free.preemptions, free.kv_tokens) == (0, None) and free.kv_peak > 300, free

try:
    await get_rollout_replica_class("hf_cpu")(2, with_memory(215), model).launch_servers()
except Exception as error:
    assert "less than one request may need: 216 tokens" in str(error), error
else:
    raise AssertionError("a server was started in which a request may not fit")
        """
    )


def test_single_requests_end_by_id_or_by_cancelling_their_reference(serve):
    serve(
        """
replica = get_rollout_replica_class("hf_cpu")(0, rollout, model)
await replica.launch_servers()
server = replica.server_handle
# slow it down to have something to interrupt: four rows of the longest responses, again and again
refs = [server.generate.remote([5], {**ENDLESS, "max_tokens": 210, "seed": i}, f"r{i}") for i in range(40)]
await running(server, 4)
assert (await server.abort_request.remote("r39")) == {"aborted": True, "request_id": "r39"}
assert (await refs[39]).stop_reason == "aborted"
assert not (await server.abort_request.remote("nobody"))["aborted"]
ray.cancel(refs[38])
try:
    await refs[38]
except (ray.exceptions.TaskCancelledError, ray.exceptions.RayTaskError, asyncio.CancelledError):
    pass
else:
    raise AssertionError("a cancelled request was answered")
assert {(await ref).stop_reason for ref in refs[:38]} == {"completed"}
stats = await server.get_stats.remote()
assert (stats.completed, stats.aborted, stats.running, stats.waiting) == (38, 2, 0, 0), stats

try:
    wide = get_rollout_replica_class("hf_cpu")(1, {**rollout, "data_parallel_size": 2}, model)
    await wide.launch_servers()
except ValueError as error:
    assert "data_parallel_size" in str(error)
else:
    raise AssertionError("a replica of two processes was started")
        """
    )


def test_ranks_share_a_server_which_has_their_memory_and_takes_weights_from_the_first(serve):
    serve(
        """
def shared(ranks, **memory):
    return {**rollout, "tensor_model_parallel_size": ranks, "engine_kwargs": {"hf_cpu": memory}}

pair = shared(2, kv_tokens=150, weight_tokens=40)
replica = get_rollout_replica_class("hf_cpu")(0, pair, model)
await replica.launch_servers()
server = replica.server_handle
assert (await server.get_stats.remote()).kv_tokens == 2 * 150 + 40

seeded = {**PARAMS, "seed": 3, "ignore_eos": True}
before = (await server.generate.remote([5, 6, 7], seeded, "a")).token_ids
source = AutoModelForCausalLM.from_pretrained("model")
taken = []
def zeros():
    for name, parameter in source.named_parameters():
        taken.append(name)
        yield name, torch.zeros_like(parameter)
pair = rollout.copy()
pair.tensor_model_parallel_size = 2
for rank, server_of_rank in ((3, 1), (1, 0), (0, 0)):
    os.environ["RANK"] = str(rank)
    adapter = get_rollout_class("hf_cpu")(pair, model, None)
    assert (adapter.replica_rank, adapter.is_leader_rank) == (server_of_rank, rank % 2 == 0), rank
    if rank == 3:
        continue
    taken.clear()
    await adapter.update_weights(zeros(), global_steps=rank + 7)
    await adapter.release()
    assert len(taken) == len(list(source.named_parameters())), "every rank takes part in gathering"
    after = await server.generate.remote([5, 6, 7], seeded, "b")
    assert (after.token_ids == before) == (rank == 1), rank
assert after.extra_fields == {"global_steps": 7}

for number, memory, message in (
    (5, {"kv_tokens": 107}, "kv_tokens=107, 214 for 2 ranks, is less than one request may need: 216 tokens"),
    (6, {"kv_tokens": 150, "weight_tokens": -1}, "weight_tokens wants a whole number of at least 0, found -1"),
):
    try:
        await get_rollout_replica_class("hf_cpu")(number, shared(2, **memory), model).launch_servers()
    except Exception as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)
        """
    )
