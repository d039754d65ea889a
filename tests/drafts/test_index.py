"""The memory of the index of tokens is bounded. That it finds what it should is proven in test_drafter.py."""

import numpy as np
import pytest

from rl_accel.drafts.index import extend, key_of, make_pool, read, sequence


@pytest.mark.parametrize("memory_mb", [1, 1.5, 7, 64, 200])
def test_memory_is_what_was_asked_for_and_does_not_grow(memory_mb):
    pool = make_pool(memory_mb)
    before = sum(array.nbytes for array in pool)
    assert 0.8 * memory_mb < before / 2**20 <= memory_mb
    tokens = np.arange(100_000, dtype=np.int32)
    sequences = [sequence(key, 0) for key in range(3)]
    for one in sequences:
        extend(pool, one[None], tokens[None], np.array([100_000]))
    assert sum(array.nbytes for array in pool) == before
    assert (read(pool, sequences[0]) is None) == (memory_mb < 7)
    assert memory_mb < 7 or read(pool, sequences[1]).tolist() == tokens.tolist()


def test_the_key_of_a_prompt_is_the_same_in_every_process():
    assert key_of(np.array([5, 6, 7], np.int32)) == 4842055968956316786
