"""Program that runs rollout rounds of tail batching on verl for one batch size, without a model.

Usage: ``python -m rl_accel.lab.bench.tail_load PLAN.json OUT.json``.

Tail batching starts more responses than a batch needs and ends a round when the batch is complete. The following components are
real: TransferQueue, verl's load balancer and LLM client, the agent loop, rl-accel's agent-loop manager and agent-loop workers,
and rl-accel's trainer code from the decisions of tail batching to the batch. The rollout servers only sleep. There is no grader
and no training.
"""

import asyncio
import hashlib
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
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
from rl_accel.rollout.round_driver import PromptSupply, RolloutDriver
from rl_accel.rollout.saved import SettlementLog
from rl_accel.rollout.tail_batching import TailBatching

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
LONGEST = 8.0
"""Upper bound of a random response time, as a multiple of the median time. Corresponds to a limit on the response length."""


def drawn(prompt: bytes, rng: random.Random) -> float:
    """Returns a random response time as a multiple of the median response time, at most :data:`LONGEST`.

    The time is log-normal with sigma 1. All responses to the same ``prompt`` share half of the variance of the logarithm.
    """
    shared = random.Random(hashlib.sha256(prompt).digest()).gauss(0, math.sqrt(0.5))
    return min(math.exp(shared + rng.gauss(0, math.sqrt(0.5))), LONGEST)


class SleepingServer:
    """A rollout server that sleeps for a random time instead of decoding. Cancelling a ``generate`` call ends the sleep, as in
    vLLM.

    Args:
        median_s: median of the random response times, in seconds.
        tokens: number of tokens of a response that takes the median time; proportional to the response time.
        seed: seed of the random response times.
    """

    def __init__(self, median_s: float, tokens: int, seed: int) -> None:
        self._median_s, self._tokens, self._rng = median_s, tokens, random.Random(seed)
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
        ids = [3 + i % 32 for i in range(max(1, round(length * self._tokens)))]
        return TokenOutput(token_ids=ids, stop_reason=reason, num_preempted=0, extra_fields={"global_steps": 0})

    async def abort_all_requests(self) -> None:
        """Ends all running requests as aborted. Until :meth:`resume_generation` is called, new requests also end on arrival."""
        self._aborted.set()

    async def resume_generation(self) -> None:
        self._aborted.clear()

    async def running(self) -> int:
        """Returns the number of requests that are running on this server."""
        return self._running


class NotingWorker(TailAgentLoopWorker):
    """rl-accel's agent-loop worker, which also records the time of each event that the worker reports. Times are seconds of the
    monotonic clock, which all processes of a machine share."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._notes: list[tuple[str, int, float]] = []

    def _report(self, event: Any) -> None:
        self._notes.append((event.kind, event.response_id, time.monotonic()))
        super()._report(event)

    async def notes(self) -> list[tuple[str, int, float]]:
        """Returns the events recorded since the last call, each as a tuple ``(kind, response id, time in seconds)``."""
        notes, self._notes = self._notes, []
        return notes

    async def usage(self) -> tuple[int, float]:
        """Returns the resident memory in bytes and the CPU seconds of this worker process."""
        return psutil.Process().memory_info().rss, time.process_time()


class ReplicaStandIn:
    """Stand-in for verl's ``RolloutReplica``, with the two methods that rl-accel's trainer calls to stop and resume rollout
    servers."""

    def __init__(self, server: Any) -> None:
        self._server = server

    async def abort_all_requests(self) -> None:
        await self._server.abort_all_requests.remote()

    async def resume_generation(self) -> None:
        await self._server.resume_generation.remote()


class RoundsOnly(TailBatchingTrainer):
    """rl-accel's trainer, reduced to the parts that a rollout round needs. Has no models, no data files and no checkpoints."""

    def __init__(self, driver: RolloutDriver, log: SettlementLog, steps: int) -> None:
        self._driver, self._log, self._last_step = driver, log, steps


def run(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Runs the rollout rounds described by ``plan`` in the Ray cluster to which this process is connected.

    Args:
        plan: parameters of the rounds, see :func:`rl_accel.lab.bench.tail.plan_of`.
        folder: folder for the tokenizer and the settlement log (the log of the prompts that each step trained).

    Returns:
        A dict with two lists: "rounds" holds the measurements of each round, "errors" holds error messages.
    """
    config = _config(plan, _model(folder / "model"))
    tq.init(config.transfer_queue)
    servers = {
        f"sleeping_{index}": ray.remote(SleepingServer)
        .options(num_cpus=0, max_concurrency=100_000)
        .remote(plan["median_s"], plan["tokens"], index)
        for index in range(plan["servers"])
    }
    client = TailLLMServerClient(config=config, load_balancer_handle=get_router_handle(servers))
    workers = agent_loop.AgentLoops.create(config=config, llm_client=client).agent_loop_workers
    _usage(workers)  # this call returns only when all workers have started
    rounds = plan["rounds"]
    numbers = iter(range(10**9))
    core = TailBatching(run_of(config))
    supply = PromptSupply(core.run, lambda: _row(next(numbers)), 10**9)
    replicas = [ReplicaStandIn(server) for server in servers.values()]
    stopped = RolloutServers(SimpleNamespace(get_replicas=lambda: replicas), engine_of(config))
    driver = RolloutDriver(core, supply, Workers(workers, stopped), clear)
    log = SettlementLog(folder)
    log.rewind(0)
    # The trainer expects more steps than are run here. In the last steps of a training run, tail batching starts fewer
    # prompts, so that the last round would be smaller than the others.
    trainer = RoundsOnly(driver, log, rounds + 100)
    measured: list[dict[str, Any]] = []
    errors: list[str] = []
    trained: set[str] = set()
    for step in range(1, rounds + 1):
        before, used, began = _usage(workers), time.process_time(), time.monotonic()
        batch, metrics = trainer._play(step)
        ended = time.monotonic()
        used = time.process_time() - used
        after = _usage(workers)
        notes = [note for notes in ray.get([worker.notes.remote() for worker in workers]) for note in notes]
        stored = set((tq.kv_list("train") or {}).get("train", {}))
        errors += _errors(batch.keys, stored, metrics, trained, plan)
        waiting = set(core.unsettled_prompts())
        if waiting != supply.payloads.keys() or waiting & trained or len(waiting | trained) != supply.fetched:
            errors.append(
                f"of {supply.fetched} prompts none may be lost, found {len(trained)} trained and {len(waiting)} waiting"
            )
        ids = {int(key.split("_")[1]) for key in batch.keys}
        last = max(at for kind, response_id, at in notes if kind == "scored" and response_id in ids)
        prefix = "rl_accel/tail_batching/"
        metrics = {name.removeprefix(prefix): value for name, value in metrics.items()}
        measured.append(
            {
                "kind": next(kind for kind in ("short", "long", "final") if metrics[f"{kind}_round"]),
                "launched_responses": len({response_id for _, response_id, _ in notes}),
                "seconds": ended - began,
                "settle_s": ended - began - metrics["rollout_seconds"],
                "trainer_cpu_s": used,
                "after_last_s": ended - last,
                "events": len(notes),
                "cancelled": metrics["responses_cancelled"],
                "worker_cpu_s": sum(new[1] - old[1] for new, old in zip(after, before, strict=True)),
                "trainer_bytes": psutil.Process().memory_info().rss,
                "worker_bytes": max(usage[0] for usage in after),
            }
        )
        print(json.dumps(measured[-1]), flush=True)
        tq.kv_clear(keys=list(batch.keys), partition_id="train")  # as the real trainer does after each step
    running = sum(ray.get([server.running.remote() for server in servers.values()]))
    if running:
        errors.append(f"{running} requests still run on the servers although their round is over")
    return {"rounds": measured, "errors": errors}


def _errors(
    keys: list[str], stored: set[str], metrics: dict[str, float], trained: set[str], plan: dict[str, Any]
) -> list[str]:
    """Returns messages about errors of a batch, and adds the prompts of the batch to ``trained``.

    Errors are a wrong batch size, responses that stayed in the TransferQueue although the batch does not contain them, and prompts
    that an earlier batch has already trained.
    """
    prompts, responses = plan["prompts"], plan["responses"]
    by_prompt = Counter(key.split("_")[0] for key in keys)
    errors = []
    if len(keys) != len(set(keys)) or len(by_prompt) != prompts or set(by_prompt.values()) != {responses}:
        errors.append(
            f"a batch must be {prompts} prompts x {responses} responses, found {len(by_prompt)} and {len(keys)} keys"
        )
    if stored != set(keys) or metrics["rl_accel/tail_batching/ghost_keys"]:
        errors.append(f"nothing but the batch may be stored, found {len(stored - set(keys))} other keys")
    twice = trained & by_prompt.keys()
    if twice:
        errors.append(f"every prompt must be trained once, found {len(twice)} twice")
    trained.update(by_prompt)
    return errors


def _config(plan: dict[str, Any], model: Path) -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer")
    changes = {
        "data.train_batch_size": plan["prompts"],
        "data.max_prompt_length": 64,
        "data.max_response_length": 16384,
        "actor_rollout_ref.model.path": str(model),
        "actor_rollout_ref.rollout.name": "vllm",  # cancelling the remote call ends the request, as on vLLM
        "actor_rollout_ref.rollout.n": plan["responses"],
        "actor_rollout_ref.rollout.agent.num_workers": plan["workers"],
        "actor_rollout_ref.actor.ppo_mini_batch_size": plan["prompts"],
        "critic.enable": False,
        "algorithm.adv_estimator": "grpo",
        "transfer_queue.enable": True,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    ratios = {name: plan[name] for name in ("prompt_ratio", "response_ratio", "queue_threshold")}
    wire(VerlRun(config, in_driver=True), TailBatchingFlags(enable=True, **ratios))
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


def _usage(workers: list[Any]) -> list[tuple[int, float]]:
    usage: list[tuple[int, float]] = ray.get([worker.usage.remote() for worker in workers])
    return usage


def main(plan_file: str, out_file: str) -> None:
    """Starts a Ray cluster, runs the rounds described in ``plan_file``, and writes measurements and errors to ``out_file``."""
    plan = json.loads(Path(plan_file).read_text())
    ray.init(num_cpus=32, num_gpus=0, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            Path(out_file).write_text(json.dumps(run(plan, Path(folder))))
    finally:
        tq.close()
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
