"""Helpers of the patches that replace slime's computation of advantages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rl_accel.errors import PatchRefused
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


PROBE_LENGTHS = (130, 1, 57, 128, 3)
"""Lengths in tokens of the sequences with which rl-accel's computation of advantages and returns is compared with slime's, before
it replaces slime's. Some are near 128, the chunk length of slime's scans."""


def require_equal_scan(
    function: Any,
    scan: str,
    rows: Sequence[Sequence[torch.Tensor]],
    ours: Callable[..., list[torch.Tensor]],
    arguments: Sequence[Mapping[str, float]],
) -> None:
    """Checks that ``ours`` computes the same as slime's scan, the function with the name ``scan`` that slime's ``function`` calls.

    Both get each item of ``arguments``, such as ``{"gamma": 0.99}``. slime's scan also gets the ``rows``, padded with zeros to
    [B, T]; each item of ``rows`` has sequences of the lengths ``PROBE_LENGTHS``. ``ours`` returns each output of the scan as one
    tensor without padding. Raises PatchRefused if slime has no such scan, or if outputs differ by more than 1e-4, the room for the
    rounding of float32.
    """
    if (stock_scan := function.__globals__.get(scan)) is None:
        raise PatchRefused(f"{PPO_UTILS} has no {scan} to compare with")
    padded = [torch.nn.utils.rnn.pad_sequence(list(each), batch_first=True) for each in rows]

    def stock(**given: float) -> list[torch.Tensor]:
        outputs = stock_scan(*padded, *given.values())
        each_output = outputs if isinstance(outputs, tuple | list) else [outputs]
        return [torch.cat([row[:n] for row, n in zip(o, PROBE_LENGTHS, strict=True)]) for o in each_output]

    for given in arguments:
        require_agreement(stock, ours, given, rtol=1e-4, atol=1e-4)
