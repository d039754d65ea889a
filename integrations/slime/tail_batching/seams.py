"""What tail batching needs of slime, checked before it is used."""

from rl_accel.patches.seams import SeamCheck

POSITION = ("sample_offset", "epoch_id", "sample_group_index", "sample_index", "metadata")
"""Attributes of ``RolloutDataSource`` that make up its place in the data."""

ARGUMENTS = (
    "rollout_function_path",
    "eval_function_path",
    "data_source_path",
    "custom_megatron_init_path",
    "custom_config_path",
    "rollout_batch_size",
    "n_samples_per_prompt",
    "over_sampling_batch_size",
    "partial_rollout",
    "buffer_filter_path",
    "dynamic_sampling_filter_path",
    "rollout_sample_filter_path",
    "rollout_all_samples_process_path",
    "custom_generate_function_path",
    "group_rm",
    "num_rollout",
    "num_epoch",
    "prompt_data",
    "rollout_shuffle",
    "rollout_seed",
)

SWITCHES = (
    SeamCheck(
        name="slime.tail_batching",
        feature="tail_batching",
        target="slime.rollout.sglang_rollout:generate_rollout",
        seams={
            "slime.rollout.sglang_rollout:generate": ("args", "sample", "sampling_params"),
            "slime.rollout.sglang_rollout:generate_and_rm": ("args", "sample", "sampling_params", "evaluation"),
            "slime.rollout.sglang_rollout:generate_rollout": ("args", "rollout_id", "data_source", "evaluation"),
            "slime.rollout.rm_hub:batched_async_rm": ("args", "samples"),
            "slime.rollout.filter_hub.base_types:call_dynamic_filter": ("fn",),
            "slime.rollout.filter_hub.base_types:should_drop_dynamic_filter_output": (
                "output",
                "remaining_batch_size",
                "target_data_size",
            ),
            "slime.backends.sglang_utils.server_control:num_requests_from_load": ("load",),
            "slime.utils.http_utils:post": ("url", "payload", "max_retries", "headers"),
            "slime.utils.http_utils:get": ("url",),
            "slime.utils.misc:load_function": ("path",),
            "slime.utils.async_utils:run": ("coro",),
            "slime.utils.async_utils:get_async_loop": (),
        },
        attributes={
            "slime.utils.types:Sample": (
                "group_index",
                "index",
                "prompt",
                "tokens",
                "response",
                "response_length",
                "reward",
                "metadata",
                "status",
                "session_id",
                "generate_function_path",
            ),
            "slime.utils.types:Sample.Status": ("PENDING", "COMPLETED", "TRUNCATED", "ABORTED", "FAILED"),
        },
    ),
)
