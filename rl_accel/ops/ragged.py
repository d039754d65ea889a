"""Advantage kernels over lists of sequences of any lengths, without padding."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from rl_accel.ops.dispatch import gae


def cu_seqlens(lengths: Sequence[int]) -> torch.Tensor:
    """Return the boundaries [S + 1] of sequences that lie end to end. On the CPU, where the kernels read them."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int64)


def gae_of_lists(
    rewards: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    gamma: float = 1.0,
    lam: float = 1.0,
    *,
    backend: str = "auto",
    chunk_size: int | None = None,
    num_threads: int | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """GAE of each sequence by itself; no mask.

    Args:
        rewards: [T_i] each, cast to the dtype of the values.
        values: [T_i] each; all of one dtype and device.
        gamma, lam, backend, chunk_size, num_threads: as for :func:`rl_accel.ops.gae`.

    Returns:
        Advantages and returns, [T_i] each in the dtype of the values: views into one tensor of all tokens.

    Raises:
        TypeError, ValueError, BackendMissing: as :func:`rl_accel.ops.gae`; there are no sequences, or rewards of other lengths.
    """
    if not values:
        raise ValueError("values wants at least one sequence, found none")
    lengths = [len(each) for each in values]
    if [len(each) for each in rewards] != lengths:
        raise ValueError(
            f"rewards wants the lengths of values, {_told(lengths)}, found {_told(list(map(len, rewards)))}"
        )
    flat = torch.cat(list(values))
    advantages, returns = gae(
        torch.cat(list(rewards)).to(flat),
        flat,
        None,
        gamma,
        lam,
        cu_seqlens=cu_seqlens(lengths),
        backend=backend,
        chunk_size=chunk_size,
        num_threads=num_threads,
    )
    return list(torch.split(advantages, lengths)), list(torch.split(returns, lengths))


def _told(lengths: list[int]) -> str:
    """A batch may have thousands of sequences: the first few say enough."""
    more = "" if len(lengths) <= 8 else f" and {len(lengths) - 8} more"
    return f"{lengths[:8]}{more}"
