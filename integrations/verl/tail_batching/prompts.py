"""The prompts of a run: rows come from the trainer's data loader one by one and are kept until they are settled."""

from collections.abc import Callable
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


class Prompts:
    """Rows by prompt id, ``"epoch:row"`` (both from 1, the row in the order of the data loader).

    Args:
        fetch: returns the next row; after the last one of an epoch it begins the next.
        rows_per_epoch: how many rows an epoch has.
    """

    def __init__(self, fetch: Callable[[], dict[str, Any]], rows_per_epoch: int) -> None:
        self._fetch = fetch
        self._rows_per_epoch = rows_per_epoch
        self.fetched = 0
        self.payloads: dict[str, dict[str, Any]] = {}

    @property
    def begins_epoch(self) -> bool:
        """Whether the next row is the first of an epoch, but not of the run."""
        return self.fetched > 0 and self.fetched % self._rows_per_epoch == 0

    def take(self) -> str:
        """Fetch the next row and return the id under which ``payloads`` has it."""
        epoch, row = divmod(self.fetched, self._rows_per_epoch)
        prompt_id = f"{epoch + 1}:{row + 1}"
        self.payloads[prompt_id] = self._fetch()
        self.fetched += 1
        return prompt_id
