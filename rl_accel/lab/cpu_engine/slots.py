"""Key-value memory of a decoding batch: one row a request, always starting at position 0.

Rows are padded on the right, so that a key sits at the same place whatever else runs. Row counts are rounded up to ``ROWS``,
because CPU kernels treat very few rows with another matrix multiplication, which rounds differently.
"""

from typing import Any

import torch

BLOCK = 128
ROWS = 8


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


class PromptCache:
    """Collects the keys and values of one prompt: per layer [1, H, L, D]. Speaks the part of the cache API models use."""

    is_compileable = False

    def __init__(self) -> None:
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.layers.append((keys, values))
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class SlotCache:
    """Keys and values of up to ``slots`` sequences: per layer [slots, H, capacity, D], grown when a sequence needs it.

    Before a decoding step :meth:`window` says how many rows take part and where each writes. :meth:`update` then returns the
    whole memory, which the attention of this package reads as far as :meth:`mask` allows.
    """

    is_compileable = False

    def __init__(self, slots: int) -> None:
        self.slots = round_up(slots, ROWS)
        self.capacity = 0
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._rows = torch.arange(0)
        self._width = 0
        self._positions = torch.arange(0)

    def store(self, row: int, prompt: PromptCache) -> None:
        """Copy a prompt's keys and values to the beginning of ``row``."""
        if not self._keys:
            for keys, values in prompt.layers:
                self._keys.append(keys.new_zeros(self.slots, keys.shape[1], 0, keys.shape[3]))
                self._values.append(values.new_zeros(self.slots, values.shape[1], 0, values.shape[3]))
        length = prompt.layers[0][0].shape[2]
        self._reserve(length)
        for (keys, values), own_keys, own_values in zip(prompt.layers, self._keys, self._values, strict=True):
            own_keys[row, :, :length] = keys[0]
            own_values[row, :, :length] = values[0]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of row ``source`` over row ``target``."""
        for memory in (*self._keys, *self._values):
            memory[target, :, :length] = memory[source, :, :length]

    def clear(self, row: int) -> None:
        """Zero ``row``: a NaN left behind would reach its next tenant, because 0 * NaN is NaN."""
        for memory in (*self._keys, *self._values):
            memory[row] = 0

    def window(self, rows: int, positions: torch.Tensor) -> None:
        """Select rows 0..rows-1 for the next forward; row i writes at ``positions[i]`` and reads up to it."""
        self._width = round_up(int(positions.max()) + 1, BLOCK)
        self._reserve(self._width)
        self._rows = torch.arange(rows)
        self._positions = positions

    def mask(self) -> torch.Tensor:
        """Return the boolean attention mask [rows, 1, 1, width] of the window: True where a row may look."""
        return (torch.arange(self._width) <= self._positions[:, None])[:, None, None, :]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own_keys, own_values = self._keys[layer_idx], self._values[layer_idx]
        own_keys[self._rows, :, self._positions] = keys[:, :, 0]
        own_values[self._rows, :, self._positions] = values[:, :, 0]
        return own_keys, own_values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._width

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._width, 0

    def _reserve(self, length: int) -> None:
        if length <= self.capacity:
            return
        capacity = round_up(max(length, 2 * self.capacity), BLOCK)
        for memories in (self._keys, self._values):
            for layer, old in enumerate(memories):
                grown = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
                grown[:, :, : self.capacity] = old
                memories[layer] = grown
        self.capacity = capacity
