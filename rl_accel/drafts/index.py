"""Token sequences by prompt, and what followed the last tokens of a context in them: hash chains, as in deflate (RFC 1951).

Tokens lie in blocks of one pool of fixed size; the oldest block gives way to a new one. A position is given once and never again,
so one in a block that is gone can be told. Each position has a link to the last one before it that came after the same GRAM tokens
of the same prompt, and a hash table has the newest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl_accel.ops.cpu import compiled

BLOCK = 32
"""Tokens in a block."""
GRAM = 3
"""Tokens that a context and a place must share at least."""
CONTEXT = 32
"""Tokens of a context that are compared at most."""
CANDIDATES = 32
"""Places that are compared at most, the newest first."""
WALK = 4 * CANDIDATES
"""Entries of a chain that are visited at most: chains of several prompts may share a slot."""
PRIOR = 4.0
"""How many tries of its own weigh as much, for a prompt, as what holds for all prompts."""
SOURCES = ("own", "sibling", "earlier")
"""Where a match is: in the request itself or its prompt, in a response of the same visit, in one of another."""
PROMPT = 2**62
"""The visit of a prompt's own tokens: never too old."""


@dataclass(slots=True)
class TokenSequence:
    """A prompt's tokens (``visit`` is PROMPT), or a response after them.

    Equal ``key`` is the same prompt. Visits of a prompt grow; those before ``oldest`` are too old for this sequence.
    """

    key: int
    visit: int
    oldest: int = 0
    number: int = 0
    last: int = -1
    """The position of its last token; of the last token before it, while it has none; -1 for none."""
    length: int = 0
    """Tokens, those before it included."""


class Match(NamedTuple):
    """What followed, at the places that are most like a context."""

    tokens: list[int]
    """At least one."""
    shares: list[float]
    """Of the votes that each of them got."""
    worth: int
    """How many of them are likely enough to be proposed."""
    matched: int
    """Tokens that context and places share."""
    source: int
    """Index in SOURCES, by the newest of the places."""
    expected: float
    """How many of the tokens worth proposing will be accepted, on average."""


class Pool(NamedTuple):
    """The arrays of an index: N tokens in N / BLOCK blocks, H slots."""

    tokens: Any  # int32[N]
    older: Any  # int32[N]: from a position to the one before it in its chain, 0 at the end
    slots: Any  # int64[H]: 1 + the newest position of a chain, 0 for none
    before: Any  # int64[blocks]: the position of the token before the first, -1 for none
    after: Any  # int64[blocks]: the block that goes on after the last token, -1 for none
    count: Any  # int64[blocks]: tokens in it
    key: Any  # int64[blocks], and so on: of the sequence
    visit: Any
    number: Any
    used: Any  # int64[1]: blocks given out so far, those that are gone included


class TokenIndex:
    """The tokens of many sequences in ``memory_mb`` MiB, whose arrays never grow; the oldest tokens are dropped.

    ``matrix`` of the methods is int32, and a row of it holds a sequence from the first token of its prompt on.

    Raises:
        ValueError: ``memory_mb`` is less than 1.
    """

    def __init__(self, memory_mb: float) -> None:
        if memory_mb < 1:
            raise ValueError(f"memory_mb must be at least 1, found {memory_mb}")
        budget = int(memory_mb * 2**20)
        slots = 2 ** (budget.bit_length() - 5)
        blocks = (budget - 8 * slots) // (BLOCK * 8 + 6 * 8)
        of_tokens = (np.zeros(blocks * BLOCK, np.int32) for _ in range(2))
        of_blocks = (np.zeros(blocks, np.int64) for _ in range(6))
        self.pool = Pool._make((*of_tokens, np.zeros(slots, np.int64), *of_blocks, np.zeros(1, np.int64)))
        self._sequences = 0

    def extend(
        self, matrix: NDArray[np.int32], rows: Sequence[int], ends: Sequence[int], sequences: Sequence[TokenSequence]
    ) -> None:
        """Append to each sequence what ``matrix[row, :end]`` has beyond its length."""
        for sequence in sequences:
            if not sequence.number:
                self._sequences += 1
                sequence.number = self._sequences
        items = zip(rows, ends, sequences, strict=True)
        numbers = np.array([(row, s.length, end, s.key, s.visit, s.number, s.last) for row, end, s in items], np.int64)
        _extend(self.pool, matrix, numbers)
        for sequence, last, end in zip(sequences, numbers[:, 6].tolist(), ends, strict=True):
            sequence.last, sequence.length = last, end

    def lookup(
        self,
        matrix: NDArray[np.int32],
        rows: Sequence[int],
        sequences: Sequence[TokenSequence],
        limit: int,
        records: Sequence[tuple[float, float]],
        rates: NDArray[np.float64],
        floor: float,
    ) -> list[Match | None]:
        """Return what is likely to follow each sequence, which lies in ``matrix[row]``; None where nothing is alike.

        Of the places of the prompt where the sequence's last GRAM tokens occur, the newest CANDIDATES are compared. Those that
        share most tokens with its end vote on one next token after the other, the newest with weight 1, the next with 1/2, then
        1/3 and so on; who is outvoted votes no more. A token is worth proposing while the product of ``rate * share`` up to it
        is at least ``floor``: more tokens than these, but for the first, more than ``limit``, and more than leave one place free
        in the row are not returned. The rate is from ``records``, hits and tries of the prompt, and where tries are few from
        ``rates``, by :func:`class_of` the match.
        """
        items = zip(rows, sequences, strict=True)
        numbers = np.array([(row, s.length, s.key, s.visit, s.oldest, s.number) for row, s in items], np.int64)
        tokens = np.zeros((len(rows), limit), np.int32)
        shares = np.zeros(tokens.shape)
        found, accepted = np.zeros((len(rows), 4), np.int64), np.zeros(len(rows))
        _lookup(self.pool, matrix, numbers, np.array(records), rates, floor, tokens, shares, found, accepted)
        return [
            Match(tokens[item, :count].tolist(), shares[item, :count].tolist(), worth, matched, source, expected)
            if count
            else None
            for item, ((count, worth, matched, source), expected) in enumerate(
                zip(found.tolist(), accepted.tolist(), strict=True)
            )
        ]

    def holds(self, position: int) -> bool:
        """Return whether the token at ``position`` is still there."""
        return bool(_live(self.pool, position))

    def read(self, sequence: TokenSequence) -> NDArray[np.int32] | None:
        """Return a sequence from the first token of its prompt on, or None if some of it is gone."""
        tokens = np.zeros(sequence.length, np.int32)
        return tokens if _read(self.pool, sequence.last, tokens) else None


@compiled
def slot_of(key: int, first: int, second: int, third: int, slots: int) -> Any:
    """Return the slot of a prompt and GRAM tokens among ``slots``, a power of two."""
    mixed = np.uint64(key)
    for token in (first, second, third):
        mixed = (mixed ^ np.uint64(token)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return np.int64(mixed & np.uint64(slots - 1))


@compiled
def class_of(matched: int) -> int:
    """Return the class, from 0 to CLASSES - 1, of a match of ``matched`` tokens."""
    return 0 if matched <= 4 else 1 if matched <= 8 else 2 if matched <= 16 else 3


@compiled
def _live(pool: Pool, position: int) -> bool:
    block = position // BLOCK
    return position >= 0 and pool.used[0] - len(pool.count) <= block


@compiled
def _previous(pool: Pool, position: int) -> int:
    """The position of the token before that at ``position``, which is there; -1 if there is none."""
    if position % BLOCK:
        return position - 1
    previous = pool.before[position // BLOCK % len(pool.count)]
    return previous if _live(pool, previous) else -1


@compiled
def _next(pool: Pool, position: int) -> int:
    offset, block = position % BLOCK, position // BLOCK % len(pool.count)
    if offset + 1 < pool.count[block]:
        return position + 1
    following = pool.after[block] * BLOCK
    return following if _live(pool, following) else -1


@compiled
def _extend(pool: Pool, matrix: Any, numbers: Any) -> None:
    size, blocks = len(pool.tokens), len(pool.count)
    for item in range(len(numbers)):
        row, begin, end, key, visit, number, last = numbers[item]
        for at in range(begin, end):
            block = last // BLOCK % blocks
            goes_on = _live(pool, last) and pool.number[block] == number
            if goes_on and (last + 1) % BLOCK:
                position = last + 1
            else:
                fresh = pool.used[0]
                if goes_on:
                    pool.after[block] = fresh
                pool.used[0] += 1
                block = fresh % blocks
                position = fresh * BLOCK
                pool.before[block] = last
                pool.after[block] = -1
                pool.count[block] = 0
                pool.key[block] = key
                pool.visit[block] = visit
                pool.number[block] = number
            place = position % size
            pool.tokens[place] = matrix[row, at]
            pool.count[block] += 1
            pool.older[place] = 0
            if at >= GRAM:
                slot = slot_of(key, matrix[row, at - 3], matrix[row, at - 2], matrix[row, at - 1], len(pool.slots))
                newest = pool.slots[slot] - 1
                if _live(pool, newest):
                    pool.older[place] = newest - position
                pool.slots[slot] = position + 1
            last = position
        numbers[item, 6] = last


@compiled
def _lookup(
    pool: Pool,
    matrix: Any,
    numbers: Any,
    records: Any,
    rates: Any,
    floor: float,
    tokens: Any,
    shares: Any,
    found: Any,
    expected: Any,
) -> None:
    size, blocks = len(pool.tokens), len(pool.count)
    places = np.empty(CANDIDATES, np.int64)
    lengths = np.empty(CANDIDATES, np.int64)
    weights = np.empty(CANDIDATES)
    for item in range(len(numbers)):
        row, end, key, visit, oldest, own = numbers[item]
        limit = min(tokens.shape[1], matrix.shape[1] - 1 - end)
        if end < GRAM or limit < 1:
            continue
        slot = slot_of(key, matrix[row, end - 3], matrix[row, end - 2], matrix[row, end - 1], len(pool.slots))
        position = pool.slots[slot] - 1
        places_found, longest = 0, 0
        for _ in range(WALK):
            if not _live(pool, position) or places_found == CANDIDATES:
                break
            block = position // BLOCK % blocks
            if pool.key[block] == key and pool.visit[block] >= oldest:
                length, place = 0, _previous(pool, position)
                compared = min(CONTEXT, end)
                while place >= 0 and length < compared and pool.tokens[place % size] == matrix[row, end - 1 - length]:
                    length += 1
                    place = _previous(pool, place)
                if length >= GRAM:
                    places[places_found] = position
                    lengths[places_found] = length
                    places_found += 1
                    longest = max(longest, length)
            step = pool.older[position % size]
            if step == 0:
                break
            position += step
        voters = 0
        for place in range(places_found):
            if lengths[place] == longest:
                places[voters] = places[place]
                weights[voters] = 1 / (voters + 1)
                voters += 1
        if voters == 0:
            continue
        block = places[0] // BLOCK % blocks
        if pool.number[block] == own or pool.visit[block] == PROMPT:
            source = 0
        else:
            source = 1 if pool.visit[block] == visit else 2
        rate = (records[item, 0] + PRIOR * rates[class_of(longest)]) / (records[item, 1] + PRIOR)
        chance, count, worth = 1.0, 0, 0
        while voters and count < limit:
            total = weights[:voters].sum()
            chosen, most = 0, 0.0
            for voter in range(voters):
                token, votes = pool.tokens[places[voter] % size], 0.0
                for other in range(voter, voters):
                    if pool.tokens[places[other] % size] == token:
                        votes += weights[other]
                if votes > most:
                    chosen, most = token, votes
                if 2 * most >= total:
                    break
            chance *= min(rate, 1.0) * most / total
            if chance < floor and count:
                break
            tokens[item, count], shares[item, count] = chosen, most / total
            count += 1
            if chance < floor:
                break
            expected[item] += chance
            worth, left = count, 0
            for voter in range(voters):
                if pool.tokens[places[voter] % size] == chosen:
                    following = _next(pool, places[voter])
                    if following >= 0:
                        places[left] = following
                        weights[left] = weights[voter]
                        left += 1
            voters = left
        found[item] = (count, worth, longest, source)


@compiled
def _read(pool: Pool, last: int, tokens: Any) -> bool:
    position = last if _live(pool, last) else -1
    for at in range(len(tokens) - 1, -1, -1):
        if position < 0:
            return False
        tokens[at] = pool.tokens[position % len(pool.tokens)]
        position = _previous(pool, position)
    return True
