"""A row of verl's data loader as the plain dict an agent loop is called with."""

from typing import Any

import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData, NonTensorStack


def row_of(batch: TensorDict) -> dict[str, Any]:
    """Return the only row of ``batch`` as the plain dict an agent loop is called with.

    Raises:
        ValueError: there is not exactly one row.
        TypeError: a column is neither a tensor nor non-tensor data.
    """
    if len(batch) != 1:
        raise ValueError(f"data.gen_batch_size must be 1 for tail batching, found a batch of {len(batch)} prompts")
    row: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            row[key] = value[0].clone()
        elif isinstance(value, NonTensorStack):
            row[key] = value[0].data
        elif isinstance(value, NonTensorData):
            row[key] = value.data
        else:
            raise TypeError(f"column {key} must be a tensor or non-tensor data, found {type(value).__name__}")
    return row
