"""What our function that logs a rollout holds on to in slime, and with it tp_replan. Nothing is replaced: slime's flags name it."""

from collections.abc import Mapping

from rl_accel.patches.slime.seam_check import SeamCheck

LOG_FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "slime.observability.rollout_metrics:log_rollout_data": (
        "rollout_id",
        "args",
        "samples",
        "rollout_extra_metrics",
        "rollout_time",
    ),
    "slime.observability.logging_utils:log": ("args", "metrics", "step_key"),
    "slime.observability.metric_utils:compute_rollout_step": ("args", "rollout_id"),
}
"""Parameters by function, ``*args`` and ``**kwargs`` left out: of every feature that logs."""
FUNCTIONS = {
    **LOG_FUNCTIONS,
    "slime.observability.rollout_metrics:log_eval_rollout_data": ("rollout_id", "args", "data", "extra_metrics"),
}
SAMPLE_FIELDS = ("response_length",)
FLAGS = (
    "custom_rollout_log_function_path",
    "custom_eval_rollout_log_function_path",
    "rollout_num_gpus",
    "rollout_num_gpus_per_engine",
    "num_gpus_per_node",
)
PATCHES = (
    SeamCheck(
        "slime.tp_replan",
        "tp_replan",
        "slime.observability.rollout_metrics:log_rollout_data",
        FUNCTIONS,
        SAMPLE_FIELDS,
    ),
)
