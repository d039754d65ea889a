"""The feature ``stall`` on slime: rollouts, and what their responses wait for."""

from rl_accel.integrations.ray.stall_watch import stall_switch
from rl_accel.telemetry.stall import Place, text_of

_LIMIT = "rl_accel.reward_timeout"

PLACES = {
    "slime.ray.rollout": {
        "RolloutManager.generate": Place("rollout", step=lambda frame: frame.f_locals["rollout_id"]),
        "RolloutManager.eval": Place("evaluation", step=lambda frame: frame.f_locals["rollout_id"]),
    },
    "slime.rollout.sglang_rollout": {
        "generate_and_rm": Place("response", text_of("sample {sample.index} of group {sample.group_index}")),
        "generate": Place("generation", text_of("router {url}")),
    },
    "slime.rollout.rm_hub": {
        "async_rm": Place("reward", flag=_LIMIT),
        "batched_async_rm": Place("rewards of a group", flag=_LIMIT),
    },
}

SWITCHES = (stall_switch("slime.stall", "slime.utils.types:Sample", PLACES, lambda: None),)
