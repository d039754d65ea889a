"""Tail batching on slime. Checks slime's interfaces and arguments, and derives the parameters of the run from the arguments.

The module ``rollout`` has the rollout function and the data source. The module ``responses`` generates single responses.
"""

import functools
import os
from typing import Any

from rl_accel.errors import refuse
from rl_accel.features import SLIME_DATA_SOURCE, SLIME_ROLLOUT, TailBatchingFlags
from rl_accel.integrations.slime import interfaces
from rl_accel.patches.seams import member_check
from rl_accel.rollout.tail_batching import TailRun

_FLAG = "rl_accel.tail_batching"
_refuse = functools.partial(refuse, _FLAG)

SWITCHES = (
    member_check(
        name="slime.tail_batching",
        target="slime.rollout.sglang_rollout:generate_rollout",
        interfaces=(
            interfaces.SglangRollout,
            interfaces.RolloutDataSource,
            interfaces.RmHub,
            interfaces.FilterHub,
            interfaces.ServerControl,
            interfaces.HttpUtils,
            interfaces.Misc,
            interfaces.AsyncUtils,
            interfaces.Sample,
            interfaces.SampleStatus,
        ),
    ),
)


def check(args: Any, flags: TailBatchingFlags) -> None:
    """Raises ConfigError for a value of slime's arguments that tail batching does not support."""
    if not flags.enable:
        _refuse("--data-source-path", "another data source", SLIME_DATA_SOURCE, f"{_FLAG}.enable is not set")
    if args.rollout_function_path != SLIME_ROLLOUT:
        _refuse("--rollout-function-path", SLIME_ROLLOUT, args.rollout_function_path, "it plays the rounds")
    if not args.rollout_global_dataset:
        _refuse("--disable-rollout-global-dataset", "unset", True, "prompts come from a data set")
    if args.partial_rollout:
        reason = "responses that older weights began are not strictly on-policy; what is cut off starts again"
        _refuse("--partial-rollout", "unset", True, reason)
    if (over_sampling := args.over_sampling_batch_size) not in (None, args.rollout_batch_size):
        reason = f"{_FLAG}.prompt_ratio says how many prompts are launched"
        _refuse("--over-sampling-batch-size", "unset", over_sampling, reason)
    if args.buffer_filter_path is not None:
        _refuse("--buffer-filter-path", "unset", args.buffer_filter_path, "the queue is tail batching's own")
    if getattr(args, "prompt_data", "not known yet") is None:
        _refuse("--prompt-data", "a data set", None)


def run_of(args: Any, flags: TailBatchingFlags, rows: int, rows_id: str) -> TailRun:
    """Returns the parameters of tail batching for a run on a data set of ``rows`` prompts with the digest ``rows_id``.

    Raises:
        ConfigError: the data set has fewer prompts than a batch.
    """
    if rows < args.rollout_batch_size:
        _refuse("rows of the data set", f"at least --rollout-batch-size, {args.rollout_batch_size}", rows)
    name = os.path.basename(str(args.prompt_data))
    return TailRun(
        args.rollout_batch_size,
        args.n_samples_per_prompt,
        flags,
        filter_groups=args.dynamic_sampling_filter_path is not None,
        data_id=f"{name} {rows} shuffle={args.rollout_shuffle} seed={args.rollout_seed}",
        rows_id=rows_id,
    )


def last_rollout(args: Any, rows: int) -> int:
    """Returns the total number of rollouts of the run, restarts included. ``rows`` is the number of prompts in the data set."""
    return int(args.num_rollout if args.num_rollout is not None else rows // args.rollout_batch_size * args.num_epoch)
