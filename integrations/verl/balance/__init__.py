"""Balanced rollouts on verl: ``+rl_accel.balance.enable=True`` with a trainer of mode ``sync``, or with tail batching.

A response waits until a rollout replica has a free slot, and may migrate to another replica later. :func:`wire` selects the actor
of module ``router`` in verl's ``router_config_path``, and adds :class:`BalancingWorker` to verl's agent-loop workers. The actor
carries out the instructions of :class:`~rl_accel.rollout.balance.Balance`. In the workers, module ``client`` talks to the actor.
"""

import asyncio
import functools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_accel.errors import refuse
from rl_accel.features import BALANCE, DRAFTS, TAIL_BATCHING, BalanceFlags
from rl_accel.files import write_atomically
from rl_accel.integrations.verl import agent_loop
from rl_accel.integrations.verl.engines import engine_of
from rl_accel.patches.seams import step_observer
from rl_accel.patches.verl import config_intake
from rl_accel.patches.verl.interfaces import AgentLoopManager
from rl_accel.patches.verl.verl_run import ROLLOUT, ROUTER_KEY, VerlRun
from rl_accel.runtime import RUNTIME
from rl_accel.telemetry import metrics
from rl_accel.telemetry.server_counters import ANSWER_SECONDS

logger = logging.getLogger("rl_accel")

ROUTER = Path(__file__).with_name("router.yaml")
LENGTHS = "balance.json"
"""Name of the file in a checkpoint folder with response lengths, from which a resumed run predicts lengths."""
WORKER_PART = f"{__name__}.BalancingWorker"
_FLAG = "rl_accel.balance"
_refuse = functools.partial(refuse, _FLAG)


def wire(run: VerlRun, flags: BalanceFlags) -> None:
    """Selects rl-accel's router and :class:`BalancingWorker` in the configuration of the verl run ``run``. Idempotent.

    Raises ConfigError if a setting conflicts with balanced rollouts.
    """
    if run.get(ROUTER_KEY, "") not in ("", str(ROUTER)):
        _refuse(ROUTER_KEY, None, run.get(ROUTER_KEY), "there is one router")
    for key in (f"{ROLLOUT}.full_determinism", f"{ROLLOUT}.disaggregation.enabled"):
        run.require_off(_FLAG, key, "it has a routing of its own")
    if not flags.slots and run.get(f"{ROLLOUT}.max_num_seqs", 0) < 1:
        _refuse(f"{ROLLOUT}.max_num_seqs", "at least 1", run.get(f"{ROLLOUT}.max_num_seqs"))
    agent_loop.check(run, _FLAG, "responses must be generated through our client")
    run.set(ROUTER_KEY, str(ROUTER))
    agent_loop.choose(run, WORKER_PART)


class BalancingWorker(agent_loop.WorkerPart):
    """Mixin of verl's agent-loop workers that replaces their load balancer by ``client.Servers``, so that responses can migrate."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        import ray

        from rl_accel.integrations.verl.balance.client import Servers

        handle = ray.get_runtime_context().current_actor
        client: Any = self.llm_client
        client._load_balancer = Servers(client._load_balancer, self.config, handle)

    async def stay_alive(self) -> None:
        """Never returns. The router awaits this call to learn of the death of this worker, which makes the call fail."""
        await asyncio.Event().wait()

    @classmethod
    def attach(cls, manager: AgentLoopManager) -> None:
        """Sets up the router actor, with the response lengths of a resumed run, and starts logging the router's metrics."""
        import ray

        flags, config = RUNTIME.flags(), manager.config
        ordered, together = flags.requested(TAIL_BATCHING) == "off", flags.requested(DRAFTS) != "off"
        rollout = config.actor_rollout_ref.rollout
        slots = flags[BALANCE].slots or rollout.max_num_seqs * rollout.get("data_parallel_size", 1)
        router: Any = manager.llm_client._load_balancer
        engine = engine_of(config)
        resumed = config_intake.resumed_checkpoint(config_intake.trainer())
        file = resumed / LENGTHS if resumed else None
        lengths = json.loads(file.read_text()) if file and file.is_file() else {}
        caches = ray.get(router.set_up.remote(engine, lengths, slots, flags[BALANCE], ordered, together))
        words = "rl-accel: balance: replicas of %d slots, with caches of tokens (None: unknown or without limit): %s%s"
        logger.info(words, slots, caches, "" if engine.stop else "; this engine cannot move responses")
        metrics.set_observer("balance", BalanceObserver(router, Path(config.trainer.default_local_dir)))


class BalanceObserver:
    """Observer that adds the router's metrics to the log of each step, and response lengths to verl's checkpoints in ``folder``."""

    def __init__(self, router: Any, folder: Path) -> None:
        self._router, self._folder = router, folder

    def __call__(self, step: int, logged: Mapping[str, Any]) -> dict[str, float]:
        """Returns the router's metrics ``balance/<name>``; {} if verl logs something other than a training step.

        ``logged`` are the metrics that verl logs in step ``step``, by name. Raises an error of Ray if the router does not answer.
        """
        import ray

        if "timing_s/gen" not in logged:
            return {}
        if (checkpoint := self._folder / f"global_step_{step}").is_dir():
            lengths = ray.get(self._router.lengths.remote(), timeout=ANSWER_SECONDS)
            write_atomically(checkpoint / LENGTHS, json.dumps(lengths))
        numbers = ray.get(self._router.take_numbers.remote(), timeout=ANSWER_SECONDS)
        return {f"balance/{name}": value for name, value in numbers.items()}


SWITCHES = (step_observer("balance", lambda _flags: lambda _step, _logged: {}),)  # attach() sets the observer
