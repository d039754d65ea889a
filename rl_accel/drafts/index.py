"""Token sequences by prompt, and what followed the last tokens of a context in them: hash chains, as in deflate (RFC 1951).

Tokens lie in blocks of one pool of fixed size; the oldest block gives way to a new one. A position is given once and never again,
so one in a block that is gone can be told. Each position is in two chains: it has a link to the last one before it that came after
the same GRAM tokens of the same prompt, and one to the last that came after them at any prompt. Hash tables have the newest.
"""

import hashlib
import itertools
from dataclasses import dataclass, field
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
CANDIDATES = 16
"""Places of a chain that are compared at most, the newest first."""
SOURCES = ("own", "sibling", "earlier", "other")
"""Where a match is: in the request itself or its prompt, in a response of the same visit, in one of another; at another prompt."""
OTHER = SOURCES.index("other")
PROMPT = 2**62
"""The visit of a prompt's own tokens: never too old."""


@dataclass(slots=True)
class TokenSequence:
    """A prompt's tokens (``visit`` is PROMPT), or a response after them.

    Equal ``key`` is the same prompt. Visits grow; those before ``oldest``, of any prompt, are too old for this sequence.
    """

    key: int
    visit: int
    oldest: int = 0
    last: int = -1  # the position of its last token; of the last token before it, while it has none; -1 for none
    length: int = 0  # tokens, those before it included
    number: int = field(default_factory=itertools.count(1).__next__)


def key_of(prompt: NDArray[np.int32]) -> int:
    """Return the key of a prompt's tokens, the same in every process."""
    return int.from_bytes(hashlib.blake2b(prompt.tobytes(), digest_size=8).digest(), "little", signed=True)


class Match(NamedTuple):
    """What followed, at the places that are most like a context."""

    tokens: list[int]  # at least one
    shares: list[float]  # of the votes that each of them got
    matched: int  # tokens that context and places share
    source: int  # index in SOURCES, by the newest of the places


class Pool(NamedTuple):
    """The arrays of an index: N tokens in N / BLOCK blocks, H slots."""

    tokens: Any  # int32[N, 3]: the token; minus how far back the next is in its prompt's chain and in that of all; 0 at the end
    blocks: Any  # int64[N / BLOCK, 6], see BEFORE
    slots: Any  # int64[2, H]: 1 + the newest position of such a chain, 0 for none
    used: Any  # int64[1]: blocks given out so far, those that are gone included


BEFORE, AFTER, COUNT, KEY, VISIT, NUMBER = range(6)
"""Of a block: the position of the token before its first, the block after it (-1 for none), its tokens; the sequence's numbers."""


class TokenIndex:
    """The tokens of many sequences in ``memory_mb`` MiB, whose arrays never grow; the oldest tokens are dropped.

    ``tokens`` of the methods is int32[...], and has a sequence from the first token of its prompt on.

    Raises:
        ValueError: ``memory_mb`` is less than 1.
    """

    def __init__(self, memory_mb: float) -> None:
        if memory_mb < 1:
            raise ValueError(f"memory_mb must be at least 1, found {memory_mb}")
        budget = int(memory_mb * 2**20)
        slots = 2 ** (budget.bit_length() - 7)
        blocks = (budget - 2 * 8 * slots) // (BLOCK * 3 * 4 + 6 * 8)
        numbers = (np.zeros(shape, np.int64) for shape in ((blocks, 6), (2, slots), 1))
        self.pool = Pool(np.zeros((blocks * BLOCK, 3), np.int32), *numbers)

    def extend(self, sequence: TokenSequence, tokens: NDArray[np.int32], end: int) -> None:
        """Append to ``sequence`` what ``tokens[:end]`` has beyond its length."""
        begin, of_blocks = sequence.length, (sequence.key, sequence.visit, sequence.number)
        sequence.last = _extend(self.pool, tokens, begin, end, *of_blocks, sequence.last)
        sequence.length = end

    def lookup(self, sequence: TokenSequence, tokens: NDArray[np.int32], limit: int) -> Match | None:
        """Return what followed where ``sequence``, which lies in ``tokens``, has been before; None where nothing is alike.

        Of the places of the prompt where the sequence's last GRAM tokens occur, the newest CANDIDATES are compared, and as many
        of all prompts. Those that share most tokens with its end vote; if the prompt and others share as many, those of the prompt.
        They vote on one next token after the other, the newest with weight 1, the next with 1/2, then 1/3 and so on; who is
        outvoted votes no more. There are at most ``limit`` tokens, and one fewer than fit in ``tokens``.
        """
        s, limit = sequence, min(limit, len(tokens) - 1 - sequence.length)
        if s.length < GRAM or limit < 1:
            return None
        found = _lookup(self.pool, tokens, s.length, s.key, s.visit, s.oldest, s.number, limit)
        return Match(found[0].tolist(), found[1].tolist(), *found[2:]) if len(found[0]) else None

    def holds(self, position: int) -> bool:
        """Return whether the token at ``position`` is still there."""
        return bool(_live(self.pool, position))

    def read(self, sequence: TokenSequence) -> NDArray[np.int32] | None:
        """Return a sequence from the first token of its prompt on, or None if some of it is gone."""
        tokens = np.zeros(sequence.length, np.int32)
        return tokens if _read(self.pool, sequence.last, tokens) else None


@compiled
def slot_of(chain: int, key: int, tokens: Any, end: int, slots: int) -> Any:
    """Return the slot of the GRAM tokens before ``end`` at a prompt (chain 0) or all (1), of ``slots``, a power of two."""
    mixed = np.uint64(0 if chain else key)
    for at in range(end - GRAM, end):
        mixed = (mixed ^ np.uint64(tokens[at])) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return np.int64(mixed & np.uint64(slots - 1))


@compiled
def _live(pool: Pool, position: int) -> bool:
    return position >= 0 and pool.used[0] - len(pool.blocks) <= position // BLOCK


@compiled
def _block(pool: Pool, position: int) -> Any:
    return pool.blocks[position // BLOCK % len(pool.blocks)]


@compiled
def _token(pool: Pool, position: int) -> Any:
    return pool.tokens[position % len(pool.tokens)]


@compiled
def _previous(pool: Pool, position: int) -> int:
    """The position of the token before that at ``position``, which is there; -1 if there is none."""
    if position % BLOCK:
        return position - 1
    previous = _block(pool, position)[BEFORE]
    return previous if _live(pool, previous) else -1


@compiled
def _next(pool: Pool, position: int) -> int:
    block = _block(pool, position)
    if position % BLOCK + 1 < block[COUNT]:
        return position + 1
    following = block[AFTER] * BLOCK
    return following if _live(pool, following) else -1


@compiled
def _extend(pool: Pool, tokens: Any, begin: int, end: int, key: int, visit: int, number: int, last: int) -> int:
    for at in range(begin, end):
        block = _block(pool, last)
        goes_on = _live(pool, last) and block[NUMBER] == number
        position = last + 1
        if not goes_on or position % BLOCK == 0:
            if goes_on:
                block[AFTER] = pool.used[0]
            position = pool.used[0] * BLOCK
            pool.used[0] += 1
            block = _block(pool, position)
            block[:] = np.array((last, -1, 0, key, visit, number))
        token = _token(pool, position)
        token[0], token[1], token[2] = tokens[at], 0, 0
        block[COUNT] += 1
        for chain in range(2 if at >= GRAM else 0):
            slot = slot_of(chain, key, tokens, at, pool.slots.shape[1])
            newest = pool.slots[chain, slot] - 1
            if _live(pool, newest):
                token[1 + chain] = newest - position
            pool.slots[chain, slot] = position + 1
        last = position
    return last


@compiled
def _places(pool: Pool, chain: int, context: Any, end: int, key: int, oldest: int, least: int) -> tuple[Any, int, int]:
    """The places of the prompt (chain 0) or of others (1) that share most tokens with the context, but at least ``least``; their
    number; how many tokens that is."""
    places = np.zeros(CANDIDATES, np.int64)
    position = pool.slots[chain, slot_of(chain, key, context, end, pool.slots.shape[1])] - 1
    voters, most = 0, min(CONTEXT, end)
    for _ in range(CANDIDATES if least <= most else 0):
        if not _live(pool, position):
            break
        length, place = 0, _previous(pool, position)
        while place >= 0 and length < most and _token(pool, place)[0] == context[end - 1 - length]:
            length, place = length + 1, _previous(pool, place)
        if length >= least:
            block = _block(pool, position)
            if (block[KEY] == key) == (chain == 0) and block[VISIT] >= oldest:
                voters = voters if length == least else 0
                places[voters] = position
                voters, least = voters + 1, length
        step = _token(pool, position)[1 + chain]
        if step == 0:
            break
        position += step
    return places, voters, least


@compiled
def _lookup(
    pool: Pool, context: Any, end: int, key: int, visit: int, oldest: int, own: int, limit: int
) -> tuple[Any, Any, int, int]:
    """Tokens, shares, and the other fields of a Match; no tokens where nothing is alike."""
    places, voters, matched = _places(pool, 0, context, end, key, oldest, GRAM)
    others, count, longer = _places(pool, 1, context, end, key, oldest, matched + (voters > 0))
    if count:
        places, voters, matched = others, count, longer
    newest = _block(pool, places[0])
    if newest[KEY] != key:
        source = OTHER
    elif newest[NUMBER] == own or newest[VISIT] == PROMPT:
        source = 0
    else:
        source = 1 if newest[VISIT] == visit else 2
    tokens, shares = np.empty(limit, np.int32), np.empty(limit)
    weights, values, count = 1 / np.arange(1, voters + 1), np.empty(voters, np.int32), 0
    while voters and count < limit:
        chosen, most, all_votes, left = 0, 0.0, 0.0, 0
        for voter in range(voters):
            values[voter] = _token(pool, places[voter])[0]
            all_votes += weights[voter]
        for voter in range(voters):
            votes = 0.0
            for other in range(voter, voters):
                votes += weights[other] * (values[other] == values[voter])
            if votes > most:
                chosen, most = values[voter], votes
            if 2 * most >= all_votes:
                break
        tokens[count], shares[count] = chosen, most / all_votes
        count += 1
        for voter in range(voters):
            following = _next(pool, places[voter]) if values[voter] == chosen else -1
            if following >= 0:
                places[left], weights[left] = following, weights[voter]
                left += 1
        voters = left
    return tokens[:count], shares[:count], matched, source


@compiled
def _read(pool: Pool, last: int, tokens: Any) -> bool:
    position = last if _live(pool, last) else -1
    for at in range(len(tokens) - 1, -1, -1):
        if position < 0:
            return False
        tokens[at] = _token(pool, position)[0]
        position = _previous(pool, position)
    return True
