"""The feature ``stall`` on verl: which functions of verl are stages of a training step, and which are waits."""

from types import FrameType

from rl_accel.integrations.ray.stall import START, Place, stall_switch
from rl_accel.patches.verl import config_intake

_V1 = "verl.trainer.ppo.v1"
_LOOP = "verl.experimental.agent_loop"
_RESPONSE = "prompt {kwargs[uid]} row {kwargs[index]} response {kwargs[session_id]}"
_LIMITED_LOOP = " (rl_accel.tail_batching.agent_loop_limit limits it)"
_LIMITED_REWARD = " (rl_accel.reward_timeout limits it)"
_STAGES = (
    "fit _compute_reward_colocate _balance_batch _compute_old_log_prob _compute_ref_log_prob _compute_values "
    "_compute_advantage _update_critic _update_actor _save_checkpoint _validate"
)


def _step(_frame: FrameType) -> int:
    return int(getattr(config_intake.trainer(), "global_steps", 0))


def _awaited_prompts(frame: FrameType) -> str:
    buffer = frame.f_locals["self"]
    partition = frame.f_locals["partition_id"]
    # verl's dictionaries would add the key of a partition that is read with brackets
    awaited = sorted({*buffer.pending_keys.get(partition, ()), *buffer.running_keys.get(partition, ())})
    done = {*buffer.finished_keys.get(partition, ()), *buffer.failure_keys.get(partition, ())}
    count = len(awaited) + len(done)
    return f"{len(awaited)} of {count} prompts of {partition} are awaited: {', '.join(awaited[:5])}"


def _stages(cls: str, methods: str) -> dict[str, Place]:
    return {f"{cls}.{method}": Place(method.strip("_"), step=_step) for method in methods.split()}


_START = {f"{runner}.run": Place(START, step=_step) for runner in ("TaskRunnerV1", "TaskRunner")}
_SAMPLE = Place("gen", _awaited_prompts, _step)
PLACES = {
    **dict.fromkeys(("__main__", "verl.trainer.main_ppo", "verl.trainer.main_ppo_v0"), _START),
    f"{_V1}.trainer_base": _stages("PPOTrainer", _STAGES),
    "verl.trainer.ppo.ray_trainer": _stages("RayPPOTrainer", _STAGES),
    "verl.checkpoint_engine.base": _stages("CheckpointEngineManager", "update_weights sleep_replicas"),
    f"{_V1}.replay_buffer": {"ReplayBuffer.sample": _SAMPLE, "ReplayBufferAsync.sample": _SAMPLE},
    "rl_accel.rollout.round_driver": {
        "RolloutDriver.play": Place("gen", lambda frame: str(frame.f_locals["self"]._waits_for()), _step)
    },
    "torchdata.stateful_dataloader.stateful_dataloader": {"*": Place("data loader")},
    "transfer_queue.interface": {"*": Place("TransferQueue")},
    "torch.distributed.distributed_c10d": {"*": Place("collective")},
    f"{_LOOP}.agent_loop": {
        "AgentLoopManager.generate_sequences": Place("gen", step=_step),
        "AgentLoopWorker._run_agent_loop": Place("agent loop", _RESPONSE + _LIMITED_LOOP),
        "AgentLoopWorker._compute_score": Place("reward", "its reward" + _LIMITED_REWARD),
    },
    f"{_LOOP}.tool_agent_loop": {"ToolAgentLoop._call_tool": Place("tool", "{tool_call.name}")},
    "verl.workers.rollout.llm_server": {
        "LLMServerClient.generate": Place("generation", "replica {server_id} request {request_id}")
    },
    "verl.experimental.reward_loop.reward_loop": {
        "RewardLoopWorker.compute_score": Place("grader", "prompt {data.non_tensor_batch[uid][0]}" + _LIMITED_REWARD)
    },
}

# verl imports the module of the target before plug-ins, in each of its processes
SWITCHES = (stall_switch("verl.stall", "verl.protocol:DataProto", PLACES),)
