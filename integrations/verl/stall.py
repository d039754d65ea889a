"""The feature ``stall`` on verl: which functions of verl are stages of a training step, and which are waits."""

from types import FrameType
from typing import Any

from rl_accel.integrations.ray.stall_watch import stall_switch
from rl_accel.patches.verl import config_intake
from rl_accel.telemetry.stall import Place, text_of

_V1 = "verl.trainer.ppo.v1"
_LOOP = "verl.experimental.agent_loop"
_AGENT_LOOP_LIMIT = "rl_accel.tail_batching.agent_loop_limit"
_REWARD_LIMIT = "rl_accel.reward_timeout"
_STAGES = {
    "fit": "the rest",
    "_compute_reward_colocate": "reward",
    "_balance_batch": "balance_batch",
    "_compute_old_log_prob": "old_log_prob",
    "_compute_ref_log_prob": "ref",
    "_compute_values": "values",
    "_compute_advantage": "adv",
    "_update_critic": "update_critic",
    "_update_actor": "update_actor",
    "_save_checkpoint": "save_checkpoint",
    "_validate": "testing",
    "_fetch_one_gen_batch": "data loader",
}


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


def _awaited_responses(frame: FrameType) -> str:
    return str(frame.f_locals["self"]._waits_for())


def _function(frame: FrameType) -> str:
    return frame.f_code.co_name


def _stages(cls: str) -> dict[str, Place]:
    return {f"{cls}.{method}": Place(stage, step=_step) for method, stage in _STAGES.items()}


_START = {"TaskRunnerV1.run": Place("start", step=_step), "TaskRunner.run": Place("start", step=_step)}

PLACES = {
    **dict.fromkeys(("__main__", "verl.trainer.main_ppo", "verl.trainer.main_ppo_v0"), _START),
    f"{_V1}.trainer_base": _stages("PPOTrainer"),
    "verl.trainer.ppo.ray_trainer": _stages("RayPPOTrainer"),
    f"{_V1}.trainer_sync": {
        "PPOTrainerSync.on_sample_end": Place("sleep of the replicas", step=_step),
        "PPOTrainerSync.on_step_end": Place("update_weights", step=_step),
    },
    f"{_V1}.replay_buffer": {
        "ReplayBuffer.sample": Place("gen", _awaited_prompts, _step),
        "ReplayBufferAsync.sample": Place("gen", _awaited_prompts, _step),
    },
    "rl_accel.rollout.round_driver": {"RolloutDriver.play": Place("gen", _awaited_responses, _step)},
    "transfer_queue.interface": {"*": Place("TransferQueue", _function)},
    "torch.distributed.distributed_c10d": {"*": Place("collective", _function)},
    f"{_LOOP}.agent_loop": {
        "AgentLoopManager.generate_sequences": Place("gen", step=_step),
        "AgentLoopWorker._run_agent_loop": Place(
            "agent loop",
            text_of("prompt {kwargs[uid]} row {kwargs[index]} response {kwargs[session_id]}"),
            flag=_AGENT_LOOP_LIMIT,
        ),
        "AgentLoopWorker._compute_score": Place("reward", flag=_REWARD_LIMIT),
    },
    f"{_LOOP}.tool_agent_loop": {
        "ToolAgentLoop._call_tool": Place(
            "tool", text_of("{tool_call.name} for request {agent_data.request_id}"), flag=_AGENT_LOOP_LIMIT
        )
    },
    "verl.workers.rollout.llm_server": {
        "LLMServerClient.generate": Place("generation", text_of("replica {server_id} request {request_id}"))
    },
    "verl.experimental.reward_loop.reward_loop": {
        "RewardLoopWorker.compute_score": Place(
            "grader", text_of("prompt {data.non_tensor_batch[uid][0]}"), flag=_REWARD_LIMIT
        )
    },
}


def _folder() -> Any:
    trainer = config_intake.trainer()
    return trainer and trainer.config.trainer.default_local_dir


# verl imports the module of the target before plug-ins, in each of its processes
SWITCHES = (stall_switch("verl.stall", "verl.protocol:DataProto", PLACES, _folder),)
