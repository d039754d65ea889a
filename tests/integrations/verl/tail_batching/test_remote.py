"""What tail batching does with Ray actors that are cancelled or die, on a real cluster."""

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("verl") is None or importlib.util.find_spec("transfer_queue") is None:
    pytest.skip("verl is not installed", allow_module_level=True)

import ray
from omegaconf import OmegaConf
from verl.workers.rollout.llm_server import GlobalRequestLoadBalancer

from rl_accel.integrations.verl.engines import Engine
from rl_accel.integrations.verl.reward_worker_proxy import RewardWorkerProxy
from rl_accel.integrations.verl.tail_batching.agent_loop import Stored, Workers
from rl_accel.integrations.verl.tail_batching.servers import (
    SESSION,
    CancellableServer,
    GenerationAborted,
    RolloutServers,
    ServerDied,
    ServerLost,
    Session,
    TailLLMServerClient,
    find_dead,
)
from rl_accel.integrations.verl.tail_batching.trainer import varies
from rl_accel.rollout.driver import Event, Job

pytestmark = pytest.mark.slow

ABORTS_BY_ID, RESTARTS = Engine(aborts_by_id=True), Engine(restarts_in_run=True)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    folder = tempfile.mkdtemp(prefix="rla", dir="/tmp")  # Ray's socket names must fit in 107 characters
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, _temp_dir=folder)
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


class EngineDeadError(Exception):
    """As vLLM's: a living server raises it once the process of its engine is gone."""


class Server:
    """The methods of a rollout server that the client calls, and what became of each request."""

    def __init__(self):
        self.seen = {}
        self.engine = SimpleNamespace(errored=False)
        self._aborted = {}

    async def generate(self, request_id, prompt_ids, sampling_params, image_data=None, video_data=None, priority=0):
        if self.engine.errored:
            raise EngineDeadError("EngineCore encountered an issue")
        self.seen[request_id] = "running"
        self._aborted[request_id] = asyncio.Event()
        try:
            if sampling_params.get("endless"):
                await self._aborted[request_id].wait()
                self.seen[request_id] = "aborted"
                return SimpleNamespace(token_ids=[1, 2, 3], stop_reason="aborted", extra_fields={})
        except asyncio.CancelledError:
            self.seen[request_id] = "cancelled"
            raise
        self.seen[request_id] = "completed"
        return SimpleNamespace(token_ids=[1, 2], stop_reason="completed", extra_fields={})

    async def abort_request(self, request_id):
        self._aborted[request_id].set()
        return {"aborted": True, "request_id": request_id}

    async def gate(self, state):
        self.seen["gate"] = state

    async def look(self):
        return dict(self.seen)

    async def lose_engine(self):
        self.engine.errored = True

    async def sleep_without_end(self):
        await asyncio.Event().wait()

    async def pid(self):
        return os.getpid()


class RewardWorker:
    def __init__(self):
        self.seen = []

    async def compute_score(self, data):
        self.seen.append("running")
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise

    async def look(self):
        return list(self.seen)


_started = []


@pytest.fixture(autouse=True)
def clean_up():
    yield
    while _started:
        ray.kill(_started.pop())


def start(kind):
    _started.append(ray.remote(kind).options(num_cpus=0).remote())
    return _started[-1]


@pytest.fixture(scope="module")
def one_balancer(cluster):
    """Its process imports verl, which takes longer than all of these tests, so they share it."""
    return ray.remote(GlobalRequestLoadBalancer).options(num_cpus=0).remote({})


@pytest.fixture
def balancer_of(one_balancer):
    """``balancer_of(servers)``: verl's load balancer over these handles by address, and no others."""

    def balancer_of(servers):
        ray.get(one_balancer.remove_servers.remote(ray.get(one_balancer.get_all_servers.remote())))
        ray.get(one_balancer.clear_sticky_cache.remote())
        ray.get(one_balancer.add_servers.remote(servers))
        return one_balancer

    return balancer_of


def kill(actor):
    """SIGKILL to the actor's process; returns when Ray knows that it is dead."""
    os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)
    with contextlib.suppress(ray.exceptions.RayActorError):
        while True:
            ray.get(actor.pid.remote())


async def nobody_dies(line):
    raise AssertionError(line)


async def until(actor, wanted):
    while not wanted(await actor.look.remote()):
        await asyncio.sleep(0.01)


async def until_done(tasks, count):
    """Wait until ``count`` of ``tasks`` are done."""
    while sum(task.done() for task in tasks) < count:
        await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)


async def start_and_cancel(call, running):
    """Start ``call`` for a session, wait for ``running``, cancel it; return the session when the task is over."""
    session = Session(1)

    async def respond():
        SESSION.set(session)
        await call()

    task = asyncio.create_task(respond())
    await running()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    return session


REQUEST = {"prompt_ids": [1], "sampling_params": {"endless": True}}


class TestCancelling:
    def test_a_server_that_aborts_by_id_says_how_many_tokens_there_were(self):
        async def run():
            actor = start(Server)
            server = CancellableServer(actor, ABORTS_BY_ID, on_death=nobody_dies)
            session = await start_and_cancel(
                lambda: server.generate.remote(request_id="a", **REQUEST),
                lambda: until(actor, lambda seen: seen == {"a": "running"}),
            )
            assert session.tokens == 3
            assert await actor.look.remote() == {"a": "aborted"}

        asyncio.run(run())

    def test_in_any_other_server_the_call_itself_is_cancelled_and_over_when_the_task_is(self):
        async def run():
            actor = start(Server)
            server = CancellableServer(actor, Engine(), on_death=nobody_dies)
            await start_and_cancel(
                lambda: server.generate.remote(request_id="a", **REQUEST),
                lambda: until(actor, lambda seen: seen == {"a": "running"}),
            )
            assert await actor.look.remote() == {"a": "cancelled"}

        asyncio.run(run())

    def test_what_the_engine_aborts_at_the_end_of_a_round_counts_as_cancelled_and_starts_nothing_new(self):
        async def run():
            actor = start(Server)
            server = CancellableServer(actor, Engine(), on_death=nobody_dies)
            session = Session(1)

            async def respond():
                SESSION.set(session)
                await server.generate.remote(request_id="a", **REQUEST)

            task = asyncio.create_task(respond())
            await until(actor, lambda seen: seen == {"a": "running"})
            assert session.generating
            session.cancelled = True
            await actor.abort_request.remote("a")
            await asyncio.wait({task})
            assert task.cancelled()
            assert (session.tokens, session.generating) == (3, False)
            again = asyncio.create_task(respond())
            await asyncio.wait({again})
            assert again.cancelled()
            assert await actor.look.remote() == {"a": "aborted"}, "no second request"

        asyncio.run(run())

    def test_a_reward_worker_stops_with_its_task(self):
        async def run():
            actor = start(RewardWorker)
            worker = RewardWorkerProxy(actor, lambda _deaths: actor)
            await start_and_cancel(
                lambda: worker.compute_score.remote(None), lambda: until(actor, lambda seen: seen == ["running"])
            )
            assert await actor.look.remote() == ["running", "cancelled"]

        asyncio.run(run())

    def test_text_that_the_engine_cut_off_unasked_never_passes_for_whole_except_in_validation(self):
        async def run():
            actor = start(Server)
            server = CancellableServer(actor, Engine(), on_death=nobody_dies)

            async def generate(request_id):
                call = asyncio.create_task(server.generate.remote(request_id=request_id, **REQUEST))
                await until(actor, lambda seen: seen.get(request_id) == "running")
                await actor.abort_request.remote(request_id)
                return await call

            assert (await generate("validation")).token_ids == [1, 2, 3]
            SESSION.set(Session(1))
            with pytest.raises(GenerationAborted, match="after 3 tokens"):
                await generate("training")

        asyncio.run(run())


CONFIG = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm", "full_determinism": False}}})


class TestDeadServers:
    def test_a_dead_server_costs_the_requests_at_hand_and_is_never_chosen_again(self, balancer_of):
        servers = {"one": start(Server), "two": start(Server)}
        balancer = balancer_of(servers)
        client = TailLLMServerClient(CONFIG, balancer)

        async def run():
            requests = [asyncio.create_task(client.generate(f"r{i}", **REQUEST)) for i in range(8)]
            for server in servers.values():  # the load balancer shares them out equally
                await until(server, lambda seen: len(seen) == 4)
            kill(servers["one"])
            await until_done(requests, 4)
            assert all(isinstance(request.exception(), ServerDied) for request in requests if request.done())
            assert ray.get(balancer.get_all_servers.remote()) == ["two"]
            answers = [await client.generate(f"r{i}", prompt_ids=[1], sampling_params={}) for i in range(8, 24)]
            assert [answer.token_ids for answer in answers] == [[1, 2]] * 16
            for request in requests:
                request.cancel()

        asyncio.run(run())

    def test_a_living_server_whose_engine_is_dead_counts_as_dead(self, balancer_of):
        servers = {"one": start(Server), "two": start(Server)}
        balancer = balancer_of(servers)
        client = TailLLMServerClient(CONFIG, balancer)

        async def run():
            await servers["one"].lose_engine.remote()
            results = []
            while len(ray.get(balancer.get_all_servers.remote())) == 2:
                call = client.generate(f"r{len(results)}", prompt_ids=[1], sampling_params={})
                results += await asyncio.gather(call, return_exceptions=True)
            assert isinstance(results[-1], ServerDied)
            assert "EngineCore encountered" in str(results[-1])
            assert ray.get(balancer.get_all_servers.remote()) == ["two"]

        asyncio.run(run())

    def test_when_none_is_left_the_dead_ones_are_named(self, balancer_of):
        servers = {"one": start(Server)}
        client = TailLLMServerClient(CONFIG, balancer_of(servers))

        async def run():
            kill(servers["one"])
            with pytest.raises(ServerDied):
                await client.generate("a", prompt_ids=[1], sampling_params={})
            with pytest.raises(ServerLost, match=r"no rollout server is left \(one: .*Resume from the last checkpoint"):
                await client.generate("b", prompt_ids=[1], sampling_params={})
            other = TailLLMServerClient(CONFIG, client._load_balancer)  # of a worker that had no request on it
            with pytest.raises(ServerLost, match="no rollout server is left"):
                await other.generate("c", prompt_ids=[1], sampling_params={})

        asyncio.run(run())

    def test_a_call_that_is_being_cancelled_when_its_server_dies_ends(self):
        async def run():
            actor = start(Server)
            server = CancellableServer(actor, ABORTS_BY_ID, on_death=nobody_dies)

            async def running_then_dead():
                await until(actor, lambda seen: seen == {"a": "running"})
                os.kill(await actor.pid.remote(), signal.SIGKILL)

            await start_and_cancel(lambda: server.generate.remote(request_id="a", **REQUEST), running_then_dead)

        asyncio.run(run())

    def test_the_dead_are_told_from_the_living(self):
        one, two, three = (SimpleNamespace(servers=[start(Server) for _ in range(n)]) for n in (1, 2, 1))
        assert asyncio.run(find_dead([one, two, three])) == []
        kill(two.servers[1])
        assert asyncio.run(find_dead([one, two, three])) == [two]
        ray.get(three.servers[0].lose_engine.remote())
        assert asyncio.run(find_dead([one, two, three])) == [two, three]


class Replica:
    """What the trainer uses of verl's ``RolloutReplica``."""

    replica_rank = 1
    server_address = "server_1"
    workers = ()

    def __init__(self, starts=True):
        self._starts = starts
        self.servers = [start(Server)]

    @property
    def server_handle(self):
        return self.servers[0]

    async def abort_all_requests(self):
        await self.server_handle.gate.remote("closed")

    async def resume_generation(self):
        await self.server_handle.gate.remote("open")

    async def launch_servers(self):
        if not self._starts:
            raise OSError("no room")
        self.servers = [start(Server)]


@pytest.fixture
def manager_of(balancer_of):
    """``manager_of(replica)``: what the trainer uses of verl's ``LLMServerManager``."""

    def manager_of(replica):
        balancer = balancer_of({replica.server_address: replica.server_handle})
        return SimpleNamespace(get_replicas=lambda: [replica], global_load_balancer=balancer)

    return manager_of


class TestStoppingServers:
    def test_every_living_server_is_told_and_resumed_only_after_it_was_stopped(self):
        dead, alive = Replica(), Replica()
        kill(dead.server_handle)
        servers = RolloutServers(SimpleNamespace(get_replicas=lambda: [dead, alive]), RESTARTS)
        servers.resume()
        assert ray.get(alive.server_handle.look.remote()) == {}
        servers.abort()
        assert ray.get(alive.server_handle.look.remote()) == {"gate": "closed"}
        servers.resume()
        assert ray.get(alive.server_handle.look.remote()) == {"gate": "open"}

    def test_a_server_that_fails_otherwise_is_no_secret(self):
        class Broken(Replica):
            async def abort_all_requests(self):
                raise OSError("no gate")

        with pytest.raises(OSError, match="no gate"):
            RolloutServers(SimpleNamespace(get_replicas=lambda: [Broken()]), RESTARTS).abort()


class TestRevivingServers:
    def test_a_dead_server_is_started_again_and_serves_under_its_old_address(self, manager_of):
        replica = Replica()
        manager = manager_of(replica)
        servers = RolloutServers(manager, RESTARTS)
        assert servers.revive() == []
        kill(replica.server_handle)
        assert servers.revive() == ["server_1"]
        address, handle = ray.get(manager.global_load_balancer.acquire_server.remote("r"))
        assert address == "server_1"
        assert ray.get(handle.look.remote()) == {}

    def test_a_living_server_that_was_taken_from_the_load_balancer_is_put_back(self, manager_of):
        manager = manager_of(Replica())
        ray.get(manager.global_load_balancer.remove_servers.remote(["server_1"]))
        assert RolloutServers(manager, RESTARTS).revive() == []
        assert ray.get(manager.global_load_balancer.get_all_servers.remote()) == ["server_1"]

    def test_a_call_during_which_a_server_dies_is_made_again(self, manager_of):
        replica = Replica()
        calls = []

        def call():
            calls.append(1)
            if len(calls) == 1:
                kill(replica.server_handle)
            ray.get(replica.server_handle.look.remote())

        RolloutServers(manager_of(replica), RESTARTS).reach_all(call)
        assert len(calls) == 2

    def test_a_call_that_an_engine_died_under_is_made_again_although_its_server_never_answers(
        self, manager_of, monkeypatch
    ):
        monkeypatch.setattr(f"{RolloutServers.__module__}.WATCH_SECONDS", 0.5)
        replica = Replica()
        calls = []

        def call():
            calls.append(1)
            if len(calls) == 1:
                ray.get(replica.server_handle.lose_engine.remote())
                ray.get(replica.server_handle.sleep_without_end.remote())
            ray.get(replica.server_handle.look.remote())

        RolloutServers(manager_of(replica), RESTARTS).reach_all(call)
        assert len(calls) == 2

    def test_a_server_that_dies_in_a_weight_update_leaves_nobody_waiting(self, manager_of, monkeypatch):
        monkeypatch.setattr(f"{RolloutServers.__module__}.WATCH_SECONDS", 0.5)
        replica, sender = Replica(), start(RewardWorker)
        replica.workers = [sender]

        def call():
            kill(replica.server_handle)
            ray.get(sender.compute_score.remote(None))  # a training worker that waits for the dead server without end

        with pytest.raises(ServerLost, match=r"server_1 died while it was given new weights\. Resume from"):
            RolloutServers(manager_of(replica), RESTARTS).update_weights(call)

    def test_a_call_that_fails_for_another_reason_fails_once(self, manager_of):
        calls = []

        def call():
            calls.append(1)
            ray.get(replica.server_handle.abort_request.remote("nobody"))

        replica = Replica()
        with pytest.raises(KeyError, match="nobody"):
            RolloutServers(manager_of(replica), RESTARTS).reach_all(call)
        assert len(calls) == 1

    @pytest.mark.parametrize(
        ("engine", "starts", "message"),
        [
            (
                Engine(),
                True,
                r"server_1 \(replica 1\) has died, and its engine cannot be given a new one .* checkpoint",
            ),
            (RESTARTS, False, r"server_1 \(replica 1\) has died and could not be started again: no room"),
        ],
    )
    def test_a_server_that_cannot_be_started_again_is_named(self, manager_of, engine, starts, message):
        replica = Replica(starts)
        manager = manager_of(replica)
        kill(replica.server_handle)
        with pytest.raises(ServerLost, match=message):
            RolloutServers(manager, engine).revive()


class Worker:
    """An agent-loop worker whose responses never end, except that one of prompt "quick" is scored at once."""

    def __init__(self):
        self._events = asyncio.Queue()
        self.orders = []

    async def act(self, jobs, cancel, engines_stop):
        self.orders += [*jobs, *cancel, *(["stop"] if engines_stop else [])]
        for job in jobs:
            for response_id in job.response_ids:
                if job.prompt_id == "quick":
                    await self._events.put(Event("generated", response_id, 5))
                    await self._events.put(Event("scored", response_id, 5, f"r{response_id}"))
        for response_id in cancel:
            await self._events.put(Event("aborted", response_id, 1))

    async def next_events(self):
        return [await self._events.get()]

    async def look(self):
        return list(self.orders)

    async def pid(self):
        return os.getpid()


class Engines:
    """Notes what it is told, and what the workers had been told by then."""

    def __init__(self, *workers):
        self.told = []
        self._workers = workers

    def abort(self):
        self.told.append(("abort", [ray.get(worker.look.remote()) for worker in self._workers]))

    def resume(self):
        self.told.append(("resume", []))


def gather(workers, count):
    events = []
    while len(events) < count:
        events += workers.wait(60)
    return events


class TestWorkers:
    def test_responses_of_a_worker_that_dies_have_failed_and_later_ones_go_elsewhere(self):
        one, two = start(Worker), start(Worker)
        living = [one, two]
        workers = Workers(living, Engines())
        workers.launch(Job("a", {}, (0, 1), 1))
        workers.launch(Job("b", {}, (2, 3), 1))
        workers.launch(Job("quick", {}, (4,), 1))  # to the first worker, as both have two
        assert [(e.kind, e.response_id) for e in gather(workers, 2)] == [("generated", 4), ("scored", 4)]

        kill(one)
        events = gather(workers, 2)
        assert [(event.kind, event.response_id) for event in events] == [("failed", 0), ("failed", 1)]
        assert all("agent-loop worker 0 died" in event.error and event.lost for event in events)
        assert living == [two], "validation goes to those that live"

        workers.launch(Job("quick", {}, (5,), 1))
        workers.cancel([0, 2, 4, 77])  # of those only 2 still runs
        assert {(e.kind, e.response_id) for e in gather(workers, 3)} == {
            ("generated", 5),
            ("scored", 5),
            ("aborted", 2),
        }
        assert [item for item in ray.get(two.look.remote()) if isinstance(item, int)] == [2]

        kill(two)
        assert [(event.kind, event.response_id) for event in gather(workers, 1)] == [("failed", 3)]
        with pytest.raises(RuntimeError, match="every agent-loop worker has died"):
            workers.launch(Job("c", {}, (6,), 1))

    def test_at_the_end_of_a_round_the_workers_know_before_the_engines_stop(self, monkeypatch):
        monkeypatch.setattr(f"{Workers.__module__}.DELIVERY_SECONDS", 600.0)
        one = start(Worker)
        engines = Engines(one)
        workers = Workers([one], engines)
        workers.begin_round()
        workers.end_round()
        assert engines.told == [("resume", [])], "nothing runs, so nothing is stopped"
        job = Job("a", {}, (0, 1), 1)
        workers.launch(job)
        workers.cancel([0, 1])
        workers.end_round()
        assert engines.told[1:] == [("abort", [[job, 0, 1, "stop"]])]
        assert {(event.kind, event.response_id) for event in gather(workers, 2)} == {("aborted", 0), ("aborted", 1)}

    def test_a_round_without_a_rollout_server_ends_the_run(self):
        class Stranded(Worker):
            async def next_events(self):
                raise ServerLost("no rollout server is left")

        with pytest.raises(ServerLost, match="no rollout server is left"):
            Workers([start(Stranded)], Engines()).wait(60)

    def test_orders_to_a_worker_that_died_unnoticed_are_reported_as_failed(self):
        one = start(Worker)
        workers = Workers([one], Engines())
        kill(one)
        workers.launch(Job("a", {}, (0, 1), 1))
        assert [(event.kind, event.response_id) for event in gather(workers, 2)] == [("failed", 0), ("failed", 1)]


class TestGroups:
    """verl's rule: one whose metric is the same throughout teaches nothing."""

    @pytest.mark.parametrize(("metrics", "passes"), [((1.0, 1.0), False), ((0.0, 1.0), True), ((0.0,), True)])
    def test_a_constant_group_is_rejected(self, metrics, passes):
        assert varies("1:1", [Stored((f"k{i}",), metric) for i, metric in enumerate(metrics)]) is passes

    def test_a_missing_filter_metric_is_named(self):
        with pytest.raises(RuntimeError, match=r"algorithm\.filter_groups\.metric must name a metric .* prompt 1:7"):
            varies("1:7", [Stored(("a",), 1.0), Stored(("b",))])
