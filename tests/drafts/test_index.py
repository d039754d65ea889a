"""The index of tokens against a slow, obvious one; its memory is bounded."""

import random

import numpy as np
import pytest

from rl_accel.drafts.index import OTHER, PROMPT, SOURCES, Match, TokenIndex, TokenSequence, key_of


@pytest.mark.parametrize(("seed", "blocks"), [(seed, blocks) for seed in range(4) for blocks in (3, 20, 500)])
def test_finds_what_the_obvious_index_finds(seed, blocks, indices):
    rng = random.Random(seed)
    index, obvious = indices(blocks)
    letters = rng.choice((2, 3, 5))
    rows = [np.array([[rng.randrange(letters) for _ in range(300)]], np.int32) for _ in range(6)]
    running: list[tuple[np.ndarray, TokenSequence, TokenSequence]] = []
    found = set()
    for step in range(300):
        if len(running) < 6:
            key = rng.randrange(-3, 3)
            matrix = rng.choice(rows).copy()
            prompt = rng.randrange(0, 40)
            pair = []
            for side in (index, obvious):
                before = TokenSequence(key, PROMPT)
                side.extend(before, matrix[0], prompt)
                pair.append(TokenSequence(key, step // 100, max(0, step // 100 - 1), last=before.last, length=prompt))
            running.append((matrix, *pair))
        for matrix, ours, theirs in running:
            end = min(300, ours.length + rng.randrange(8))
            for at in range(ours.length, end):
                matrix[0, at] = rng.choice((matrix[0, at], matrix[0, at], rng.randrange(letters)))
            index.extend(ours, matrix[0], end)
            obvious.extend(theirs, matrix[0], end)
            limit = rng.randrange(12)
            match = index.lookup(ours, matrix[0], limit)
            expected = obvious.lookup(theirs, matrix[0], limit)
            assert (match is None) == (expected is None)
            if match is not None:
                found.add(match.source)
                assert match._replace(shares=[]) == expected._replace(shares=[])
                assert match.shares == pytest.approx(expected.shares)
            read, other = index.read(ours), obvious.read(theirs)
            assert (read is None) == (other is None)
            if read is not None:
                assert read.tolist() == matrix[0, :end].tolist() == other.tolist()
        running = [item for item in running if item[1].length < 300 and rng.random() < 0.97]
    assert {SOURCES.index("earlier"), OTHER} < found


def test_other_prompts_are_followed_only_where_more_tokens_are_the_same_than_at_the_own():
    index = TokenIndex(1)
    index.extend(TokenSequence(7, 1), np.array([1, 2, 3, 4, 50], np.int32), 5)
    index.extend(TokenSequence(8, 2), np.array([9, 2, 3, 4, 51], np.int32), 5)

    def ask(*context: int, key: int = 7, oldest: int = 0) -> tuple[list[int], int, str] | None:
        tokens = np.array([*context, 0, 0], np.int32)
        match = index.lookup(TokenSequence(key, 3, oldest, length=len(context)), tokens, 1)
        return match and (match.tokens, match.matched, SOURCES[match.source])

    assert ask(1, 2, 3, 4) == ([50], 4, "earlier")
    assert ask(2, 3, 4) == ([50], 3, "earlier")
    assert ask(9, 2, 3, 4) == ([51], 4, "other")
    assert ask(2, 3, 4, key=6) == ([51], 3, "other")
    assert ask(1, 2, 3, 4, key=6) == ([50], 4, "other")
    assert ask(1, 2, 3, 4, key=6, oldest=2) == ([51], 3, "other")
    assert ask(2, 3, 4, key=6, oldest=3) is None


def test_newer_responses_outweigh_older_ones_and_too_old_ones_do_not_count():
    index = TokenIndex(1)
    for visit, last in enumerate((50, 51, 52)):
        index.extend(TokenSequence(7, visit), np.array([1, 2, 3, last], np.int32), 4)
    context = np.array([1, 2, 3, 0, 0], np.int32)

    def ask(oldest: int) -> Match | None:
        return index.lookup(TokenSequence(7, 3, oldest, length=3), context, 1)

    assert ask(0).tokens == [52]
    assert ask(0).shares == pytest.approx([1 / (1 + 1 / 2 + 1 / 3)])
    assert ask(2).shares == [1.0]
    assert ask(3) is None
    for _ in range(3):
        index.extend(TokenSequence(7, 3), np.array([1, 2, 3, 50], np.int32), 4)
    index.extend(TokenSequence(7, 3), np.array([1, 2, 3, 51], np.int32), 4)
    assert ask(0).tokens == [50]


@pytest.mark.parametrize("memory_mb", [1, 1.5, 7, 64, 200])
def test_memory_is_what_was_asked_for_and_does_not_grow(memory_mb):
    index = TokenIndex(memory_mb)
    before = sum(array.nbytes for array in index.pool)
    assert 0.8 * memory_mb < before / 2**20 <= memory_mb
    tokens = np.arange(100_000, dtype=np.int32)
    sequences = [TokenSequence(key, 0) for key in range(3)]
    for sequence in sequences:
        index.extend(sequence, tokens, 100_000)
    assert sum(array.nbytes for array in index.pool) == before
    assert (index.read(sequences[0]) is None) == (memory_mb < 7)


def test_less_memory_than_one_mebibyte_is_refused():
    with pytest.raises(ValueError, match=r"memory_mb must be at least 1, found 0\.5"):
        TokenIndex(0.5)


def test_the_key_of_a_prompt_is_the_same_in_every_process():
    assert key_of(np.array([5, 6, 7], np.int32)) == 4842055968956316786
