"""What tail batching needs of slime: its functions, checked before they are used, and what its arguments mean."""

import os
from typing import Any

from rl_accel.errors import ConfigError
from rl_accel.features import TailBatchingFlags
from rl_accel.integrations.slime.tail_batching import DATA_SOURCE, ROLLOUT
from rl_accel.patches.seams import SeamCheck
from rl_accel.rollout.tail_batching import TailRun

_FLAG = "rl_accel.tail_batching"

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


def check(args: Any, flags: TailBatchingFlags) -> None:
    """Refuse what tail batching cannot work with.

    Raises:
        ConfigError: names slime's argument, what is wanted and what was found.
    """
    rollout, over_sampling, buffer_filter = (
        args.rollout_function_path,
        args.over_sampling_batch_size,
        args.buffer_filter_path,
    )
    no_partial = (
        "responses that older weights began are not strictly on-policy; what tail batching cuts off starts again"
    )
    needed = (
        (bool(flags.enable), "--data-source-path", "another data source", DATA_SOURCE, f"{_FLAG}.enable is not set"),
        (rollout == ROLLOUT, "--rollout-function-path", ROLLOUT, rollout, "it plays the rounds"),
        (
            args.rollout_global_dataset,
            "--disable-rollout-global-dataset",
            "unset",
            True,
            "prompts come from a data set",
        ),
        (not args.partial_rollout, "--partial-rollout", "unset", True, no_partial),
        (
            over_sampling in (None, args.rollout_batch_size),
            "--over-sampling-batch-size",
            "unset",
            over_sampling,
            f"{_FLAG}.prompt_ratio says how many prompts are launched",
        ),
        (buffer_filter is None, "--buffer-filter-path", "unset", buffer_filter, "the queue is tail batching's own"),
    )
    for holds, argument, wanted, found, reason in needed:
        if not holds:
            raise ConfigError(f"{_FLAG} wants {argument} to be {wanted}, found {found} ({reason})")


def run_of(args: Any, flags: TailBatchingFlags, rows: int) -> TailRun:
    """Return the core's run for a data set of ``rows`` prompts.

    Raises:
        ConfigError: quotas and the batch do not fit, or the data set is smaller than a batch.
    """
    if rows < args.rollout_batch_size:
        raise ConfigError(
            f"{_FLAG} wants a data set of at least --rollout-batch-size = {args.rollout_batch_size} prompts, found {rows}"
        )
    name = os.path.basename(str(args.prompt_data))
    return TailRun(
        args.rollout_batch_size,
        args.n_samples_per_prompt,
        flags,
        filter_groups=args.dynamic_sampling_filter_path is not None,
        data_id=f"{name} {rows} shuffle={args.rollout_shuffle} seed={args.rollout_seed}",
    )


def last_rollout(args: Any, rows: int) -> int:
    """Return how many rollouts the run has, counted from its very first."""
    return int(args.num_rollout if args.num_rollout is not None else rows // args.rollout_batch_size * args.num_epoch)
