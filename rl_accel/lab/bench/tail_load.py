"""Program that runs rollout rounds of tail batching on verl for one batch size, without a model.

Usage: ``python -m rl_accel.lab.bench.tail_load PROMPTS RESPONSES ROUNDS OUT.json``. ``rl-accel bench tail`` starts it.

Tail batching starts more responses than a batch needs and ends a round when the batch is complete. TransferQueue, verl's load
balancer, LLM client and agent loop, and rl-accel's agent-loop manager, workers and trainer code are real. The rollout servers only
sleep. There is no grader and no training.
"""

import asyncio
import hashlib
import itertools
import json
import math
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import ray
import transfer_queue as tq
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPTNeoXConfig, PreTrainedTokenizerFast
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import get_router_handle

from rl_accel.features import TailBatchingFlags
from rl_accel.integrations.verl import agent_loop
from rl_accel.integrations.verl.engines import engine_of
from rl_accel.integrations.verl.tail_batching import run_of
from rl_accel.integrations.verl.tail_batching.agent_loop import TailAgentLoopWorker, Workers
from rl_accel.integrations.verl.tail_batching.servers import RolloutServers, TailLLMServerClient
from rl_accel.integrations.verl.tail_batching.trainer import TailBatchingTrainer, clear
from rl_accel.integrations.verl.tail_batching.wiring import wire
from rl_accel.patches.verl.verl_run import VerlRun
from rl_accel.rollout.round_driver import METRICS_PREFIX, PromptSupply, RolloutDriver
from rl_accel.rollout.saved import Ledger
from rl_accel.rollout.tail_batching import TailBatching

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
WORKERS, SERVERS = 2, 2
"""Numbers of agent-loop workers and of rollout servers: the smallest with which responses are spread over several processes."""
RATIO = 1.25
"""Ratio of launched to trained prompts, and of launched to trained responses per prompt: tail batching's default for both."""
TOKENS = 128
"""Number of tokens of a response with the median response time. The tokens of other responses are proportional to their times."""
LONGEST = 8.0
"""Upper bound of a random response time, as a multiple of the median time. Without it, one response could decide the results."""


def drawn(prompt: bytes, rng: random.Random) -> float:
    """Returns a random response time as a multiple of the median response time, at most :data:`LONGEST`.

    The time is log-normal with sigma 1. Half of the variance is common to all responses to ``prompt``.
    """
    shared = random.Random(hashlib.sha256(prompt).digest()).gauss(0, math.sqrt(0.5))
    return min(math.exp(shared + rng.gauss(0, math.sqrt(0.5))), LONGEST)


class SleepingServer:
    """A rollout server that sleeps for a random time (median ``median_s`` seconds) instead of decoding.

    Cancelling a ``generate`` call ends the sleep.
    """

    def __init__(self, median_s: float, seed: int) -> None:
        self._median_s, self._rng = median_s, random.Random(seed)
        self._running = 0
        self._aborted = asyncio.Event()

    async def generate(self, request_id: str, prompt_ids: list[int], **_: Any) -> TokenOutput:
        length = drawn(repr(prompt_ids).encode(), self._rng)
        self._running += 1
        began, reason = time.monotonic(), "completed"
        try:
            await asyncio.wait_for(self._aborted.wait(), length * self._median_s)
            length, reason = min(length, (time.monotonic() - began) / self._median_s), "aborted"
        except TimeoutError:
            pass
        finally:
            self._running -= 1
        ids = [3 + i % 32 for i in range(max(1, round(length * TOKENS)))]
        return TokenOutput(token_ids=ids, stop_reason=reason, num_preempted=0, extra_fields={"global_steps": 0})

    async def abort_all_requests(self) -> None:
        """Ends all running requests as aborted. Until :meth:`resume_generation` is called, new requests also end on arrival."""
        self._aborted.set()

    async def resume_generation(self) -> None:
        self._aborted.clear()

    async def running(self) -> int:
        return self._running


class NotingWorker(TailAgentLoopWorker):
    """rl-accel's agent-loop worker, which reports events of responses (such as "scored"). Also records the time of each event, in
    seconds of the monotonic clock, which all processes of the machine share."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._notes: list[tuple[str, int, float]] = []

    def _report(self, event: Any) -> None:
        self._notes.append((event.kind, event.response_id, time.monotonic()))
        super()._report(event)

    async def take_notes(self) -> tuple[list[tuple[str, int, float]], int, float]:
        """Returns the events since the last call, as ``(kind, response id, seconds)``.

        Also returns two numbers about this worker process: resident memory in bytes, and CPU seconds so far.
        """
        notes, self._notes = self._notes, []
        return notes, psutil.Process().memory_info().rss, time.process_time()


class RoundsOnly(TailBatchingTrainer):
    """rl-accel's trainer for tail batching without models, data files and checkpoints. It can only run rollout rounds."""

    def __init__(self, driver: RolloutDriver, log: Ledger) -> None:
        self._driver, self._log = driver, log
        # In the last steps of a training run, tail batching starts fewer prompts, so that the rounds would be smaller.
        self._last_step = 10**9


class Load:
    """Rollout rounds of one batch size, in the Ray cluster to which this process is connected.

    The tokenizer and tail batching's log of trained prompts are written to ``folder``.
    """

    def __init__(self, prompts: int, responses: int, folder: Path) -> None:
        self._prompts, self._responses = prompts, responses
        config = _config(prompts, responses, _model(folder / "model"))
        tq.init(config.transfer_queue)
        server = ray.remote(SleepingServer).options(num_cpus=0, max_concurrency=100_000)
        # grows with the batch, so that two cores can process the responses as fast as they finish
        median_s = max(0.2, prompts * responses / 270)
        self._servers = {f"sleeping_{index}": server.remote(median_s, index) for index in range(SERVERS)}
        client = TailLLMServerClient(config=config, load_balancer_handle=get_router_handle(self._servers))
        self._workers = agent_loop.AgentLoops.create(config=config, llm_client=client).agent_loop_workers
        numbers = itertools.count()
        self._core = TailBatching(run_of(config))
        self._supply = PromptSupply(lambda: _row(next(numbers)), 10**9)
        names = ("abort_all_requests", "resume_generation")  # the methods of verl's replicas that the trainer calls
        replicas = [SimpleNamespace(**{n: getattr(s, n).remote for n in names}) for s in self._servers.values()]
        engine = replace(engine_of(config), pause=None)  # the engine's pause would look for a real engine in the server
        stopped = RolloutServers(SimpleNamespace(get_replicas=lambda: replicas), engine)
        log = Ledger(folder)
        log.rewind(0)
        driver = RolloutDriver(self._core, self._supply, Workers(self._workers, stopped), clear)
        self._trainer = RoundsOnly(driver, log)
        self._trained: set[str] = set()

    def play(self, step: int) -> dict[str, Any]:
        """Runs the rollout round of training step ``step`` and returns its measurements by name. Raises as :meth:`_check`."""
        cpu_before = [cpu_s for _, _, cpu_s in self._take_notes()]  # returns only when all workers have started
        used, began = time.process_time(), time.monotonic()
        batch, metrics = self._trainer._play(step)
        ended, used = time.monotonic(), time.process_time() - used
        notes, memory, cpu_after = zip(*self._take_notes(), strict=True)
        events = [event for of_worker in notes for event in of_worker]
        self._check(batch.keys, metrics)
        tq.kv_clear(keys=list(batch.keys), partition_id="train")  # as the real trainer does after each step
        trained = {int(key.split("_")[1]) for key in batch.keys}
        last = max(at for kind, response_id, at in events if kind == "scored" and response_id in trained)
        return {
            "kind": next(kind for kind in ("short", "long", "final") if metrics[f"{METRICS_PREFIX}{kind}_round"]),
            "launched_responses": len({response_id for _, response_id, _ in events}),
            "seconds": ended - began,
            "trainer_cpu_s": used,
            "after_last_s": ended - last,
            "events": len(events),
            "worker_cpu_s": sum(cpu_after) - sum(cpu_before),
            "trainer_bytes": psutil.Process().memory_info().rss,
            "worker_bytes": max(memory),
        }

    def _take_notes(self) -> list[Any]:
        notes: list[Any] = ray.get([worker.take_notes.remote() for worker in self._workers])
        return notes

    def _check(self, keys: list[str], metrics: dict[str, float]) -> None:
        """Raises RuntimeError unless a round returned exactly one batch, the responses with ``keys`` in TransferQueue.

        Also raises if anything else is stored there, if a request still runs, or if a prompt was lost or trained twice.
        """
        prompts, responses = self._prompts, self._responses
        by_prompt = Counter(key.split("_")[0] for key in keys)
        if len(keys) != len(set(keys)) or len(by_prompt) != prompts or set(by_prompt.values()) != {responses}:
            raise RuntimeError(
                f"a batch must be {prompts} prompts x {responses} responses, found {len(by_prompt)} and {len(keys)} keys"
            )
        stored = set((tq.kv_list("train") or {}).get("train", {}))
        if stored != set(keys) or metrics[f"{METRICS_PREFIX}ghost_keys"]:
            raise RuntimeError(f"nothing but the batch may be stored, found {len(stored - set(keys))} other keys")
        if twice := self._trained & by_prompt.keys():
            raise RuntimeError(f"every prompt must be trained once, found {len(twice)} twice")
        self._trained.update(by_prompt)
        waiting, trained, fetched = set(self._core.unsettled_prompts()), self._trained, self._supply.fetched
        if waiting != self._supply.payloads.keys() or waiting & trained or len(waiting | trained) != fetched:
            raise RuntimeError(
                f"of {fetched} prompts none may be lost, found {len(trained)} trained and {len(waiting)} waiting"
            )
        if running := sum(ray.get([server.running.remote() for server in self._servers.values()])):
            raise RuntimeError(f"{running} requests still run on the servers although their round is over")


def _config(prompts: int, responses: int, model: Path) -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer")
    changes = {
        "data.train_batch_size": prompts,
        "data.max_prompt_length": 64,
        "data.max_response_length": 16384,
        "actor_rollout_ref.model.path": str(model),
        "actor_rollout_ref.rollout.name": "vllm",  # cancelling the remote call ends the request, as on vLLM
        "actor_rollout_ref.rollout.n": responses,
        "actor_rollout_ref.rollout.agent.num_workers": WORKERS,
        "actor_rollout_ref.actor.ppo_mini_batch_size": prompts,
        "critic.enable": False,
        "algorithm.adv_estimator": "grpo",
        "transfer_queue.enable": True,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    flags = TailBatchingFlags(enable=True, prompt_ratio=RATIO, response_ratio=RATIO)
    wire(VerlRun(config, in_driver=True), flags)
    OmegaConf.update(config, agent_loop.PARTS, ["rl_accel.lab.bench.tail_load.NotingWorker"])
    OmegaConf.resolve(config)
    return config


def _model(folder: Path) -> Path:
    """Saves a one-token-per-word tokenizer and the configuration of a model that is never loaded. Returns ``folder``."""
    words = {f"w{i}": i for i in range(512)}
    core = Tokenizer(models.WordLevel({"<unk>": 512, "<eos>": 513, **words}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    GPTNeoXConfig(vocab_size=1024, architectures=["GPTNeoXForCausalLM"]).save_pretrained(folder)
    return folder


def _row(number: int) -> dict[str, Any]:
    words = " ".join(f"w{(number * 7 + i * 31) % 512}" for i in range(24)) + f" w{number % 512} w{number // 512 % 512}"
    return {
        "raw_prompt": [{"role": "user", "content": words}],
        "data_source": "drawn",
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"index": number},
        "index": number,
    }


def main(prompts: str, responses: str, rounds: str, out_file: str) -> None:
    """Starts a Ray cluster, runs the rounds, and writes the measurements of each round to the file ``out_file``."""
    out = Path(out_file)
    ray.init(num_cpus=32, num_gpus=0, include_dashboard=False, log_to_driver=False)
    try:
        load = Load(int(prompts), int(responses), out.parent)
        out.write_text(json.dumps([load.play(step) for step in range(1, int(rounds) + 1)]))
    finally:
        tq.close()
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
