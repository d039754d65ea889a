"""Helpers of the patches that replace slime's computation of advantages."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rl_accel.errors import PatchRefused

LOSS = "slime.backends.megatron_utils.loss"
"""Module of slime that has imported the functions to replace by name, so that they must be replaced in it, too."""
PPO_UTILS = "slime.utils.ppo_utils"


def on_whole_responses(
    compute: Callable[..., Sequence[list[torch.Tensor]]],
    slices: Sequence[Sequence[torch.Tensor]],
    totals: Sequence[int],
    lengths: Sequence[int],
) -> Sequence[list[torch.Tensor]]:
    """Calls ``compute`` on whole responses, and returns the results for the part of each response that this rank holds.

    With context parallelism, each rank holds two slices of each response, and all ranks must call this function together.

    Args:
        compute: function of one argument for each item of ``slices``: a list of whole responses [length].
        slices: for each per-token quantity, such as KL, a list with this rank's part of each response.
        totals, lengths: number of tokens of each sequence, including the prompt, and of each response.
    """
    from megatron.core import mpu

    if mpu.get_context_parallel_world_size() == 1:
        return compute(*slices)
    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp

    def each(function: Any, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [function(*row) for row in zip(rows, totals, lengths, strict=True)]

    whole = [each(all_gather_with_cp, rows) for rows in slices]
    return [each(slice_log_prob_with_cp, rows) for rows in compute(*whole)]


PROBE_LENGTHS = (130, 1, 57, 128, 3)
"""Lengths in tokens of the sequences that are compared with slime. Some lengths are near 128, the chunk length of slime's scans."""
ROUNDING = {"rtol": 1e-4, "atol": 1e-4}
"""Relative and absolute tolerance in the comparison of slime's chunk scan with rl-accel's scan."""


def padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pads sequences with zeros to the length of the longest sequence, as slime does. Returns a tensor [B, T]."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def unpadded(rows: torch.Tensor) -> torch.Tensor:
    """Removes padding from sequences [B, T] of the lengths ``PROBE_LENGTHS``, and concatenates the sequences."""
    return torch.cat([row[:length] for row, length in zip(rows, PROBE_LENGTHS, strict=True)])


def stock_scan(function: Any, name: str) -> Any:
    """Returns the scan ``name`` that slime's ``function`` calls. Raises PatchRefused if slime has no function of this name."""
    scan = function.__globals__.get(name)
    if scan is None:
        raise PatchRefused(f"{PPO_UTILS} has no {name} to compare with")
    return scan
