"""Index of prompts and responses: finds the tokens that followed a given context (the last tokens of a response) in the past.

Tokens are stored in blocks of one pool of fixed size, and a new block replaces the oldest block. The position of a token is a
number that is never reused, so a position in a dropped block can be recognised. A chain links the positions after the same GRAM
tokens, from the newest to the oldest, as in deflate (RFC 1951). Each position is in two chains. The prompt's chain has only
positions in the same prompt and in responses to it. The global chain has positions in all prompts and responses. Hash tables hold
the newest position of each chain.
"""

import hashlib
import itertools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl_accel.ops.cpu import compiled

Ints = NDArray[np.int64]
Records = NDArray[np.void]

BLOCK = 32
"""Number of tokens in a block, which the index allocates as a whole. A response leaves half a block unused on average."""
GRAM = 3
"""Minimum number of equal tokens for a match. Fewer tokens occur in too many places to say which token comes next."""
CONTEXT = 32
"""Maximum length of a match in tokens: only the last CONTEXT tokens of a response are compared."""
CANDIDATES = 16
"""Maximum number of places in the index that are compared with a response's last tokens, the newest first. Twice as many save only
1% of the engine steps in a replay (docs/benchmarks/drafts.md)."""
SOURCES = ("own", "sibling", "earlier", "other")
"""Sources of draft tokens: where the last tokens of a response were found again.

own: the response itself or its prompt.
sibling: another response to the same prompt, generated with the same weights.
earlier: a response to the same prompt, generated with other weights.
other: another prompt or a response to it."""
OTHER = SOURCES.index("other")
PROMPT = 2**62
"""Field ``version`` of prompts: larger than every version number of the weights, so that a prompt is never too old."""

SEQUENCE = np.dtype([(name, np.int64) for name in ("last", "length", "oldest", "key", "version", "number")])
"""Record of a sequence: a prompt, or a prompt with its response.

last: position (address in the index) of the last token; -1 for none.
length: number of tokens.
oldest: version of the weights. Responses of earlier weights are not used to predict tokens of this sequence.
key: hash of the prompt, see :func:`key_of`.
version: version of the weights that generate the response; PROMPT for a prompt.
number: unique number of the sequence."""
_BLOCK_RECORD = np.dtype([(name, np.int64) for name in ("before", "after", "count", "key", "version", "number")])
"""Record of a block, which holds up to BLOCK tokens of one sequence. ``key``, ``version`` and ``number`` are those of the sequence.

before: position (address in the index) of the sequence's last token before this block; -1 for none.
after: number of the sequence's next block; -1 for none.
count: number of tokens in the block."""
_numbers = itertools.count(1)


def key_of(prompt: NDArray[np.int32]) -> int:
    """Returns a 64-bit hash of the tokens of a prompt, int32[T]. The hash is the same in all processes."""
    return int.from_bytes(hashlib.blake2b(prompt.tobytes(), digest_size=8).digest(), "little", signed=True)


def new_sequence(key: int, version: int) -> Records:
    """Returns an array of one SEQUENCE, without tokens. ``key`` and ``version``: see SEQUENCE."""
    return np.array([(-1, 0, 0, key, version, next(_numbers))], SEQUENCE)


class Pool(NamedTuple):
    """Memory of an index: N tokens in N / BLOCK blocks, and two hash tables of H buckets, which find places after given tokens."""

    tokens: Any  # int32[N, 3]: token; offset to the older position in the prompt's and the global chain; 0: none
    blocks: Any  # _BLOCK_RECORD[N / BLOCK]
    buckets: Any  # int64[2, H]: 1 + newest position of the chain; 0 for none
    used: Any  # int64[1]: number of blocks allocated so far, including dropped blocks


def make_pool(memory_mb: float) -> Pool:
    """Returns an empty index. It takes ``memory_mb`` MiB and never grows: new tokens replace the oldest tokens.

    Raises ValueError if ``memory_mb`` is less than 1.
    """
    if memory_mb < 1:
        raise ValueError(f"memory_mb must be at least 1, found {memory_mb}")
    budget = int(memory_mb * 2**20)
    buckets = 2 ** (budget.bit_length() - 7)
    blocks = (budget - 2 * 8 * buckets) // (BLOCK * 3 * 4 + _BLOCK_RECORD.itemsize)
    return Pool(
        tokens=np.zeros((blocks * BLOCK, 3), np.int32),
        blocks=np.zeros(blocks, _BLOCK_RECORD),
        buckets=np.zeros((2, buckets), np.int64),
        used=np.zeros(1, np.int64),
    )


@compiled
def hash_of(tokens: Any, begin: int, end: int, start: int) -> Any:
    """Returns a 64-bit hash of ``tokens[begin:end]``. Each value of ``start`` gives a different hash function."""
    mixed = np.uint64(start)
    for at in range(begin, end):
        mixed = (mixed ^ np.uint64(tokens[at])) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return np.int64(mixed)


@compiled
def bucket_of(chain: int, key: int, tokens: Any, end: int, buckets: int) -> Any:
    """Returns the hash bucket of the chain that lists the places after the tokens ``tokens[end - GRAM : end]``.

    ``chain``: 0 for places in the prompt with the hash ``key`` and responses to it, 1 for places in the whole index. ``buckets``:
    number of buckets in a hash table, a power of two.
    """
    return hash_of(tokens, end - GRAM, end, 0 if chain else key) & (buckets - 1)


@compiled
def is_live(pool: Pool, position: int) -> bool:
    """Returns whether the token at the address ``position`` is still in the index; False for -1. Newer tokens replace old ones."""
    return position >= 0 and pool.used[0] - len(pool.blocks) <= position // BLOCK


@compiled
def _block(pool: Pool, position: int) -> Any:
    return pool.blocks[position // BLOCK % len(pool.blocks)]


@compiled
def _token(pool: Pool, position: int) -> Any:
    return pool.tokens[position % len(pool.tokens)]


@compiled
def _previous(pool: Pool, position: int) -> int:
    """Returns the address of the token before the stored token at ``position``; -1 if the index has no such token."""
    if position % BLOCK:
        return position - 1
    previous = _block(pool, position).before
    return previous if is_live(pool, previous) else -1


@compiled
def _next(pool: Pool, position: int) -> int:
    block = _block(pool, position)
    if position % BLOCK + 1 < block.count:
        return position + 1
    following = block.after * BLOCK
    return following if is_live(pool, following) else -1


@compiled
def extend(pool: Pool, sequences: Any, tokens: Any, ends: Any) -> None:
    """Appends new tokens to sequences (prompts, or prompts with their responses) in the index.

    Args:
        pool: the index.
        sequences: sequences to extend, array [S] of SEQUENCE or of records with its fields. One of length -1 is skipped.
        tokens: all tokens of each sequence, from the first prompt token on, int32[S, ...].
        ends: new length of each sequence in tokens, int64[S]. The tokens from the old length up to the new length are added.
    """
    for row in range(len(sequences)):
        sequence = sequences[row]
        if sequence.length < 0:
            continue
        for at in range(sequence.length, ends[row]):
            position = _place_after(pool, sequence)
            block = _block(pool, position)
            block.count += 1
            token = _token(pool, position)
            token[:] = 0
            token[0] = tokens[row, at]
            for chain in range(2 if at >= GRAM else 0):
                bucket = bucket_of(chain, sequence.key, tokens[row], at, pool.buckets.shape[1])
                newest = pool.buckets[chain, bucket] - 1
                if is_live(pool, newest):
                    token[1 + chain] = newest - position
                pool.buckets[chain, bucket] = position + 1
            sequence.last = position
            sequence.length = at + 1


@compiled
def _place_after(pool: Pool, sequence: Any) -> Any:
    """Returns the position for the next token of a sequence. Begins a new block if the last block is full, dropped or another's."""
    last = sequence.last
    block = _block(pool, last)
    goes_on = is_live(pool, last) and block.number == sequence.number
    if goes_on and (last + 1) % BLOCK != 0:
        return last + 1
    new_block = pool.used[0]
    if goes_on:
        block.after = new_block
    pool.used[0] += 1
    block = pool.blocks[new_block % len(pool.blocks)]
    block.before = last
    block.after = -1
    block.count = 0
    block.key = sequence.key
    block.version = sequence.version
    block.number = sequence.number
    return new_block * BLOCK


@compiled
def _best_positions(
    pool: Pool, chain: int, context: Any, end: int, key: int, oldest: int, shortest_match: int
) -> tuple[Any, int, int]:
    """Finds the last tokens of ``context[:end]`` again in the index, as many as possible (the longest match).

    Searches the prompt with the hash ``key`` and its responses (``chain`` 0), or all other prompts and responses (``chain`` 1).
    Ignores matches of fewer than ``shortest_match`` tokens, and responses of weights before version ``oldest``.

    Returns:
        Array int64[CANDIDATES] that begins with the positions after the longest matches, the newest first; number of these
        positions; and length of the match in tokens.
    """
    positions = np.zeros(CANDIDATES, np.int64)
    position = pool.buckets[chain, bucket_of(chain, key, context, end, pool.buckets.shape[1])] - 1
    count = 0
    best = shortest_match
    most = min(CONTEXT, end)
    if best > most:
        return positions, count, best
    for _ in range(CANDIDATES):
        if not is_live(pool, position):
            break
        length = 0
        at = _previous(pool, position)
        while at >= 0 and length < most and _token(pool, at)[0] == context[end - 1 - length]:
            length += 1
            at = _previous(pool, at)
        block = _block(pool, position)
        is_same_prompt = block.key == key
        is_searched = is_same_prompt if chain == 0 else not is_same_prompt
        if is_searched and block.version >= oldest and length >= best:
            if length > best:
                count = 0
                best = length
            positions[count] = position
            count += 1
        step = _token(pool, position)[1 + chain]
        if step == 0:
            break
        position += step
    return positions, count, best


@compiled
def _source_of(block: Any, sequence: Any) -> int:
    """Returns the index in SOURCES of a place in ``block`` from which tokens of ``sequence`` are predicted."""
    if block.key != sequence.key:
        return OTHER
    if block.number == sequence.number or block.version == PROMPT:
        return 0
    return 1 if block.version == sequence.version else 2


@compiled
def _elect(values: Any, weights: Any, voters: int) -> tuple[int, float]:
    """Returns the value with the largest sum of weights among the first ``voters`` values, and its share of all weights."""
    all_votes = 0.0
    for voter in range(voters):
        all_votes += weights[voter]
    chosen = 0
    most_votes = 0.0
    for voter in range(voters):
        votes = 0.0
        for other in range(voter, voters):
            if values[other] == values[voter]:
                votes += weights[other]
        if votes > most_votes:
            chosen = values[voter]
            most_votes = votes
        if 2 * most_votes >= all_votes:
            break
    return chosen, most_votes / all_votes


@compiled
def predict(pool: Pool, sequence: Any, context: Any, tokens: Any, shares: Any) -> tuple[int, int, int]:
    """Predicts the next tokens of a sequence: the tokens that followed where its last tokens were found in the index.

    Tries the newest CANDIDATES places in the same prompt and its responses, and as many in the whole index. The places with the
    longest match (number of equal tokens before the place) vote on one next token after another. Newer places have more weight. A
    place that is outvoted no longer votes.

    Args:
        pool: the index.
        sequence: the sequence, an element of ``sequences`` in :func:`extend`.
        context: all tokens of the sequence, then free columns. Fewer tokens are predicted than there are free columns.
        tokens: receives the predicted tokens, int32[L]; at most L tokens are predicted.
        shares: receives each predicted token's share of the votes, float64[L].

    Returns:
        Number of predicted tokens, 0 if no place was found; length of the longest match; index in SOURCES of the newest place
        with this match.
    """
    end = sequence.length
    limit = min(len(tokens), len(context) - 1 - end)
    if end < GRAM or limit < 1:
        return 0, 0, 0
    key = sequence.key
    oldest = sequence.oldest
    positions, voters, matched = _best_positions(
        pool, chain=0, context=context, end=end, key=key, oldest=oldest, shortest_match=GRAM
    )
    least = matched + 1 if voters else matched
    others, other_voters, longer = _best_positions(
        pool, chain=1, context=context, end=end, key=key, oldest=oldest, shortest_match=least
    )
    if other_voters:
        positions = others
        voters = other_voters
        matched = longer
    source = _source_of(_block(pool, positions[0]), sequence)
    weights = 1 / np.arange(1, voters + 1)
    values = np.empty(voters, np.int32)
    count = 0
    while voters and count < limit:
        for voter in range(voters):
            values[voter] = _token(pool, positions[voter])[0]
        chosen, share = _elect(values, weights, voters)
        tokens[count] = chosen
        shares[count] = share
        count += 1
        remaining = 0
        for voter in range(voters):
            following = _next(pool, positions[voter]) if values[voter] == chosen else -1
            if following >= 0:
                positions[remaining] = following
                weights[remaining] = weights[voter]
                remaining += 1
        voters = remaining
    return count, matched, source


@compiled
def tokens_of(pool: Pool, sequence: Any) -> NDArray[np.int32] | None:
    """Returns all tokens of a sequence, int32[T]; None if newer tokens have replaced some of them in the index."""
    tokens = np.zeros(sequence.length, np.int32)
    position = sequence.last if is_live(pool, sequence.last) else -1
    for at in range(len(tokens) - 1, -1, -1):
        if position < 0:
            return None
        tokens[at] = _token(pool, position)[0]
        position = _previous(pool, position)
    return tokens
