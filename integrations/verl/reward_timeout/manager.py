"""The reward manager that verl loads. It holds the one that was configured, whose function it makes killable."""

import inspect
import os
from typing import Any

import numpy as np
import ray
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.experimental.reward_loop.reward_manager.limited import RateLimitedRewardManager
from verl.protocol import DataProto
from verl.utils.import_utils import load_extern_object

from rl_accel.errors import ConfigError
from rl_accel.integrations.ray.reward_anchors import StoreClient
from rl_accel.integrations.verl.reward_timeout import MANAGER, VALIDATION
from rl_accel.integrations.verl.reward_timeout.functions import Call
from rl_accel.integrations.verl.reward_timeout.scoring import CALL, Scorer, prompt_key
from rl_accel.integrations.verl.reward_timeout.wiring import Wired, wired
from rl_accel.integrations.verl.reward_worker_proxy import SUCCESSOR
from rl_accel.reward.anchor_store import Replica


class RewardTimeoutManager(RewardManagerBase):
    """Scores as the configured manager does, with a time limit for each execution; see :class:`Scorer`.

    The configured manager (naive, dapo, gdpo, rate_limited, or a class of the user's) does all but the scoring itself. ``remote``,
    which runs the function in other processes, is replaced by ``naive``: ours does so too. ``rate_limited`` keeps its rates and
    loses its own fixed ``reward.timeout``.

    Raises:
        ConfigError: the held manager is one of the user's and does not await a coroutine function.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        ours = wired(config)
        replica = Replica(ours.settings)
        # Outside a Ray job there is nobody to share with, and asking would start one.
        self._store_client = StoreClient(replica, ours.anchors) if ray.is_initialized() else None
        if SUCCESSOR in (_actor_name() or ""):
            replica.count("reward_workers_lost")
        slots = ours.flags.workers or share_of_cores(config.reward.num_workers)
        self.scorer = Scorer(compute_score, config, ours, replica, slots)
        original = config.copy()
        manager = original.reward.reward_manager
        manager.source, manager.name, manager.module.path = ours.source, ours.name, ours.path
        self.held = held_class(ours)(
            config=original,
            tokenizer=tokenizer,
            compute_score=self.scorer.score,
            reward_router_address=reward_router_address,
            reward_model_tokenizer=reward_model_tokenizer,
        )
        if getattr(self.held, "is_async_reward_score", True) is False:
            _refuse(ours)
        if isinstance(self.held, RateLimitedRewardManager):
            self.held.timeout = None  # asyncio.wait_for without a limit

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score the last response of ``data``; the contract is the base class's. Cancelling this kills what runs."""
        columns = data.non_tensor_batch
        validation = columns.pop(VALIDATION, np.array([False]))
        row = {
            name: columns[name][-1]
            for name in ("data_source", "reward_model", "raw_prompt", "extra_info")
            if name in columns
        }
        truth = (row.get("reward_model") or {}).get("ground_truth")
        key = prompt_key(row.get("data_source"), truth, row.get("raw_prompt"), row.get("extra_info"))
        CALL.set(Call(key, teach=not bool(validation[-1])))
        self._share()
        try:
            result = await self.held.run_single(data)
        finally:
            self._share()
        if inspect.iscoroutine(result["reward_score"]):
            result["reward_score"].close()
            _refuse(wired(self.config))
        return result

    def _share(self) -> None:
        if self._store_client is not None:
            self._store_client.use()


def _actor_name() -> str | None:
    name: str | None = ray.get_runtime_context().get_actor_name() if ray.is_initialized() else None
    return name


def held_class(ours: Wired) -> type[RewardManagerBase]:
    """Return the class of the manager that was configured."""
    if ours.source == "importlib":
        found: Any = load_extern_object(module_path=ours.path, object_name=ours.name)
    else:
        found = get_reward_manager_cls("naive" if ours.name == "remote" else ours.name)
    return found


def share_of_cores(reward_workers: int) -> int:
    """Return how many executions one of ``reward_workers`` may run at once: verl spreads them evenly over the nodes."""
    cores = len(os.sched_getaffinity(0))
    nodes = 1
    if ray.is_initialized():
        nodes = sum(1 for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0)
    return max(1, cores // max(1, -(-reward_workers // max(nodes, 1))))


def _refuse(ours: Wired) -> None:
    raise ConfigError(
        f"rl_accel.reward_timeout wants a reward manager that awaits its compute_score if it is a coroutine function, "
        f"as verl's do; found {ours.name} of {ours.path or 'verl'}, now held by {MANAGER}"
    )
