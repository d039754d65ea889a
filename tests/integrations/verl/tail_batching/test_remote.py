"""Tests tail batching with Ray actors that are cancelled or die, on a real cluster."""

import asyncio
import contextlib
import functools
import itertools
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import ray
import transfer_queue as tq
from omegaconf import OmegaConf
from ray.exceptions import RayActorError
from verl.workers.rollout import router

from rl_accel.errors import RlAccelError
from rl_accel.integrations.verl.engines import EngineSupport
from rl_accel.integrations.verl.reward_worker_proxy import RewardWorkerProxy
from rl_accel.integrations.verl.tail_batching import trainer_servers, worker_servers
from rl_accel.integrations.verl.tail_batching.messages import ServerLost, StoredKeys
from rl_accel.integrations.verl.tail_batching.trainer import TailBatchingTrainer, require_own_queue, varies
from rl_accel.integrations.verl.tail_batching.trainer_servers import RolloutServers
from rl_accel.integrations.verl.tail_batching.trainer_workers import KEY_PREFIX, Workers
from rl_accel.integrations.verl.tail_batching.worker_servers import ServerDied, Session
from rl_accel.rollout.round_driver import Event, Job, StepResult, TokenRate

pytestmark = pytest.mark.slow


def abort(server, request_id):
    """Runs in the server's process, in another thread than its event loop."""
    server.loop.call_soon_threadsafe(server._aborted[request_id].set)
    return True


def pause(server):
    server.seen["gate"] = "paused"


ABORTS_BY_ID, RESTARTS = EngineSupport(aborts_by_id=True), EngineSupport(restarts_in_run=True)
ABORTS, CANCELS = EngineSupport(abort=abort), EngineSupport(abort=lambda server, request_id: False)
REQUEST = {"prompt_ids": [1], "sampling_params": {"endless": True}}
SHORT = {"prompt_ids": [1], "sampling_params": {}}
_started = []
CONFIG = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm", "full_determinism": False}}})


@pytest.fixture(scope="module", autouse=True)
def by_value(job):
    """Has actors get code of this module by value: they would import verl for it, which takes longer than all else here."""
    ray.cloudpickle.register_pickle_by_value(router)
    yield
    ray.cloudpickle.unregister_pickle_by_value(router)


class EngineDeadError(Exception):
    """As vLLM's: a living server raises it once the process of its engine is gone."""


class Server:
    """The methods of a rollout server that the client calls, and what became of each request."""

    def __init__(self):
        self.seen = {}
        self.engine = SimpleNamespace(errored=False)
        self.scheduler_info = SimpleNamespace(all_child_pids=[os.getpid()])  # a process that lives
        self._aborted = {}

    async def generate(self, request_id, prompt_ids, sampling_params, image_data=None, video_data=None, priority=0):
        if self.engine.errored:
            raise EngineDeadError("EngineCore encountered an issue")
        self.loop = asyncio.get_running_loop()
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

    async def lose_process(self):
        """As SGLang's server, whose engine is its child processes; nobody has waited for this one, which has ended."""
        ended = subprocess.Popen(["true"])
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        self.scheduler_info.all_child_pids.append(ended.pid)

    async def compute_score(self, data):
        """Never ends, as a reward worker and as a training worker that waits for a dead server."""
        await self.generate("score", **REQUEST)


@pytest.fixture(autouse=True)
def clean_up():
    yield
    while _started:
        ray.kill(_started.pop())


def start(kind):
    _started.append(ray.remote(kind).options(num_cpus=0).remote())
    return _started[-1]


@pytest.fixture(scope="module")
def one_balancer(by_value):
    return ray.remote(router.GlobalRequestLoadBalancer).options(num_cpus=0).remote({})


@pytest.fixture
def balancer_of(one_balancer):
    """``balancer_of(servers)``: verl's load balancer over these handles by address, and no others."""

    def balancer_of(servers):
        ray.get(one_balancer.remove_servers.remote(ray.get(one_balancer.get_all_servers.remote())))
        ray.get([one_balancer.clear_sticky_cache.remote(), one_balancer.add_servers.remote(servers)])
        return one_balancer

    return balancer_of


async def nobody_dies(line):
    raise AssertionError(line)


async def until_running(actor, request):
    async with asyncio.timeout(60):
        while (await actor.look.remote()).get(request) != "running":
            await asyncio.sleep(0.01)


async def respond(session, call):
    session.task = asyncio.current_task()
    worker_servers.SESSION.set(session)
    await call()


async def start_and_cancel(call, running):
    """Start ``call`` for a session, wait for ``running``, cancel it; return the session when the task is over."""
    session = Session(1)
    task = asyncio.create_task(respond(session, call))
    await running()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    return session


def start_server(engine):
    """Return a new server, and what a session generates with."""
    actor = start(Server)
    return actor, worker_servers.CancellableServer(actor, engine, TokenRate(), on_death=nobody_dies)


class TestCancelling:
    @pytest.mark.parametrize("engine", [ABORTS_BY_ID, ABORTS, CANCELS, EngineSupport()])
    async def test_a_server_aborts_by_id_and_says_its_tokens_or_the_call_itself_is_cancelled(self, engine):
        actor, server = start_server(engine)
        call = functools.partial(server.generate.remote, request_id="a", **REQUEST)
        session = await start_and_cancel(call, lambda: until_running(actor, "a"))
        aborts = engine in (ABORTS_BY_ID, ABORTS)
        assert session.tokens == 3 or not aborts
        assert await actor.look.remote() == {"a": "aborted" if aborts else "cancelled"}

    async def test_what_the_engine_aborts_at_the_end_of_a_round_counts_as_cancelled_and_starts_nothing_new(self):
        actor, server = start_server(EngineSupport())
        session, call = Session(1), functools.partial(server.generate.remote, request_id="a", **REQUEST)
        task = asyncio.create_task(respond(session, call))
        await until_running(actor, "a")
        assert session.generating
        session.cancelled = True
        await actor.abort_request.remote("a")
        await asyncio.wait({task})
        assert task.cancelled()
        assert (session.tokens, session.generating) == (3, False)
        again = asyncio.create_task(respond(session, call))
        await asyncio.wait({again})
        assert again.cancelled()
        assert await actor.look.remote() == {"a": "aborted"}, "no second request"

    async def test_a_reward_worker_stops_with_its_task(self):
        actor = start(Server)
        worker = RewardWorkerProxy(actor, lambda _deaths: actor)
        await start_and_cancel(lambda: worker.compute_score.remote(None), lambda: until_running(actor, "score"))
        assert await actor.look.remote() == {"score": "cancelled"}

    async def test_text_that_the_engine_cut_off_unasked_never_passes_for_whole_except_in_validation(self):
        actor, server = start_server(EngineSupport())

        async def generate(request_id):
            call = asyncio.create_task(server.generate.remote(request_id=request_id, **REQUEST))
            await until_running(actor, request_id)
            await actor.abort_request.remote(request_id)
            return await call

        assert (await generate("validation")).token_ids == [1, 2, 3]
        worker_servers.SESSION.set(Session(1))
        with pytest.raises(worker_servers.GenerationAborted, match="after 3 tokens"):
            await generate("training")


@pytest.fixture
def client_of(balancer_of):
    """``client_of("one", "two")``: a client over new servers, and these by name."""

    def client_of(*names):
        servers = {name: start(Server) for name in names}
        return worker_servers.TailLLMServerClient(CONFIG, balancer_of(servers)), servers

    return client_of


def known_to(client):
    return ray.get(client._load_balancer.get_all_servers.remote())


class TestDeadServers:
    async def test_a_dead_server_costs_the_requests_at_hand_and_is_never_chosen_again(self, client_of, kill):
        client, servers = client_of("one", "two")
        requests = [asyncio.create_task(client.generate(f"r{i}", **REQUEST)) for i in range(8)]
        async with asyncio.timeout(60):
            for server in servers.values():  # the load balancer shares them out equally
                while len(await server.look.remote()) < 4:
                    await asyncio.sleep(0.01)
        kill(servers["one"])
        for request in itertools.islice(asyncio.as_completed(requests), 4):
            with pytest.raises(ServerDied):
                await request
        assert known_to(client) == ["two"]
        answers = [await client.generate(f"r{i}", **SHORT) for i in range(8, 24)]
        assert [answer.token_ids for answer in answers] == [[1, 2]] * 16
        for request in requests:
            request.cancel()

    async def test_a_living_server_whose_engine_is_dead_counts_as_dead(self, client_of):
        client, servers = client_of("one", "two")
        await servers["one"].lose_engine.remote()
        results = []
        while len(known_to(client)) == 2 and len(results) < 100:
            results += await asyncio.gather(client.generate(f"r{len(results)}", **SHORT), return_exceptions=True)
        assert isinstance(results[-1], ServerDied)
        assert "EngineCore encountered" in str(results[-1])
        assert known_to(client) == ["two"]

    async def test_when_none_is_left_the_dead_ones_are_named(self, client_of, kill):
        client, servers = client_of("one")
        kill(servers["one"])
        with pytest.raises(ServerDied):
            await client.generate("a", **SHORT)
        with pytest.raises(ServerLost, match=r"no rollout server is left \(one: .*Resume from the last checkpoint"):
            await client.generate("b", **SHORT)
        other = worker_servers.TailLLMServerClient(CONFIG, client._load_balancer)  # of a worker without requests
        with pytest.raises(ServerLost, match="no rollout server is left"):
            await other.generate("c", **SHORT)

    async def test_a_call_that_is_being_cancelled_when_its_server_dies_ends(self):
        actor, server = start_server(ABORTS_BY_ID)

        async def running_then_dead():
            await until_running(actor, "a")
            os.kill(await actor.__ray_call__.remote(lambda _: os.getpid()), signal.SIGKILL)

        await start_and_cancel(lambda: server.generate.remote(request_id="a", **REQUEST), running_then_dead)

    def test_the_dead_are_told_from_the_living(self, kill):
        one, two, three = (SimpleNamespace(servers=[start(Server) for _ in range(n)]) for n in (1, 2, 1))
        assert asyncio.run(trainer_servers.find_dead([one, two, three])) == []
        kill(two.servers[1])
        assert asyncio.run(trainer_servers.find_dead([one, two, three])) == [two]
        ray.get(three.servers[0].lose_engine.remote())
        assert asyncio.run(trainer_servers.find_dead([one, two, three])) == [two, three]
        ray.get(one.servers[0].lose_process.remote())
        assert asyncio.run(trainer_servers.find_dead([one, two, three])) == [one, two, three]


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
def servers_of(balancer_of):
    """``servers_of(replica, engine)``: the rollout servers of a trainer with this replica."""

    def servers_of(replica, engine=RESTARTS):
        balancer = balancer_of({replica.server_address: replica.server_handle})
        return RolloutServers(SimpleNamespace(get_replicas=lambda: [replica], global_load_balancer=balancer), engine)

    return servers_of


@pytest.mark.parametrize(("engine", "stopped"), [(RESTARTS, "closed"), (EngineSupport(pause=pause), "paused")])
def test_every_living_server_is_stopped_as_its_engine_wants_and_then_resumed(kill, engine, stopped):
    dead, alive = Replica(), Replica()
    kill(dead.server_handle)
    servers = RolloutServers(SimpleNamespace(get_replicas=lambda: [dead, alive]), engine)
    servers.resume()
    assert ray.get(alive.server_handle.look.remote()) == {}, "it was not stopped"
    servers.abort()
    assert ray.get(alive.server_handle.look.remote()) == {"gate": stopped}
    servers.resume()
    assert ray.get(alive.server_handle.look.remote()) == {"gate": "open"}


def test_a_server_that_fails_otherwise_is_no_secret():
    broken = Replica()
    broken.abort_all_requests = mock.AsyncMock(side_effect=OSError("no gate"))
    with pytest.raises(OSError, match="no gate"):
        RolloutServers(SimpleNamespace(get_replicas=lambda: [broken]), RESTARTS).abort()


class TestRevivingServers:
    def test_a_dead_server_is_restarted_and_a_living_one_put_back_at_its_address(self, servers_of, one_balancer, kill):
        replica = Replica()
        servers = servers_of(replica)
        assert servers.revive() == []
        kill(replica.server_handle)
        assert servers.revive() == ["server_1"]
        address, handle = ray.get(one_balancer.acquire_server.remote("r"))
        assert address == "server_1"
        assert ray.get(handle.look.remote()) == {}
        ray.get(one_balancer.remove_servers.remote(["server_1"]))
        assert servers.revive() == []
        assert ray.get(one_balancer.get_all_servers.remote()) == ["server_1"]

    @pytest.mark.parametrize("answers", [True, False])
    def test_a_call_under_which_a_server_or_its_engine_died_is_made_again(self, servers_of, kill, monkeypatch, answers):
        """The calls of a dead server fail; with vLLM, those that an engine died under never end."""
        replica, calls = Replica(), []

        def call():
            calls.append(1)
            if len(calls) == 1 and answers:
                kill(replica.server_handle)
            elif len(calls) == 1:
                ray.get(replica.server_handle.lose_engine.remote())
                ray.get(replica.server_handle.compute_score.remote(None))
            ray.get(replica.server_handle.look.remote())

        if not answers:
            monkeypatch.setattr(trainer_servers, "WATCH_SECONDS", 0.5)
        servers = servers_of(replica)
        servers.reach_all(call)
        assert len(calls) == 2

        def fails():
            calls.append(1)
            ray.get(replica.server_handle.abort_request.remote("nobody"))

        with pytest.raises(KeyError, match="nobody"):
            servers.reach_all(fails)
        assert len(calls) == 3, "one that fails for another reason is not made again"

    def test_a_call_that_waits_for_a_dead_engine_is_ended(self, servers_of):
        replica = Replica()
        servers, call = servers_of(replica), replica.server_handle.compute_score.remote(None)
        servers.end_calls_of_dead()
        ray.get(replica.server_handle.lose_engine.remote())
        servers.end_calls_of_dead()
        with pytest.raises(RayActorError):
            ray.get(call, timeout=60)

    def test_a_server_that_dies_in_a_weight_update_leaves_nobody_waiting(self, servers_of, kill, monkeypatch):
        monkeypatch.setattr(trainer_servers, "WATCH_SECONDS", 0.5)
        replica, sender = Replica(), start(Server)
        replica.workers = [sender]

        def call():
            kill(replica.server_handle)
            ray.get(sender.compute_score.remote(None))  # a training worker that waits for the dead server without end

        with pytest.raises(ServerLost, match=r"server_1 died while it was given new weights\. Resume from"):
            servers_of(replica).update_weights(call)

    @pytest.mark.parametrize(
        ("engine", "starts", "message"),
        [
            (EngineSupport(), True, r"server_1 .* has died, and its engine cannot be given a new one .* checkpoint"),
            (RESTARTS, False, r"server_1 \(replica 1\) has died and could not be started again: no room"),
        ],
    )
    def test_a_server_that_cannot_be_started_again_is_named(self, servers_of, kill, engine, starts, message):
        replica = Replica(starts)
        servers = servers_of(replica, engine)
        kill(replica.server_handle)
        with pytest.raises(ServerLost, match=message):
            servers.revive()

    def test_a_watch_that_fails_looks_again(self, kill, monkeypatch):
        monkeypatch.setattr(trainer_servers, "WATCH_SECONDS", 0.1)
        replica, ended = Replica(), threading.Event()
        kill(replica.server_handle)
        answers = itertools.chain([OSError("Ray does not answer")], itertools.repeat([replica]))
        servers = RolloutServers(SimpleNamespace(get_replicas=mock.Mock(side_effect=answers)), RESTARTS)
        with servers._watched(lambda dead: ended.set()):
            assert ended.wait(60)


class Worker:
    """An agent-loop worker whose responses never end, except that one of prompt "quick" is scored at once."""

    def __init__(self):
        self._events = asyncio.Queue()
        self.orders = []

    async def act(self, jobs, cancel, engines_stop):
        self.orders += [*jobs, *cancel, *(["stop"] if engines_stop else [])]
        for job in jobs:
            for response_id in job.response_ids:
                if job.prompt_id.endswith("/quick"):
                    await self._events.put(Event("generated", response_id, 5))
                    await self._events.put(Event("scored", response_id, 5, f"r{response_id}"))
        for response_id in cancel:
            await self._events.put(Event("aborted", response_id, 1))

    async def next_events(self):
        return [await self._events.get()]

    async def look(self):
        return list(self.orders)


class Engines:
    """Notes what it is told, and what the workers had been told by then."""

    def __init__(self, *workers):
        self.told = []
        self._workers = workers

    def abort(self):
        self.told.append(("abort", [ray.get(worker.look.remote()) for worker in self._workers]))

    def resume(self):
        self.told.append(("resume", []))

    def end_calls_of_dead(self):
        self.told.append(("end_calls_of_dead", []))


def gather(workers, count):
    """Return the next events, ``count`` of them: kind and response of each, and the events themselves."""
    events = []
    while len(events) < count:
        said = workers.wait(60)
        assert said, f"{len(events)} of {count} events in 60 seconds"
        events += said
    return [(event.kind, event.response_id) for event in events], events


class TestWorkers:
    def test_responses_of_a_worker_that_dies_have_failed_and_later_ones_go_elsewhere(self, kill):
        one, two = start(Worker), start(Worker)
        living = [one, two]
        workers = Workers(living, Engines())
        workers.launch(Job("a", {}, (0, 1), 1))
        workers.launch(Job("b", {}, (2, 3), 1))
        workers.launch(Job("quick", {}, (4,), 1))  # to the first worker, as both have two
        assert gather(workers, 2)[0] == [("generated", 4), ("scored", 4)]

        kill(one)
        what, events = gather(workers, 2)
        assert what == [("failed", 0), ("failed", 1)]
        assert all("agent-loop worker 0 died" in event.error and event.lost for event in events)
        assert living == [two], "validation goes to those that live"

        workers.launch(Job("quick", {}, (5,), 1))
        workers.cancel([0, 2, 4, 77])  # of those only 2 still runs
        assert set(gather(workers, 3)[0]) == {("generated", 5), ("scored", 5), ("aborted", 2)}
        assert [item for item in ray.get(two.look.remote()) if isinstance(item, int)] == [2]

        kill(two)
        workers.launch(Job("unnoticed", {}, (6,), 1))
        assert gather(workers, 2)[0] == [("failed", 3), ("failed", 6)]
        with pytest.raises(RuntimeError, match="every agent-loop worker has died"):
            workers.launch(Job("c", {}, (7,), 1))

    def test_at_the_end_of_a_round_the_workers_know_before_the_engines_stop(self, monkeypatch, wait_for):
        monkeypatch.setattr(f"{Workers.__module__}.DELIVERY_SECONDS", 600.0)
        one = start(Worker)
        engines = Engines(one)
        workers = Workers([one], engines)
        workers.begin_round()
        workers.end_round()
        assert engines.told == [("resume", [])], "nothing runs, so nothing is stopped"
        workers.launch(Job("a", {}, (0, 1), 1))
        assert workers.wait(0.1) == []
        assert engines.told.pop() == ("end_calls_of_dead", []), "nothing happens, so it may be a dead engine"
        wait_for(lambda: ray.get(one.look.remote()), "the start, which Ray may deliver after a later call")
        workers.cancel([0, 1])
        workers.end_round()
        assert engines.told[1:] == [("abort", [[Job(f"{KEY_PREFIX}a", {}, (0, 1), 1), 0, 1, "stop"]])]
        assert set(gather(workers, 2)[0]) == {("aborted", 0), ("aborted", 1)}

    def test_a_round_without_a_rollout_server_ends_the_run(self):
        class Stranded(Worker):
            async def next_events(self):
                raise ServerLost("no rollout server is left")

        with pytest.raises(ServerLost, match="no rollout server is left"):
            Workers([start(Stranded)], Engines()).wait(60)


def test_a_group_whose_metric_is_the_same_throughout_is_rejected_and_a_missing_metric_named():
    """verl's rule: such a group teaches nothing."""
    for metrics, passes in (((1.0, 1.0), False), ((0.0, 1.0), True), ((0.0,), True)):
        assert varies("1:1", [StoredKeys((f"k{i}",), metric) for i, metric in enumerate(metrics)]) is passes
    with pytest.raises(RuntimeError, match=r"algorithm\.filter_groups\.metric must name a metric .* prompt 1:7"):
        varies("1:7", [StoredKeys(("a",), 1.0), StoredKeys(("b",))])


def test_entries_of_another_job_of_the_cluster_are_left_alone():
    """The queue's controller has one name in a cluster, so that jobs share its partitions."""
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    try:
        foreign, left_behind = ["1:7_3_0", "aaaa/1:7_3_0"], f"{KEY_PREFIX}1:7_3_0"
        tq.kv_batch_put(keys=[*foreign, left_behind], partition_id="train", tags=[{"status": "success"}] * 3)
        driver = SimpleNamespace(play=lambda *_: StepResult())
        trainer = SimpleNamespace(_driver=driver, _steps_left=lambda _: 5, _log=SimpleNamespace(add=lambda *_: None))
        _, metrics = TailBatchingTrainer._play(trainer, 1)
        assert metrics["rl_accel/tail_batching/ghost_keys"] == 1
        assert sorted(tq.kv_list("train")["train"]) == foreign
        trainer._servers = None
        with pytest.raises(RlAccelError, match=r"another job of this Ray cluster has 2 entries .* cluster of its own"):
            TailBatchingTrainer.fit(trainer, SimpleNamespace(agent_loop_workers=[]))
    finally:
        tq.close()


OTHER_JOB = """
import sys, ray, transfer_queue as tq
from omegaconf import OmegaConf
ray.init(address=sys.argv[1])
tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
print("ready", flush=True)
input()
"""


def test_a_queue_of_another_job_is_refused_and_left_to_it(ray_address, clean_environment):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", OTHER_JOB, ray_address]
    with subprocess.Popen(command, env=clean_environment, text=True, **pipes) as other:
        try:
            while "ready" not in (line := other.stdout.readline()):
                assert line, "the other job has ended"
            tq.init()
            with pytest.raises(RlAccelError, match=r"TransferQueue belongs to another job of this Ray cluster"):
                require_own_queue()
            tq.close()  # as verl does when a trainer cannot be built
            controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
            assert ray.get(controller.get_config.remote())
        finally:
            other.kill()
