"""What the advantage patches of slime share: where they go, and whole sequences on every rank."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rl_accel.errors import PatchRefused

LOSS = "slime.backends.megatron_utils.loss"
"""Holds the functions by name, so they have to be replaced here: patching ``ppo_utils`` alone would do nothing."""
PPO_UTILS = "slime.utils.ppo_utils"


def on_whole_responses(
    compute: Callable[..., Sequence[list[torch.Tensor]]],
    slices: Sequence[Sequence[torch.Tensor]],
    totals: Sequence[int],
    lengths: Sequence[int],
) -> Sequence[list[torch.Tensor]]:
    """Return what ``compute`` makes of whole responses [length], gathered from context-parallel ranks and cut again for them.

    slime's own functions gather (a collective call) and cut: which two slices of a sequence a rank holds is its business.
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
"""Around the 128 tokens of a chunk of slime's scans."""
ROUNDING = {"rtol": 1e-4, "atol": 1e-4}
"""How far a chunk scan and ours may part."""


def padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pad with zeros to the longest, as slime does."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def unpadded(rows: torch.Tensor) -> torch.Tensor:
    """Return what stands in :func:`padded` rows of ``PROBE_LENGTHS``, end to end."""
    return torch.cat([row[:length] for row, length in zip(rows, PROBE_LENGTHS, strict=True)])


def stock_scan(function: Any, name: str) -> Any:
    """Return the scan ``name`` that slime's ``function`` calls.

    Raises:
        PatchRefused: there is none, so nothing to compare with.
    """
    scan = function.__globals__.get(name)
    if scan is None:
        raise PatchRefused(f"{PPO_UTILS} has no {name} to compare with")
    return scan
