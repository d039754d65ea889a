"""The feature ``stall`` on slime: rollouts, and what their responses wait for."""

from rl_accel.integrations.ray.stall import Place, stall_switch

_LIMITED = "rl_accel.reward_timeout limits it"

PLACES = {
    "slime.ray.rollout": {
        "RolloutManager.generate": Place("rollout", step=lambda frame: frame.f_locals["rollout_id"]),
        "RolloutManager.eval": Place("evaluation", step=lambda frame: frame.f_locals["rollout_id"]),
    },
    "slime.rollout.sglang_rollout": {
        "generate_and_rm": Place("response", "sample {sample.index} of group {sample.group_index}"),
        "generate": Place("generation", "router {url}"),
    },
    "slime.rollout.rm_hub": {
        "async_rm": Place("reward", _LIMITED),
        "batched_async_rm": Place("rewards of a group", _LIMITED),
    },
}

SWITCHES = (stall_switch("slime.stall", "slime.utils.types:Sample", PLACES),)
