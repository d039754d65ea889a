"""Helpers of the patches that replace slime's computation of advantages."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from rl_accel.patches.parity import require_agreement

LOSS = "slime.backends.megatron_utils.loss"
"""Module of slime that calls the advantage functions which rl-accel replaces. It has imported them with ``from``, so that they must
be replaced in this module, too, not only where they are defined."""
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


PROBE_LENGTHS = (130, 1, 0, 57, 128, 3)
"""Lengths in tokens of the responses on which slime's functions are compared with their replacements. Some are near 128, the chunk
length of slime's scans."""


def require_equal(original: Any, replacement: Any, batches: Iterable[Mapping[str, Any]]) -> None:
    """Checks that slime's function and its replacement return the same for each of ``batches``, the arguments of one call.

    Both run as if there were one context-parallel rank, so that each process can compare them alone. Raises PatchRefused if outputs
    differ by more than 1e-4, the room for the rounding of float32.
    """
    from megatron.core import mpu

    with mock.patch.object(mpu, "get_context_parallel_world_size", return_value=1):
        for arguments in batches:
            require_agreement(original, replacement, arguments, rtol=1e-4, atol=1e-4)


def require_finite(results: Sequence[torch.Tensor]) -> None:
    """Raises ValueError if results hold NaN or infinity, which spread over other tokens in another way in slime's scan."""
    if not torch.cat(list(results)).isfinite().all():
        raise ValueError("a reward, a value or a result is not finite")
