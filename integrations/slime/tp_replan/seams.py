"""What tp_replan needs of slime, checked before it is used. It replaces nothing: slime's arguments name our functions."""

from rl_accel.integrations.slime.rollout_log import LOG_SEAMS
from rl_accel.patches.seams import SeamCheck

ARGUMENTS = (
    "custom_rollout_log_function_path",
    "custom_eval_rollout_log_function_path",
    "rollout_num_gpus",
    "rollout_num_gpus_per_engine",
    "num_gpus_per_node",
)

SWITCHES = (
    SeamCheck(
        name="slime.tp_replan",
        feature="tp_replan",
        target="slime.observability.rollout_metrics:log_rollout_data",
        seams={
            **LOG_SEAMS,
            "slime.observability.rollout_metrics:log_eval_rollout_data": (
                "rollout_id",
                "args",
                "data",
                "extra_metrics",
            ),
        },
        attributes={"slime.utils.types:Sample": ("response_length",)},
    ),
)
