"""Helpers of the advantage patches for slime: patch targets, gathering of whole sequences, and probe inputs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rl_accel.errors import PatchRefused

LOSS = "slime.backends.megatron_utils.loss"
"""Module that imports the functions by name and must be patched; patching ``ppo_utils`` alone has no effect."""
PPO_UTILS = "slime.utils.ppo_utils"


def on_whole_responses(
    compute: Callable[..., Sequence[list[torch.Tensor]]],
    slices: Sequence[Sequence[torch.Tensor]],
    totals: Sequence[int],
    lengths: Sequence[int],
) -> Sequence[list[torch.Tensor]]:
    """Calls ``compute`` on whole responses [length], gathered from context-parallel ranks, and slices the results for this rank.

    slime's own functions gather (a collective call) and slice, because slime decides which two slices of a sequence a rank holds.
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
"""Sequence lengths in tokens, some of them near the 128-token chunks of slime's scans."""
ROUNDING = {"rtol": 1e-4, "atol": 1e-4}
"""Tolerances for the difference between slime's chunk scan and our scan."""


def padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pads sequences with zeros to the longest sequence, as slime does."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def unpadded(rows: torch.Tensor) -> torch.Tensor:
    """Removes the padding from :func:`padded` rows of ``PROBE_LENGTHS`` and concatenates the rows."""
    return torch.cat([row[:length] for row, length in zip(rows, PROBE_LENGTHS, strict=True)])


def stock_scan(function: Any, name: str) -> Any:
    """Returns the scan ``name`` that slime's ``function`` calls.

    Raises:
        PatchRefused: slime has no such scan to compare with.
    """
    scan = function.__globals__.get(name)
    if scan is None:
        raise PatchRefused(f"{PPO_UTILS} has no {name} to compare with")
    return scan
