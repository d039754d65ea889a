"""What verl loads for ``rollout.name=hf_cpu``: the replica that starts server actors, and the trainer's side of weight updates."""

import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.utils import ensure_async_iterator

from rl_accel.lab.verl_cpu.server import CPURolloutServer


def server_name(replica_rank: int, role: str = "") -> str:
    """Return the name of the Ray actor that serves replica ``replica_rank``."""
    return f"hf_cpu_server_{role}{replica_rank}"


class CPURolloutReplica(RolloutReplica):
    """One server actor on the CPU, whatever the number of its ranks: the model is never split.

    A tensor-parallel size of n regroups: n ranks share one server, which has the key-value budget of all of them.
    """

    async def launch_servers(self) -> None:
        tp = self.config.tensor_model_parallel_size
        if self.world_size != tp:
            raise ValueError(
                "rollout.name=hf_cpu wants data_parallel_size and pipeline_model_parallel_size of 1, "
                f"found a product of {self.world_size // tp}"
            )
        role = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        name = server_name(self.replica_rank, role) + self.name_suffix
        server = (
            ray.remote(CPURolloutServer)
            .options(name=name, num_cpus=0, max_concurrency=self.max_concurrency)
            .remote(self.config, self.model_config, self.replica_rank)
        )
        self.servers = [server]  # before it is known to live: whoever ends this replica finds it
        self._server_handle = server
        self._server_address = name
        await server.get_stats.remote()


class CPUServerAdapter(BaseRollout):
    """Lives in the training worker; the first of a server's ranks hands the weights to it through Ray's object store."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.regroup(self.config.tensor_model_parallel_size)
        if replica_rank != -1:
            self.replica_rank = replica_rank

    def regroup(self, tp: int) -> None:
        """Serve one of the servers that ``tp`` ranks share each, from the next weight update on."""
        rank = int(os.environ.get("RANK", "0"))
        self.replica_rank, self.is_leader_rank = rank // tp, rank % tp == 0

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released. verl calls this before ranks gather the weights: to fail on a dead server here would leave the
        other ranks waiting for this one."""

    async def release(self) -> None:
        if self.is_leader_rank:
            await self._server().sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Iterator[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **_kwargs: Any,
    ) -> None:
        if wire_format != "named_tensors":
            raise ValueError(f"hf_cpu takes weights as named_tensors, found wire_format={wire_format!r}")
        if not self.is_leader_rank:
            async for _ in ensure_async_iterator(weights):  # every rank takes part in gathering them
                pass
            return
        # Copied: the trainer goes on changing its own tensors while the object store still refers to them.
        full = {name: tensor.detach().to("cpu", copy=True) async for name, tensor in ensure_async_iterator(weights)}
        await self._server().load_weights.remote(full, global_steps)

    def _server(self) -> Any:
        return ray.get_actor(server_name(self.replica_rank))
