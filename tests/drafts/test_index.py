"""The memory of the index of tokens is bounded. That it finds what it should is proven in test_drafter.py."""

import numpy as np
import pytest

from rl_accel.drafts.index import FOUND, Matches, extend, key_of, lookup, make_pool, read, sequence


def test_a_row_without_a_sequence_is_left_alone():
    pool = make_pool(1)
    none, one = sequence(7, 1, length=-1), sequence(7, 1)
    both = np.array([none, one])
    extend(pool, both, np.array([[1, 2, 3, 4]] * 2, np.int32), np.array([4, 4]))
    assert both[0].tolist() == none.tolist()
    assert read(pool, both[1]).tolist() == [1, 2, 3, 4]
    matches = Matches.of(2, 3)
    lookup(pool, both, np.array([[1, 2, 3, 4, 0, 0]] * 2, np.int32), matches)
    assert matches.numbers[0, FOUND] == 0


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
