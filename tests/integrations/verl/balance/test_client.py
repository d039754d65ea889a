"""Tests responses that move between replicas, with client, router and real CPU engines. Actors are plain objects here."""

import asyncio
import json
import random
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError

from rl_accel.features import BalanceFlags
from rl_accel.integrations.verl import engines
from rl_accel.integrations.verl.balance import client, router
from rl_accel.lab import verl_cpu
from rl_accel.lab.cpu_engine.sampling import SamplingParams
from rl_accel.rollout.balance import Balance, Instruction

ROLLOUT = {"name": "balance_test", "prompt_length": 20, "response_length": 20}
CONFIG = OmegaConf.create({"actor_rollout_ref": {"rollout": ROLLOUT}})
ENGINE = engines.EngineSupport(aborts_by_id=True, seeds_by_position=True, stop=verl_cpu._stop)
MORE = [pytest.param(replicas, 500, marks=[pytest.mark.slow, pytest.mark.full]) for replicas in (2, 4)]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(engines._ENGINES, "balance_test", ENGINE)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several engines on few cores: more threads would wait for each other
    monkeypatch.setattr(router, "TICK_SECONDS", 0.01)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def start_engine(engine_for, make_model):
    """``start_engine(**options)`` starts an engine with a model of its own."""
    return lambda **options: engine_for(make_model(), **options)


class Handle:
    """What a handle of an actor is to who has it: whoever stops awaiting a call has not stopped it."""

    def __init__(self, instance):
        self._instance = instance
        self.__ray_call__ = client.Method(self._call)

    async def _call(self, function, *args):
        return function(self._instance, *args)

    def __getattr__(self, name):
        method = getattr(self._instance, name)

        async def call(*args, **kwargs):
            result = method(*args, **kwargs)
            return await result if asyncio.iscoroutine(result) else result

        return SimpleNamespace(remote=lambda *args, **kwargs: Call(call(*args, **kwargs)))


class Call:
    def __init__(self, work):
        self._task = asyncio.create_task(work)
        self.cancel = self._task.cancel

    def __await__(self):
        return asyncio.shield(self._task).__await__()


class Worker:
    """An agent-loop worker that lives."""

    async def stay_alive(self):
        await asyncio.Event().wait()


class Server:
    def __init__(self, engine):
        self._engine, self.served = engine, 0

    async def generate(self, prompt_ids, sampling_params, request_id, **_):
        self.served += 1
        params = SamplingParams.from_dict(sampling_params, max_tokens=20)
        made = await asyncio.wrap_future(self._engine.submit(request_id, prompt_ids, params))
        fields = {"token_ids": made.token_ids, "log_probs": made.logprobs, "stop_reason": made.stop_reason}
        return SimpleNamespace(**fields, routed_experts=None, num_preempted=0, extra_fields={})

    async def abort_request(self, request_id):
        return {"aborted": await asyncio.wrap_future(self._engine.abort(request_id)) > 0}


class RandomMoves(Balance):
    """Moves at random, more often than any rule would."""

    rng = random.Random(0)

    def _move(self, _now):
        decisions = []
        for response in self._responses.values():
            replica = response.replica
            if replica is not None and not response.stopping and response.moves < 4 and self.rng.random() < 0.4:
                response.stopping, response.target = True, self.rng.choice(list(self._replicas))
                decisions.append(Instruction(response.ticket, replica.name, stop=True))
        return decisions

    def tick(self, now):
        return super().tick(now) or self._move(now)


@pytest.fixture
def balanced(start_engine):
    """``async with balanced() as (router, servers, balancer)``: everything is at rest when it ends."""

    @asynccontextmanager
    async def start(replicas=2, slots=16, core=Balance, seconds_per_step=0.005):
        local = router.BalancedRouter.__ray_metadata__.modified_class({})
        engines = [start_engine(max_num_seqs=slots, seconds_per_step=seconds_per_step) for _ in range(replicas)]
        servers = [Server(engine) for engine in engines]
        await local.set_up(ENGINE, {}, slots, BalanceFlags(), True, False)
        local._balance = core(slots, BalanceFlags())
        await local.add_servers({f"r{number}": Handle(server) for number, server in enumerate(servers)})
        yield local, servers, client.Servers(Handle(local), CONFIG, Handle(Worker()))
        async with asyncio.timeout(60):
            while len(local._balance):
                await asyncio.sleep(0.01)
        assert (local._balance.waiting, local._waiting) == (0, {})
        local._ticking.cancel()

    return start


async def generate(balancer, name, prompt, params):
    """What ``LLMServerClient.generate`` of verl does."""
    fields = await balancer.require_acquire_fields.remote()
    given = {"prompt_ids": prompt, "sampling_params": params, "image_data": None, "other": 1}
    given = {field: given[field] for field in fields if field in given}
    server_id, server = await balancer.acquire_server.remote(request_id=name, **given)
    try:
        return await server.generate.remote(request_id="its own", prompt_ids=prompt, sampling_params=params)
    finally:
        balancer.release_server.remote(server_id=server_id, request_id=name)


def prompts(count):
    rng = random.Random(1)
    return [[rng.randrange(5, 64) for _ in range(rng.randint(1, 20))] for _ in range(count)]


def params_of(number, **more):
    return {"temperature": 1.0, "logprobs": True, "seed": number, **more}


def of_one_engine(engine, given):
    """What an engine alone generates for each prompt with its parameters."""
    asked = [(prompt, SamplingParams.from_dict(params, max_tokens=20)) for prompt, params in given]
    return [future.result(60) for future in [engine.submit("x", *one) for one in asked]]


@pytest.mark.parametrize(("replicas", "count"), [(2, 100), (4, 200), *MORE])
async def test_responses_that_move_at_random_are_those_of_one_engine(start_engine, balanced, replicas, count):
    given = [(prompt, params_of(number)) for number, prompt in enumerate(prompts(count))]
    expected = of_one_engine(start_engine(max_num_seqs=64), given)
    async with balanced(replicas, core=RandomMoves, seconds_per_step=0.0) as (local, servers, balancer):
        made = await asyncio.gather(*(generate(balancer, str(i), *one) for i, one in enumerate(given)))
        await asyncio.sleep(0)
        assert len(local._balance) == 0
        numbers = local.take_numbers()
    assert [output.token_ids for output in made] == [one.token_ids for one in expected]
    assert {output.stop_reason for output in made} == {"completed"}
    for output, one in zip(made, expected, strict=True):
        np.testing.assert_allclose(output.log_probs, one.logprobs, atol=2e-5)
    assert numbers["moves"] > count / 5
    assert sum(server.served for server in servers) == count + numbers["moves"]


def endless(count):
    """Prompts, and parameters with which their responses have 30 tokens."""
    return [(prompt, params_of(number, ignore_eos=True, max_tokens=30)) for number, prompt in enumerate(prompts(count))]


async def test_what_a_dead_server_made_is_made_again_elsewhere_and_without_any_fails_as_in_verl(start_engine, balanced):
    async def dies(**_):
        await asyncio.sleep(0.02)
        raise ActorDiedError()

    given = endless(8)
    async with balanced(slots=1) as (local, servers, balancer):
        servers[0].generate = dies
        made = await asyncio.gather(*(generate(balancer, str(i), *one) for i, one in enumerate(given)))
        assert local.get_all_servers() == ["r1"]
        servers[1].generate = dies
        requests = [generate(balancer, f"later {i}", *one) for i, one in enumerate(given)]
        failed = await asyncio.gather(*requests, return_exceptions=True)
    alone = of_one_engine(start_engine(max_num_seqs=64), given)
    assert [output.token_ids for output in made] == [one.token_ids for one in alone]
    assert {repr(error) for error in failed} == {"RuntimeError('No available servers in load balancer')"}


async def test_who_is_cancelled_leaves_no_place_taken(balanced):
    async with balanced(slots=2) as (local, servers, balancer):
        tasks = [asyncio.create_task(generate(balancer, str(i), *one)) for i, one in enumerate(endless(12))]
        while not servers[0].served:
            await asyncio.sleep(0.002)
        assert local._balance.waiting
        for task in tasks[:4] + tasks[6:]:
            task.cancel()
        made = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(one, asyncio.CancelledError) for one in made] == [True] * 4 + [False] * 2 + [True] * 6
    assert {len(one.token_ids) for one in made[4:6]} == {30}


async def test_what_others_abort_is_handed_back_as_it_is(balanced):
    async with balanced() as (_, servers, balancer):
        task = asyncio.create_task(generate(balancer, "a", *endless(1)[0]))
        while not sum(server.served for server in servers):
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.05)
        for server in servers:
            await asyncio.wrap_future(server._engine.pause())
        output = await task
    assert output.stop_reason == "aborted"
    assert 0 < len(output.token_ids) < 30
    assert len(output.token_ids) == len(output.log_probs)


async def test_a_function_for_the_process_of_the_server_gets_the_request_by_its_ticket():
    async def call(function, request_id):
        return function("server", request_id)

    balanced = client.BalancedServer(None, "ticket", "name", SimpleNamespace(__ray_call__=client.Method(call)))
    assert await balanced.__ray_call__.remote(lambda *told: told, "request") == ("server", "ticket")


async def test_only_what_means_the_same_elsewhere_is_movable(balanced):
    seen = {}

    class Watching(Balance):
        def request(self, ticket, now, **response):
            seen[response["prompt_tokens"]] = response["movable"]
            return super().request(ticket, now, **response)

    requests = [({"temperature": 1.0, "seed": 3, "logprobs": True}, {}), ({"presence_penalty": 0.5}, {})]
    requests += [({"stop": ["x"]}, {}), ({}, {"image_data": ["picture"]})]
    async with balanced(core=Watching) as (_, _, balancer):
        for length, (params, media) in enumerate(requests, 1):
            given = {"prompt_ids": [5] * length, "sampling_params": params, **media}
            bound, _ = await balancer.acquire_server.remote(request_id="x", **given)
            balancer.release_server.remote(server_id=bound, request_id="x")
    assert seen == {1: True, 2: False, 3: False, 4: False}


async def test_the_next_turn_goes_to_the_replica_of_the_last(balanced):
    async with balanced() as (_, _, balancer):
        bound = []
        for turn in ("ab", "ba"):
            for request in turn:
                acquired = balancer.acquire_server.remote(request_id=request, prompt_ids=[5], sampling_params={})
                bound.append((await acquired)[0])
            for request, server in zip(turn, bound[-2:], strict=True):
                await balancer.release_server.remote(server_id=server, request_id=request)
        first, second, *again = map(str, bound)
        assert first != second
        assert again == [second, first]


def test_parts_are_joined():
    def part(**fields):
        names = ("log_probs", "routed_experts", "num_preempted", "stop_reason")
        empty = {"token_ids": [], "extra_fields": {}, **dict.fromkeys(names)}
        return SimpleNamespace(**{**empty, **fields})

    first = part(token_ids=[1, 2], log_probs=[-1.0, -2.0], num_preempted=1, stop_reason="aborted")
    first.extra_fields, first.routed_experts = {"a": 1}, np.arange(5)  # of a prompt of 4 and the first token
    second = part(token_ids=[3], log_probs=[-3.0], num_preempted=2, stop_reason="completed")
    second.extra_fields, second.routed_experts = {"a": 2, "b": 3}, np.arange(10, 16)
    whole = client.join(first, second)
    assert (whole.token_ids, whole.log_probs, whole.num_preempted) == ([1, 2, 3], [-1.0, -2.0, -3.0], 3)
    assert whole.routed_experts.tolist() == [0, 1, 2, 3, 4, 15]
    assert (whole.stop_reason, whole.extra_fields) == ("completed", {"a": 1, "b": 3})
    assert client.join(part(), part(token_ids=[7], log_probs=[-1.0])).log_probs == [-1.0]


async def test_what_a_router_has_seen_another_one_begins_with(balanced):
    async with balanced() as (local, _, balancer):
        _, params = endless(1)[0]
        await generate(balancer, "a", [5, 6], params)
        async with asyncio.timeout(60):
            while len(local._balance):  # it is told in the background
                await asyncio.sleep(0.002)
        lengths = json.loads(json.dumps(local.lengths()))
        assert list(lengths.values()) == [[30]]
        await local.set_up(ENGINE, lengths, 16, BalanceFlags(), True, False)
        assert local.lengths() == lengths
        bound, _ = await balancer.acquire_server.remote(request_id="b", prompt_ids=[5, 6], sampling_params={})
        (response,) = local._balance._responses.values()
        assert response.predicted == 30
        balancer.release_server.remote(server_id=bound, request_id="b")


async def test_the_router_goes_on_after_an_error(balanced, monkeypatch, caplog):
    async with balanced() as (local, _, _):
        failed, went_on = asyncio.Event(), asyncio.Event()

        def tick(_now):
            (went_on if failed.is_set() else failed).set()
            if not went_on.is_set():
                raise KeyError("a replica that has gone")
            return []

        monkeypatch.setattr(local._balance, "tick", tick)
        await went_on.wait()
    assert caplog.text.count("no response was moved") == 1
