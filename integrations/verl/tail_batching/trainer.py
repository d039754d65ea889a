"""Trainer mode ``tail_batching``: verl's sync trainer, fed by rounds of tail batching."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData, NonTensorStack
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from rl_accel.integrations.verl.engines import engine_of
from rl_accel.integrations.verl.tail_batching.actors import RolloutServers, Stored, Workers, varies
from rl_accel.integrations.verl.tail_batching.client import TailLLMServerClient
from rl_accel.integrations.verl.tail_batching.run import check_data, run_of
from rl_accel.rollout import saved
from rl_accel.rollout.driver import METRICS_PREFIX, PromptSupply, RolloutDriver
from rl_accel.rollout.tail_batching import TailBatching

logger = logging.getLogger("rl_accel")


class TailReplayBuffer:
    """What the trainer samples from: rounds for training, verl's own buffer for validation and everything else."""

    def __init__(self, stock: Any, play: Any) -> None:
        self._stock = stock
        self._play = play

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, float]]:
        """Return the trajectories of exactly P0 x R0 responses and the numbers of their round; see verl's ``ReplayBuffer``."""
        batch: tuple[KVBatchMeta, dict[str, float]]
        if partition_id == "train":
            batch = self._play(global_steps)
        else:
            batch = self._stock.sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


class TailBatchingTrainer(PPOTrainerSync):
    """Strictly on-policy like its base; it differs in where a batch comes from and in what a checkpoint holds."""

    def _build_replay_buffer(self) -> TailReplayBuffer:
        # verl's constructor calls this first. By any other name than "sync" the base class would buffer for asynchronous
        # training, keep prompts in TransferQueue, and save and restore what is in it, which after a resume would be ghosts.
        # What tail batching needs of the other modes, single prompts from the data loader, wiring sets itself.
        self.trainer_mode = "sync"
        return TailReplayBuffer(super()._build_replay_buffer(), self._play)

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        run = run_of(self.config, data_id=self._data_id())
        rows = len(self.train_dataloader)
        check_data(run, rows, getattr(self.train_dataset, "dataframe", None))
        self._core = TailBatching(run)
        self._supply = PromptSupply(run, lambda: row_of(self._fetch_one_gen_batch()), rows, run.flags.domain_key)
        self._log = saved.SettlementLog(Path(self.config.trainer.default_local_dir))
        self._last_step = min(self.total_training_steps, self.steps_per_epoch * self.config.trainer.total_epochs)

    def _data_id(self) -> str:
        data = self.config.data
        files = [data.train_files] if isinstance(data.train_files, str) else data.train_files
        names = [os.path.basename(name) for name in files]
        return f"{names} {len(self.train_dataset)} shuffle={data.get('shuffle')} seed={data.get('seed')}"

    def get_llm_client(self) -> TailLLMServerClient:
        """Get the client for rollout generation, one that stops what is cancelled."""
        client: TailLLMServerClient = self.llm_server_manager.get_client(client_cls=TailLLMServerClient)
        return client

    def fit(self, agent_loop_manager: Any) -> None:
        """Train; see the base class. The workers of ``agent_loop_manager`` must be able to cancel."""
        self._servers = RolloutServers(self.llm_server_manager, engine_of(self.config))
        workers = Workers(agent_loop_manager.agent_loop_workers, self._servers)
        self._driver = RolloutDriver(self._core, self._supply, workers, clear, varies)
        super().fit(agent_loop_manager)
        left = len(self._supply.payloads)
        if left:
            logger.warning(
                "rl-accel: %d prompts that were taken from the data are not trained; checkpoints hold them", left
            )

    def prepare_step(self) -> dict[str, Any]:
        """Submit nothing: a round takes its prompts as it needs them."""
        return {}

    def _play(self, step: int) -> tuple[KVBatchMeta, dict[str, float]]:
        result = self._driver.play(step, max(self._last_step - step + 1, 1))
        stored = (tq.kv_list("train") or {}).get("train", {})
        keys = [key for response in result.results for key in response.keys]
        ghosts = sorted(set(stored) - set(keys))
        if ghosts:
            logger.error(
                "rl-accel: %d keys of cancelled responses were left behind, the first is %s", len(ghosts), ghosts[0]
            )
            tq.kv_clear(keys=ghosts, partition_id="train")
        self._log.add(step, result)
        meta = KVBatchMeta(partition_id="train", keys=keys, tags=[stored[key] for key in keys])
        return meta, result.metrics() | {f"{METRICS_PREFIX}ghost_keys": float(len(ghosts))}

    def on_sample_end(self) -> None:
        self._servers.reach_all(super().on_sample_end)

    def on_step_end(self) -> None:
        self._servers.reach_all(super().on_step_end)
        self._servers.resume()

    # Checkpoints

    def _save_checkpoint(self) -> None:
        # Ours first: the base class ends with the file that makes the checkpoint the one to resume from.
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}" / saved.FOLDER
        saved.save(folder, self.global_steps, self._core.state_dict(), self._supply.fetched, self._supply.payloads)
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        step = self.global_steps
        if step:
            trainer = self.config.trainer
            by_path = trainer.resume_mode == "resume_path"
            folder = Path(trainer.resume_from_path if by_path else f"{trainer.default_local_dir}/global_step_{step}")
            saved.restore(folder / saved.FOLDER, step, self._core, self._supply)
        self._log.rewind(step)


def clear(results: Sequence[Stored]) -> None:
    """Remove the trajectories of responses from TransferQueue."""
    tq.kv_clear(keys=[key for result in results for key in result.keys], partition_id="train")


def row_of(batch: TensorDict) -> dict[str, Any]:
    """Return the only row of ``batch`` as the plain dict an agent loop is called with.

    Raises:
        ValueError: there is not exactly one row.
        TypeError: a column is neither a tensor nor non-tensor data.
    """
    if len(batch) != 1:
        raise ValueError(f"data.gen_batch_size must be 1 for tail batching, found a batch of {len(batch)} prompts")
    row: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            row[key] = value[0].clone()
        elif isinstance(value, NonTensorStack):
            row[key] = value[0].data
        elif isinstance(value, NonTensorData):
            row[key] = value.data
        else:
            raise TypeError(f"column {key} must be a tensor or non-tensor data, found {type(value).__name__}")
    return row
