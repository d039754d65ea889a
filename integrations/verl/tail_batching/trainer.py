"""verl's trainer mode ``tail_batching``: the sync trainer, with batches from tail-batching rounds.

Such a round is a rollout that ends with the first prompts to complete. The other prompts run again in a later round.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from rl_accel.errors import RlAccelError
from rl_accel.features import TAIL_BATCHING
from rl_accel.integrations.verl.engines import engine_of
from rl_accel.integrations.verl.tail_batching import (
    check_data,
    check_row,
    draws_other_rows,
    filter_limit,
    rows_advice,
    rows_of,
    run_of,
)
from rl_accel.integrations.verl.tail_batching.messages import StoredKeys
from rl_accel.integrations.verl.tail_batching.trainer_servers import RolloutServers
from rl_accel.integrations.verl.tail_batching.trainer_workers import KEY_PREFIX, Workers
from rl_accel.integrations.verl.tail_batching.worker_servers import TailLLMServerClient
from rl_accel.patches.verl import config_intake
from rl_accel.patches.verl.interfaces import AgentLoopManager, ReplayBuffer, SyncTrainer, TransferQueue
from rl_accel.rollout import saved
from rl_accel.rollout.round_driver import METRICS_PREFIX, PromptSupply, RolloutDriver
from rl_accel.rollout.tail_batching import TailBatching
from rl_accel.runtime import RUNTIME

if TYPE_CHECKING:
    tq: TransferQueue
    PPOTrainerSync = SyncTrainer
else:
    import transfer_queue as tq
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

logger = logging.getLogger("rl_accel")


def require_own_queue() -> None:
    """Refuses a run that would share another job's TransferQueue, because the queue ends with that job.

    Disconnects a refused run from the queue, so that verl does not close the queue at the end of the run.

    Raises:
        RlAccelError: TransferQueue's controller belongs to another job of the Ray cluster.
    """
    controller = tq.interface._TQ_CONTROLLER
    if controller is not None and controller._actor_id.job_id.hex() != ray.get_runtime_context().get_job_id():
        tq.interface._TQ_CONTROLLER = None
        raise RlAccelError(
            "rl_accel.tail_batching: TransferQueue belongs to another job of this Ray cluster, and ends with that job. Give each"
            " job a cluster of its own"
        )


class TailBatchingTrainer(PPOTrainerSync):
    """verl's sync trainer, with batches from tail-batching rounds. Checkpoints include the state of the rounds."""

    def _build_replay_buffer(self) -> ReplayBuffer:
        # verl's constructor calls this method first. With another mode than "sync", the base class would use its buffer for
        # asynchronous training and keep prompts in TransferQueue. It would also save and restore TransferQueue, whose entries
        # would be stale after a resume. Tail batching needs one setting of those modes, which the wiring sets: a data loader
        # of single prompts.
        require_own_queue()
        self.trainer_mode = "sync"
        buffer = super()._build_replay_buffer()
        sample = buffer.sample

        def sample_rounds(global_steps: int, partition_id: str, batch_size: int) -> Any:
            if partition_id == "train":
                return self._play(global_steps)
            return sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)

        buffer.sample = sample_rounds  # type: ignore[method-assign]
        return buffer

    def _init_dataloader(self) -> None:
        data = self.config.data
        if draws_other_rows(self.config):
            logger.warning(
                "rl-accel: tail_batching: checkpoints of this run cannot be resumed: without data.seed, each start draws "
                "other data.train_max_samples rows"
            )
        super()._init_dataloader()
        rows = len(self.train_dataloader)
        files = [data.train_files] if isinstance(data.train_files, str) else data.train_files
        names = [os.path.basename(name) for name in files]
        data_id = f"{names} {len(self.train_dataset)} shuffle={data.get('shuffle')} seed={data.get('seed')}"
        frame = getattr(self.train_dataset, "dataframe", None)
        run = run_of(self.config, RUNTIME.flags_of(TAIL_BATCHING), data_id, saved.rows_digest(rows_of(frame)))
        check_data(run, rows, frame)
        self._core = TailBatching(run)
        self._supply = PromptSupply(self._fetch_row, rows)
        self._log = saved.Ledger(Path(self.config.trainer.default_local_dir))
        self._last_step = min(self.total_training_steps, self.steps_per_epoch * self.config.trainer.total_epochs)

    def _fetch_row(self) -> dict[str, Any]:
        """Returns the next data row as keyword arguments for an agent loop."""
        row: dict[str, Any] = self._fetch_one_gen_batch()[0].clone().to_dict()
        check_row(self._core.run, row)
        if not self._supply.fetched:
            saved.packed(row)  # refuses rows that cannot be saved now, not at the first checkpoint
        return row

    def get_llm_client(self) -> TailLLMServerClient:
        """Returns the agent loops' client of the rollout servers, which stops requests of cancelled tasks."""
        client: TailLLMServerClient = self.llm_server_manager.get_client(client_cls=TailLLMServerClient)
        return client

    def fit(self, agent_loop_manager: AgentLoopManager) -> None:
        """Trains. The workers of ``agent_loop_manager`` must have the mixin ``TailAgentLoopWorker``.

        Raises:
            RlAccelError: another job of the Ray cluster has entries in TransferQueue's partition ``train``.
        """
        if foreign := len(_stored_tags()):
            raise RlAccelError(
                f"rl_accel.tail_batching: another job of this Ray cluster has {foreign} entries in TransferQueue's partition"
                " 'train', which all jobs of a cluster share. Give each job a cluster of its own"
            )
        workers = Workers(agent_loop_manager.agent_loop_workers, self._servers)
        self._driver = RolloutDriver(
            self._core,
            self._supply,
            workers,
            clear,
            varies,
            filter_limit=filter_limit(self.config),
        )
        super().fit(agent_loop_manager)
        workers.wait_for_cleanup()
        if untrained := len(self._supply.payloads):
            logger.warning("rl-accel: %d prompts taken from the data are not trained; checkpoints hold them", untrained)

    def prepare_step(self) -> dict[str, Any]:
        """Returns {} and submits no prompts, because each round fetches its prompts itself."""
        return {}

    def begin_early(self, step: int) -> None:
        """Begins the round of training step ``step`` while a validation runs (feature ``overlap_validation``)."""
        self._driver.begin_early(step, self._steps_left(step))

    def _steps_left(self, step: int) -> int:
        return int(max(self._last_step - step + 1, 1))

    def _play(self, step: int) -> tuple[Any, dict[str, float]]:
        result = self._driver.play(step, self._steps_left(step))
        stored = _stored_tags()
        keys = [key for response in result.results for key in response.keys]
        ghosts = sorted(key for key in stored.keys() - set(keys) if key.startswith(KEY_PREFIX))
        if ghosts:
            logger.error(
                "rl-accel: %d keys of cancelled responses were left behind, the first is %s", len(ghosts), ghosts[0]
            )
            tq.kv_clear(keys=ghosts, partition_id="train")
        self._log.add(step, result)
        meta = tq.KVBatchMeta(partition_id="train", keys=keys, tags=[stored[key] for key in keys])
        return meta, result.metrics() | {f"{METRICS_PREFIX}ghost_keys": float(len(ghosts))}

    def on_init_end(self) -> None:
        self._servers = RolloutServers(self.llm_server_manager, engine_of(self.config))
        self._servers.update_weights(super().on_init_end)

    def on_sample_end(self) -> None:
        self._servers.reach_all(super().on_sample_end)

    def on_step_end(self) -> None:
        self._servers.update_weights(super().on_step_end)
        self._servers.resume()

    # Checkpoints

    def _save_checkpoint(self) -> None:
        # Tail batching is saved first, because the last file of the base class marks the checkpoint as the one to resume from.
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}" / saved.FOLDER
        saved.save(folder, self.global_steps, self._core.state_dict(), self._supply.fetched, self._supply.payloads)
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if folder := config_intake.resumed_checkpoint(self):
            if not (position := folder / "data.pt").exists():  # verl would begin the data anew
                raise saved.ResumeError(
                    f"{position} is missing, so the position in the data is unknown. {saved.OTHER_CHECKPOINT}"
                )
            saved.restore(folder / saved.FOLDER, self.global_steps, self._core, self._supply, rows_advice(self.config))
        self._log.rewind(self.global_steps)


def _stored_tags() -> dict[str, Any]:
    """Returns the tags (metadata) of all entries in TransferQueue's partition ``train``, other jobs' included, by key."""
    stored: dict[str, Any] = (tq.kv_list("train") or {}).get("train", {})
    return stored


def clear(results: Sequence[StoredKeys]) -> None:
    """Removes the trajectories of the responses ``results`` from TransferQueue."""
    tq.kv_clear(keys=[key for result in results for key in result.keys], partition_id="train")


def varies(prompt_id: str, group: Sequence[StoredKeys]) -> bool:
    """Returns True if ``group``, a prompt's responses, passes the group filter: the metrics differ, or there is one response only.

    This is the rule of verl's ``_dapo_filtered_keys``.

    Raises:
        RuntimeError: a response of ``group`` has no metric.
    """
    values = [stored.metric for stored in group if stored.metric is not None]
    if len(values) < len(group):
        raise RuntimeError(
            "algorithm.filter_groups.metric must name a metric that the reward function returns; the responses of "
            f"prompt {prompt_id} came without it"
        )
    return len(values) < 2 or float(np.std(values)) != 0.0
