"""What reward_timeout holds on to in slime. It replaces nothing: slime's flags name our functions."""

from collections.abc import Mapping

from rl_accel.patches.slime.rollout_log_seams import LOG_FUNCTIONS
from rl_accel.patches.slime.seam_check import SeamCheck

FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "slime.rollout.rm_hub:async_rm": ("args", "sample"),
    "slime.rollout.rm_hub:batched_async_rm": ("args", "samples"),
    "slime.rollout.sglang_rollout:generate_and_rm": ("args", "sample", "sampling_params", "evaluation"),
    "slime.rollout.sample_hooks:apply_rollout_sample_hooks": ("args", "value"),
    **LOG_FUNCTIONS,
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
