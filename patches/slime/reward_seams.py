"""What reward_timeout holds on to in slime. It replaces nothing: slime's flags name our functions."""

from collections.abc import Mapping

from rl_accel.patches.slime.seam_check import SeamCheck

FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "slime.rollout.rm_hub:async_rm": ("args", "sample"),
    "slime.rollout.rm_hub:batched_async_rm": ("args", "samples"),
    "slime.rollout.sglang_rollout:generate_and_rm": ("args", "sample", "sampling_params", "evaluation"),
    "slime.rollout.sample_hooks:apply_rollout_sample_hooks": ("args", "value"),
    "slime.observability.rollout_metrics:log_rollout_data": (
        "rollout_id",
        "args",
        "samples",
        "rollout_extra_metrics",
        "rollout_time",
    ),
    "slime.observability.logging_utils:log": ("args", "metrics", "step_key"),
    "slime.observability.metric_utils:compute_rollout_step": ("args", "rollout_id"),
    "slime.utils.misc:load_function": ("path",),
}
"""Parameters by function, ``*args`` and ``**kwargs`` left out."""
SAMPLE_FIELDS = ("prompt", "response", "label", "metadata", "reward", "status", "custom_rm_path")
FLAGS = (
    "custom_rm_path",
    "rm_type",
    "group_rm",
    "reward_key",
    "eval_reward_key",
    "rollout_sample_hook_path",
    "custom_rollout_log_function_path",
)


PATCHES = (
    SeamCheck(
        "slime.reward_timeout",
        "reward_timeout",
        "slime.rollout.sglang_rollout:generate_and_rm",
        FUNCTIONS,
        SAMPLE_FIELDS,
    ),
)
