"""What the advantage patches of slime share: where they go, and whole sequences on every rank."""

import functools
import logging
from collections.abc import Sequence

import torch

logger = logging.getLogger("rl_accel")

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

        return [all_gather_with_cp(*each) for each in zip(slices, totals, lengths, strict=True)]

    def cut(self, whole: Sequence[torch.Tensor], totals: Sequence[int], lengths: Sequence[int]) -> list[torch.Tensor]:
        """Return this rank's slices of whole responses."""
        if self.size == 1:
            return list(whole)
        from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

        return [slice_log_prob_with_cp(*each) for each in zip(whole, totals, lengths, strict=True)]


@functools.lru_cache(maxsize=32)
def warn_once(what: str, reason: str) -> None:
    """Say that slime's own function serves, once for each reason."""
    logger.warning("rl-accel: %s is left to slime's own function: %s", what, reason)
