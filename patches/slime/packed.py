"""What the advantage patches of slime share: where they go, and whole sequences on every rank."""

from collections.abc import Sequence
from typing import Any

import torch

from rl_accel.errors import PatchRefused

LOSS = "slime.backends.megatron_utils.loss"
"""Holds the functions by name, so they have to be replaced here: patching ``ppo_utils`` alone would do nothing."""
PPO_UTILS = "slime.utils.ppo_utils"


class ContextParallel:
    """The ranks that hold two slices of each sequence; with one rank both ways are free.

    slime's own functions cut and gather: which tokens a rank holds is its business.
    """

    def __init__(self) -> None:
        from megatron.core import mpu

        self.size: int = mpu.get_context_parallel_world_size()

    def gather(
        self, slices: Sequence[torch.Tensor], totals: Sequence[int], lengths: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return whole responses [length] from this rank's slices; a collective call."""
        if self.size == 1:
            return list(slices)
        from slime.backends.megatron_utils.cp_utils import all_gather_with_cp

        return [all_gather_with_cp(*row) for row in zip(slices, totals, lengths, strict=True)]

    def cut(self, whole: Sequence[torch.Tensor], totals: Sequence[int], lengths: Sequence[int]) -> list[torch.Tensor]:
        """Return this rank's slices of whole responses."""
        if self.size == 1:
            return list(whole)
        from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

        return [slice_log_prob_with_cp(*row) for row in zip(whole, totals, lengths, strict=True)]


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
