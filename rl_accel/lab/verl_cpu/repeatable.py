"""Patches that make two runs of one seed equal row by row, so that an A/B on a CPU compares training and not luck.

Stock verl names prompts by random uuids, lets an unseeded server draw the tokens and hands a batch to the trainer in the order
in which responses happened to finish. Here a response's seed comes from the run's seed, the step, the place of its prompt in
the order of submission and its session; and a batch is in the order of submission. Nothing is added to or taken from a batch.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

from rl_accel.lab.cpu_engine.sampling import derive_seed
from rl_accel.patches.patch import Patch


def _number_prompts(original: Callable[..., Any], _settings: Any) -> Callable[..., Any]:
    numbers = count()

    def generate_sequences(self: Any, prompts: Any) -> Any:
        if "priority" not in prompts:
            import torch

            # The column that verl's own V0 manager fills the same way; engines on a CPU do not schedule by it.
            prompts["priority"] = torch.tensor([next(numbers) for _ in range(len(prompts))], dtype=torch.int64)
        return original(self, prompts)

    return generate_sequences


def _seed_responses(original: Callable[..., Any], _settings: Any) -> Callable[..., Any]:
    async def _run_agent_loop(
        self: Any,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        *,
        agent_name: str,
        trace: bool = True,
        **kwargs: Any,
    ) -> Any:
        if "seed" not in sampling_params:
            prompt = int(kwargs["priority"]) if "priority" in kwargs else kwargs.get("uid")
            seed = derive_seed(
                self.config.actor_rollout_ref.rollout.seed,
                int(trajectory["step"]),
                bool(trajectory["validate"]),
                prompt,
                kwargs.get("session_id"),
            )
            sampling_params = {**sampling_params, "seed": seed % 2**63}
        return await original(self, sampling_params, trajectory, agent_name=agent_name, trace=trace, **kwargs)

    return _run_agent_loop


def _order_rows(original: Callable[..., Any], _settings: Any) -> Callable[..., Any]:
    def _materialize_batch(
        self: Any, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict[str, Any]]
    ) -> Any:
        submitted = {uid: place for place, uid in enumerate(self.prompt_global_steps[partition_id])}

        def place(key: str) -> tuple[int, int, int]:
            uid, session, index = key.rsplit("_", 2)
            return submitted.get(uid, len(submitted)), int(session), int(index)

        ordered = {key: partition_snapshot[key] for key in sorted(partition_snapshot, key=place)}
        return original(self, partition_id, selected_prompt_uids, ordered)

    return _materialize_batch


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="verl.cpu.prompt_numbers",
        feature="cpu",
        target="verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ.generate_sequences",
        supports="verl>=0.9.0",
        params=("self", "prompts"),
        make=_number_prompts,
        no_seam="agent_loop_manager_class takes one class, and a run may need it for its own",
    ),
    Patch(
        name="verl.cpu.response_seeds",
        feature="cpu",
        target="verl.experimental.agent_loop.agent_loop:AgentLoopWorker._run_agent_loop",
        supports="verl>=0.9.0",
        params=("self", "sampling_params", "trajectory", "agent_name", "trace", "kwargs"),
        make=_seed_responses,
        no_seam="a server is told neither which prompt of the batch nor which session a request is",
    ),
    Patch(
        name="verl.cpu.row_order",
        feature="cpu",
        target="verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._materialize_batch",
        supports="verl>=0.9.1",
        params=("self", "partition_id", "selected_prompt_uids", "partition_snapshot"),
        make=_order_rows,
        no_seam="custom_sampler takes one class, and a run may need it for its own",
    ),
)
