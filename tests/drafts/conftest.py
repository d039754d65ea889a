"""A slow, obvious index of tokens, and a real one so small that its blocks are used again and again."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest

from rl_accel.drafts.index import (
    BLOCK,
    CANDIDATES,
    CONTEXT,
    GRAM,
    OTHER,
    PROMPT,
    Match,
    TokenIndex,
    TokenSequence,
    slot_of,
)


@dataclass(eq=False)
class Token:
    value: int
    before: "Token | None"
    sequence: TokenSequence
    block: int
    after: "Token | None" = None


class ObviousIndex:
    """The same as :class:`TokenIndex`, of linked Python objects. Positions are the tokens themselves."""

    def __init__(self, blocks: int, slots: int) -> None:
        self.blocks, self.slots = blocks, slots
        self.sizes: list[int] = []  # of all blocks ever
        self.chains: dict[tuple[int, int], list[Token]] = defaultdict(list)

    def holds(self, token):
        return isinstance(token, Token) and token.block >= len(self.sizes) - self.blocks

    def extend(self, sequence, tokens, end):
        for at in range(sequence.length, end):
            last = sequence.last
            goes_on = self.holds(last) and last.sequence is sequence
            if not goes_on or self.sizes[last.block] == BLOCK:
                self.sizes.append(0)
                block = len(self.sizes) - 1
            else:
                block = last.block
            token = Token(int(tokens[at]), last if isinstance(last, Token) else None, sequence, block)
            self.sizes[block] += 1
            if goes_on:
                last.after = token
            if at >= GRAM:
                for chain in (0, 1):
                    self.chains[chain, slot_of(chain, sequence.key, tokens, at, self.slots)].append(token)
            sequence.last = token
        sequence.length = end

    def places(self, sequence, tokens, context, others):
        """The length of the longest match, and the newest places that have it."""
        places = []
        chain = self.chains[int(others), slot_of(int(others), sequence.key, tokens, len(context), self.slots)]
        for token in chain[: -CANDIDATES - 1 : -1]:
            if not self.holds(token):
                break
            length, before = 0, token.before
            while self.holds(before) and length < min(CONTEXT, len(context)) and before.value == context[-1 - length]:
                length, before = length + 1, before.before
            found = token.sequence
            if length >= GRAM and (found.key != sequence.key) == others and found.visit >= sequence.oldest:
                places.append((length, token))
        longest = max((length for length, _ in places), default=0)
        return longest, [token for length, token in places if length == longest]

    def lookup(self, sequence, tokens, limit):
        context, limit = tokens[: sequence.length].tolist(), min(limit, len(tokens) - 1 - sequence.length)
        if len(context) < GRAM or limit < 1:
            return None
        found = [self.places(sequence, tokens, context, others) for others in (False, True)]
        others = found[1][0] > found[0][0]
        longest, voters = found[others]
        if not voters:
            return None
        newest = voters[0].sequence
        own = newest is sequence or newest.visit == PROMPT
        source = OTHER if others else 0 if own else 1 if newest.visit == sequence.visit else 2
        voters = [(1 / (1 + rank), token) for rank, token in enumerate(voters)]
        found, shares = [], []
        while voters and len(found) < limit:
            votes = defaultdict(float)
            for weight, token in voters:
                votes[token.value] += weight
            chosen = max(votes, key=votes.get)
            found.append(chosen)
            shares.append(votes[chosen] / sum(weight for weight, _ in voters))
            voters = [(w, t.after) for w, t in voters if t.value == chosen and self.holds(t.after)]
        return Match(found, shares, longest, source)

    def read(self, sequence):
        tokens, token = [], sequence.last
        while self.holds(token):
            tokens.append(token.value)
            token = token.before
        return np.array(tokens[: sequence.length][::-1], np.int32) if len(tokens) >= sequence.length else None


def small(blocks: int) -> TokenIndex:
    """An index of so few blocks that they are used again and again."""
    index = TokenIndex(1)
    pool = index.pool
    index.pool = pool._replace(tokens=pool.tokens[: blocks * BLOCK].copy(), blocks=pool.blocks[:blocks].copy())
    return index


@pytest.fixture
def indices():
    """``indices(blocks)`` returns a TokenIndex of so many blocks, and an ObviousIndex that must do the same."""

    def pair(blocks):
        index = small(blocks)
        return index, ObviousIndex(blocks, index.pool.slots.shape[1])

    return pair
