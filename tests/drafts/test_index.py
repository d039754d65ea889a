"""The index of tokens against a slow, obvious one; its memory is bounded."""

import random

import numpy as np
import pytest

from rl_accel.drafts.index import (
    FOUND,
    LENGTH,
    MATCHED,
    OTHER,
    PROMPT,
    SOURCE,
    SOURCES,
    Matches,
    extend,
    key_of,
    lookup,
    make_pool,
    read,
    sequence,
)


def append(pool, one, tokens, end):
    extend(pool, one[None], np.array(tokens, np.int32)[None], np.array([end]))


def look(pool, one, tokens, limit):
    """Tokens, shares, how many are the same, and the source; None if nothing is."""
    matches = Matches.of(1, limit)
    lookup(pool, one[None], np.array(tokens, np.int32)[None], matches)
    count, matched, source = matches.numbers[0, [FOUND, MATCHED, SOURCE]].tolist()
    return (matches.tokens[0, :count].tolist(), matches.shares[0, :count].tolist(), matched, source) if count else None


@pytest.mark.parametrize(("seed", "blocks"), [(seed, blocks) for seed in range(4) for blocks in (3, 20, 500)])
def test_finds_what_the_obvious_index_finds(seed, blocks, indices, text):
    rng = random.Random(seed)
    pool, obvious = indices(blocks)
    letters = rng.choice((2, 3, 5))
    rows = [np.array([rng.randrange(letters) for _ in range(300)], np.int32) for _ in range(6)]
    running = []
    found = set()
    for step in range(300):
        if len(running) < 6:
            key, visit, prompt = rng.randrange(-3, 3), step // 100, rng.randrange(0, 40)
            tokens = rng.choice(rows).copy()
            before, its = sequence(key, PROMPT), text(key, PROMPT)
            append(pool, before, tokens, prompt)
            obvious.extend(its, tokens, prompt)
            oldest = max(0, visit - 1)
            ours = sequence(key, visit, oldest, before[0], prompt)
            running.append((tokens, ours, text(key, visit, oldest, its.last, prompt)))
        for tokens, ours, theirs in running:
            begin = theirs.length
            end = min(300, begin + rng.randrange(8))
            for at in range(begin, end):
                tokens[at] = rng.choice((tokens[at], tokens[at], rng.randrange(letters)))
            append(pool, ours, tokens, end)
            obvious.extend(theirs, tokens, end)
            assert ours[LENGTH] == end
            limit = rng.randrange(12)
            match, expected = look(pool, ours, tokens, limit), obvious.lookup(theirs, tokens, limit)
            assert (match is None) == (expected is None)
            if match is not None:
                found.add(match[3])
                assert (match[0], *match[2:]) == (expected[0], *expected[2:])
                assert match[1] == pytest.approx(expected[1])
            ours_read, other = read(pool, ours), obvious.read(theirs)
            assert (ours_read is None) == (other is None)
            if ours_read is not None:
                assert ours_read.tolist() == tokens[:end].tolist() == other.tolist()
        running = [item for item in running if item[2].length < 300 and rng.random() < 0.97]
    assert {SOURCES.index("earlier"), OTHER} < found


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
        append(pool, one, tokens, 100_000)
    assert sum(array.nbytes for array in pool) == before
    assert (read(pool, sequences[0]) is None) == (memory_mb < 7)


def test_the_key_of_a_prompt_is_the_same_in_every_process():
    assert key_of(np.array([5, 6, 7], np.int32)) == 4842055968956316786
