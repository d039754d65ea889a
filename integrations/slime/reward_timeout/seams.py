"""What reward_timeout needs of slime, checked before it is used. It replaces nothing: slime's arguments name our functions."""

from rl_accel.integrations.slime.rollout_log import LOG_SEAMS
from rl_accel.patches.seams import SeamCheck

ARGUMENTS = (
    "custom_rm_path",
    "rm_type",
    "group_rm",
    "reward_key",
    "eval_reward_key",
    "rollout_sample_hook_path",
    "custom_rollout_log_function_path",
)

SWITCHES = (
    SeamCheck(
        name="slime.reward_timeout",
        feature="reward_timeout",
        target="slime.rollout.sglang_rollout:generate_and_rm",
        seams={
            "slime.rollout.rm_hub:async_rm": ("args", "sample"),
            "slime.rollout.rm_hub:batched_async_rm": ("args", "samples"),
            "slime.rollout.sglang_rollout:generate_and_rm": ("args", "sample", "sampling_params", "evaluation"),
            "slime.rollout.sample_hooks:apply_rollout_sample_hooks": ("args", "value"),
            "slime.utils.misc:load_function": ("path",),
            **LOG_SEAMS,
        },
        attributes={
            "slime.utils.types:Sample": (
                "prompt",
                "response",
                "label",
                "metadata",
                "reward",
                "status",
                "custom_rm_path",
            )
        },
    ),
)
