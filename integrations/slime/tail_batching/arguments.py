"""What slime's arguments mean for tail batching, and which of them cannot go together with it."""

import os
from typing import Any

from rl_accel.errors import ConfigError
from rl_accel.features.tail_batching import TailBatchingFlags
from rl_accel.integrations.slime.tail_batching import DATA_SOURCE, ROLLOUT
from rl_accel.rollout.tail_prompts import TailRun

_FLAG = "rl_accel.tail_batching"


def check(args: Any, flags: TailBatchingFlags) -> None:
    """Refuse what tail batching cannot work with.

    Raises:
        ConfigError: names slime's flag, what is wanted and what was found.
    """
    if not flags.enable:
        _refuse("--data-source-path", "another data source", DATA_SOURCE, f"{_FLAG}.enable is not set")
    if args.rollout_function_path != ROLLOUT:
        _refuse("--rollout-function-path", ROLLOUT, args.rollout_function_path)
    if not args.rollout_global_dataset:
        _refuse("--disable-rollout-global-dataset", "unset", True, "prompts must come from a data set")
    if args.partial_rollout:
        _refuse(
            "--partial-rollout",
            "unset",
            True,
            "it goes on with responses that older weights began; what tail batching cuts off starts again, strictly on-policy",
        )
    if args.over_sampling_batch_size not in (None, args.rollout_batch_size):
        _refuse(
            "--over-sampling-batch-size",
            "unset",
            args.over_sampling_batch_size,
            f"{_FLAG}.prompt_ratio says how many prompts are launched",
        )
    if args.buffer_filter_path is not None:
        _refuse("--buffer-filter-path", "unset", args.buffer_filter_path, "the queue is tail batching's own")


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


def check_flags(flags: TailBatchingFlags) -> None:
    """Refuse flags that cannot be right whatever slime's arguments are.

    Raises:
        ConfigError: a value is out of range.
    """
    TailRun(max(1, sum((flags.domain_quotas or {}).values())), 1, flags)


def last_rollout(args: Any, rows: int) -> int:
    """Return how many rollouts the run has, counted from its very first."""
    return int(args.num_rollout if args.num_rollout is not None else rows // args.rollout_batch_size * args.num_epoch)


def _refuse(flag: str, wanted: Any, found: Any, reason: str = "") -> None:
    raise ConfigError(f"{_FLAG} wants {flag} to be {wanted}, found {found}" + (f" ({reason})" if reason else ""))
