"""Rows of a batch by prompt group, and statistics of many groups at once with the bits of one ``torch`` call per group.

Shapes: B responses, G groups of one size, R responses in each of them.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

LABEL_KINDS = "biuUSO"
"""NumPy dtype kinds of group labels that compare like the dictionary keys frameworks group by. Floats do not: NaN."""


def group_rows(index: npt.NDArray[np.generic]) -> list[torch.Tensor]:
    """Collect the rows of each group, groups of equal size together.

    Args:
        index: [B] group label of each row; integers, booleans, strings or hashable objects.

    Returns:
        One int64 tensor [G, R] for each group size R that occurs, ascending in R. A line of it holds the rows of one
        group in batch order; lines are in order of first appearance.

    Raises:
        TypeError: ``index`` is not a one-dimensional array of labels, or a label is not hashable.
    """
    if not isinstance(index, np.ndarray) or index.ndim != 1 or index.dtype.kind not in LABEL_KINDS:
        raise TypeError(f"index: wanted a 1-D array of integers, strings or objects, found {describe(index)}")
    numbers: dict[object, int] = {}
    ids = np.fromiter((numbers.setdefault(label, len(numbers)) for label in index.tolist()), np.int64, len(index))
    counts = np.bincount(ids, minlength=len(numbers))
    by_group = np.argsort(ids, kind="stable")
    starts = np.cumsum(counts) - counts
    return [
        torch.from_numpy(by_group[starts[counts == size][:, None] + np.arange(size)])
        for size in np.unique(counts).tolist()
    ]


def map_groups(
    scores: torch.Tensor, index: npt.NDArray[np.generic], rule: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return [B] = what ``rule(scores of the groups [G, R], rows [G, R]) -> [G, R]`` makes of each row."""
    out = torch.empty_like(scores)
    for rows in group_rows(index):
        out[rows] = rule(scores[rows], rows).to(out.dtype)
    return out


def group_std(scores: torch.Tensor) -> torch.Tensor:
    """Return the unbiased standard deviation [G] of each line of ``scores`` [G, R], R >= 2, float32 or float64, CPU.

    ``torch.std`` of a whole vector and ``torch.std(dim=-1)`` of a matrix are different algorithms (two passes in
    float64 against Welford's) and part in the last bits. This one takes the two passes for all groups at once, in the
    same order, so it agrees with ``torch.std`` called on each line alone to the bit.
    """
    groups, size = scores.shape
    if groups < size:
        return torch.stack([torch.std(line) for line in scores])
    values = scores.double().numpy()
    mean = scores.mean(dim=-1).double().numpy()
    total = np.zeros(groups)
    with np.errstate(invalid="ignore", over="ignore"):
        for position in range(size):
            deviation = values[:, position] - mean
            total += deviation * deviation
        # numpy's square root is correctly rounded; torch's vector one is not.
        return torch.from_numpy(np.sqrt(total / (size - 1))).to(scores.dtype)


def describe(value: object) -> str:
    """Return type, dtype, shape and device of an argument, as far as it has them, for an error message."""
    parts = [type(value).__name__]
    for name in ("dtype", "shape", "device"):
        if hasattr(value, name):
            part = getattr(value, name)
            parts.append(f"{name} {tuple(part) if name == 'shape' else part}")
    return ", ".join(parts)
