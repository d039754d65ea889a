"""Protocol classes that declare all members of verl's objects that rl-accel calls, reads or overrides.

:mod:`rl_accel.patches.seams` compares these interfaces with the installed verl.
"""

from collections.abc import MutableMapping, Sequence
from typing import Any, Protocol

from rl_accel.patches.seams import interface_of, remote

# Rollout servers


@interface_of("verl.workers.rollout.replica:TokenOutput")
class TokenOutput(Protocol):
    token_ids: list[int]
    stop_reason: str | None


class RolloutServer(Protocol):
    """Ray actor handle of a rollout server. Not compared with the installed verl, because each engine has another server class."""

    __ray_call__: Any

    @remote
    def generate(self, /, **request: Any) -> TokenOutput: ...
    @remote
    def abort_request(self, request_id: str) -> dict[str, Any]: ...
    @remote
    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]: ...


@interface_of("verl.workers.rollout.replica:RolloutReplica")
class RolloutReplica(Protocol):
    replica_rank: int
    workers: list[Any]
    servers: list[RolloutServer]
    server_address: str
    server_handle: RolloutServer

    async def launch_servers(self) -> None: ...
    async def abort_all_requests(self) -> None: ...
    async def resume_generation(self) -> None: ...


@interface_of("verl.workers.rollout.llm_server:GlobalRequestLoadBalancer")
class LoadBalancer(Protocol):
    """Ray actor handle of verl's load balancer, which assigns requests to rollout servers."""

    @remote
    def get_all_servers(self) -> list[str]: ...
    @remote
    def add_servers(self, servers: dict[str, Any]) -> None: ...
    @remote
    def remove_servers(self, server_ids: list[str]) -> None: ...


@interface_of("verl.workers.rollout.router:GlobalRequestLoadBalancer")
class StickyRouter(Protocol):
    _inflight_requests: dict[str, int]
    _request_id_to_server: MutableMapping[str, str]

    def __init__(self, servers: dict[str, Any]) -> None: ...
    def acquire_server(self, request_id: str) -> tuple[str, Any]: ...
    def require_acquire_fields(self) -> list[str]: ...


@interface_of("verl.workers.rollout.llm_server:LLMServerClient")
class ObservedClient(Protocol):
    """Members of verl's rollout client (``LLMServerClient``) that rl-accel needs to observe requests."""

    _load_balancer: LoadBalancer

    async def _acquire_server(self, *args: Any, **kwargs: Any) -> tuple[str, Any]: ...


@interface_of("verl.workers.rollout.llm_server:LLMServerClient")
class LLMServerClient(ObservedClient, Protocol):
    config: Any

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]: ...
    def _release_server(self, server_id: str, request_id: str | None = None) -> None: ...


@interface_of("verl.workers.rollout.llm_server:LLMServerManager")
class LLMServerManager(Protocol):
    server_handles: list[RolloutServer]
    server_addresses: list[str]
    global_load_balancer: LoadBalancer

    def get_replicas(self) -> list[RolloutReplica]: ...
    def get_client(self, client_cls: Any) -> Any: ...


@interface_of("verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension")
class WorkerExtension(Protocol):
    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> Any: ...


# Agent loops and rewards


@interface_of("verl.experimental.agent_loop.agent_loop:AgentLoopOutput")
class AgentLoopOutput(Protocol):
    response_mask: list[int]
    metrics: Any
    reward_score: float | None
    extra_fields: dict[str, Any]


@interface_of("verl.experimental.reward_loop.reward_loop:RewardLoopWorker")
class RewardLoopWorker(Protocol):
    def __init__(self, config: Any, reward_router_address: str | None) -> None: ...
    @remote
    def compute_score(self, data: Any) -> dict[str, Any]: ...


@interface_of("verl.experimental.agent_loop.agent_loop:AgentLoopWorker")
class AgentLoopWorker(Protocol):
    """Members that verl's agent-loop worker has with every trainer. The V1 trainer uses the subclass ``AgentLoopWorkerTQ``."""

    config: Any
    llm_client: ObservedClient
    reward_loop_worker_handles: Sequence[RewardLoopWorker] | None

    async def _run_agent_loop(self, sampling_params: Any, trajectory: Any, **kwargs: Any) -> Any: ...
    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any: ...
    async def _compute_score(self, outputs: list[AgentLoopOutput], kwargs: dict[str, Any]) -> None: ...


@interface_of("verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ")
class AgentLoopWorkerTQ(AgentLoopWorker, Protocol):
    background_tasks: set[Any]

    async def _compute_teacher_logprobs(self, *args: Any, **kwargs: Any) -> None: ...


@interface_of("verl.trainer.ppo.v1.agent_loop_tq")
class AgentLoopTQ(Protocol):
    def apply_greedy_sampling_params(self, params: dict[str, Any]) -> None: ...


@interface_of("verl.experimental.agent_loop.agent_loop:AgentLoopManager")
class AgentLoopManager(Protocol):
    config: Any
    llm_client: ObservedClient
    agent_loop_workers: list[Any]
    agent_loop_workers_class: Any

    async def _init_agent_loop_workers(self) -> None: ...


@interface_of("verl.experimental.reward_loop.reward_manager.base:RewardManagerBase")
class RewardManagerBase(Protocol):
    config: Any
    compute_score: Any

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any) -> None: ...
    async def run_single(self, data: Any) -> Any: ...


@interface_of("verl.experimental.reward_loop.reward_manager.limited:RateLimitedRewardManager")
class RateLimitedRewardManager(RewardManagerBase, Protocol):
    timeout: float | None


# Trainers


@interface_of("transfer_queue.interface")
class TransferQueueInterface(Protocol):
    _TQ_CONTROLLER: Any


@interface_of("transfer_queue")
class TransferQueue(Protocol):
    KVBatchMeta: Any
    interface: TransferQueueInterface

    def kv_list(self, partition_id: str) -> dict[str, dict[str, Any]] | None: ...
    def kv_clear(self, keys: list[str], partition_id: str) -> None: ...


@interface_of("verl.trainer.ppo.v1.replay_buffer:ReplayBuffer")
class ReplayBuffer(Protocol):
    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any: ...


@interface_of("verl.checkpoint_engine.base:CheckpointEngineManager")
class CheckpointManager(Protocol):
    def sleep_replicas(self) -> None: ...
    def update_weights(self, global_steps: int) -> None: ...


@interface_of("verl.trainer.ppo.v1.trainer_base:PPOTrainer")
class Trainer(Protocol):
    """Members of verl's V1 trainer (``PPOTrainer``) that rl-accel uses and that exist in every mode."""

    config: Any
    global_steps: int
    total_training_steps: int
    steps_per_epoch: int
    llm_server_manager: LLMServerManager
    checkpoint_manager: CheckpointManager

    def _save_checkpoint(self) -> None: ...


@interface_of("verl.trainer.ppo.v1.trainer_sync:PPOTrainerSync")
class SyncTrainer(Trainer, Protocol):
    trainer_mode: str
    train_dataloader: Any
    train_dataset: Any

    def _build_replay_buffer(self) -> ReplayBuffer: ...
    def _init_dataloader(self) -> None: ...
    def _fetch_one_gen_batch(self) -> Any: ...
    def get_llm_client(self) -> Any: ...
    def fit(self, agent_loop_manager: AgentLoopManager) -> None: ...
    def prepare_step(self) -> dict[str, Any]: ...
    def on_init_end(self) -> None: ...
    def on_sample_end(self) -> None: ...
    def on_step_end(self) -> None: ...
    def _load_checkpoint(self) -> None: ...


_AGENT_LOOPS = (AgentLoopManager, AgentLoopWorker, RewardLoopWorker)

NEEDS: dict[str, tuple[Any, ...]] = {
    "tail_batching": (
        *_AGENT_LOOPS,
        AgentLoopWorkerTQ,
        AgentLoopOutput,
        AgentLoopTQ,
        CheckpointManager,
        LLMServerClient,
        LLMServerManager,
        LoadBalancer,
        ReplayBuffer,
        RolloutReplica,
        SyncTrainer,
        TokenOutput,
        TransferQueue,
        TransferQueueInterface,
    ),
    "reward_timeout": (*_AGENT_LOOPS, RewardManagerBase, RateLimitedRewardManager),
    "telemetry": (*_AGENT_LOOPS, AgentLoopWorkerTQ, ObservedClient),
    "tp_replan": (Trainer, LLMServerManager, RolloutReplica),
    "drafts": (Trainer, LLMServerManager, RolloutReplica, StickyRouter, WorkerExtension),
}
"""Interfaces of verl that the adapters of each feature use. They are compared with the installed verl before the feature starts."""
