"""A slow, obvious index of tokens, of linked Python objects; and a real one so small that its blocks are used again and again."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import pytest

from rl_accel.drafts.index import BLOCK, CANDIDATES, CONTEXT, GRAM, OTHER, PROMPT, make_pool, slot_of


@dataclass(eq=False)
class Token:
    value: int
    before: "Token | None"
    text: "Text"
    block: int
    after: "Token | None" = None


@dataclass(eq=False)
class Text:
    """A sequence."""

    key: int
    visit: int
    oldest: int = 0
    last: Token | None = None
    length: int = 0


class ObviousIndex:
    """What the functions of :mod:`rl_accel.drafts.index` do."""

    def __init__(self, blocks: int, slots: int) -> None:
        self.blocks, self.slots = blocks, slots
        self.sizes: list[int] = []  # of all blocks ever
        self.chains: dict[tuple[int, int], list[Token]] = defaultdict(list)

    def holds(self, token):
        return token is not None and token.block >= len(self.sizes) - self.blocks

    def extend(self, text, tokens, end):
        for at in range(text.length, end):
            last = text.last
            goes_on = self.holds(last) and last.text is text
            if not goes_on or self.sizes[last.block] == BLOCK:
                self.sizes.append(0)
                block = len(self.sizes) - 1
            else:
                block = last.block
            token = Token(int(tokens[at]), last, text, block)
            self.sizes[block] += 1
            if goes_on:
                last.after = token
            if at >= GRAM:
                for chain in (0, 1):
                    self.chains[chain, slot_of(chain, text.key, tokens, at, self.slots)].append(token)
            text.last = token
        text.length = end

    def places(self, text, tokens, context, others):
        """The length of the longest match, and the newest places that have it."""
        places = []
        chain = self.chains[int(others), slot_of(int(others), text.key, tokens, len(context), self.slots)]
        for token in chain[: -CANDIDATES - 1 : -1]:
            if not self.holds(token):
                break
            length, before = 0, token.before
            while self.holds(before) and length < min(CONTEXT, len(context)) and before.value == context[-1 - length]:
                length, before = length + 1, before.before
            found = token.text
            if length >= GRAM and (found.key != text.key) == others and found.visit >= text.oldest:
                places.append((length, token))
        longest = max((length for length, _ in places), default=0)
        return longest, [token for length, token in places if length == longest]

    def lookup(self, text, tokens, limit):
        """Tokens, shares, how many are the same, and the source; None if nothing is."""
        context, limit = tokens[: text.length].tolist(), min(limit, len(tokens) - 1 - text.length)
        if len(context) < GRAM or limit < 1:
            return None
        found = [self.places(text, tokens, context, others) for others in (False, True)]
        others = found[1][0] > found[0][0]
        longest, voters = found[others]
        if not voters:
            return None
        newest = voters[0].text
        own = newest is text or newest.visit == PROMPT
        source = OTHER if others else 0 if own else 1 if newest.visit == text.visit else 2
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
        return found, shares, longest, source

    def read(self, text):
        tokens, token = [], text.last
        while self.holds(token):
            tokens.append(token.value)
            token = token.before
        return np.array(tokens[: text.length][::-1], np.int32) if len(tokens) >= text.length else None


def small(blocks: int):
    """A pool of so few blocks that they are used again and again."""
    pool = make_pool(1)
    return pool._replace(tokens=pool.tokens[: blocks * BLOCK].copy(), blocks=pool.blocks[:blocks].copy())


@pytest.fixture
def indices():
    """``indices(blocks)`` returns a pool of so many blocks, and an ObviousIndex that must do the same."""

    def pair(blocks):
        pool = small(blocks)
        return pool, ObviousIndex(blocks, pool.slots.shape[1])

    return pair


@pytest.fixture
def text():
    """What makes a :class:`Text`."""
    return Text
