"""Who scans what: sequences, or pieces of long ones, dealt out to threads and vector lanes."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

REWARD_START, VALUE_START, MASK_START, OUT_START, LENGTH = range(5)
"""Columns of a table: where a sequence begins in each flat array, and how many tokens it has."""
LEAST_CHUNK = 8192
"""Tokens a piece of a cut sequence has at least; below, finding the piece's entry state costs more than waiting."""
ALIGN = 16
SHARES_PER_THREAD = 4


@dataclass(frozen=True)
class Share:
    """What one thread takes at a time: groups of sequences that run side by side.

    Attributes:
        table: [G, lanes, 5] int64; a lane of length 0 is idle.
        states: [G, lanes, 2], next value and running result on entry; the kernel leaves those on exit.
        members: [G, lanes] int64, the row of the caller's table that each lane works on; -1 when idle.
    """

    table: Array
    states: Array
    members: Array


def deal(table: Array, states: Array, threads: int, lanes: int) -> list[Share]:
    """Deal the rows of ``table`` [S, 5], with entry ``states`` [S, 2], into shares of about equal work, longest first.

    Sequences of similar length run side by side, and no thread stays idle as long as there is a sequence for it. There are a
    few shares for each thread, to even out what lengths and a busy machine make uneven.
    """
    rows = np.flatnonzero(table[:, LENGTH])
    if not len(rows):
        return []
    rows = rows[np.argsort(-table[rows, LENGTH], kind="stable")]
    rounds = -(-len(rows) // (threads * lanes))
    groups = np.array_split(rows, min(rounds * threads, len(rows)))
    piles: list[list[Array]] = [[] for _ in range(min(threads * SHARES_PER_THREAD, len(groups)))]
    for index, group in enumerate(groups):
        piles[index % len(piles)].append(group)
    return [_share(pile, table, states, lanes) for pile in piles]


def collect(shares: list[Share], count: int) -> Array:
    """Return the states on exit, [count, 2] in float64, in the order of the table that was dealt."""
    states = np.zeros((count, 2))
    for share in shares:
        used = share.members >= 0
        states[share.members[used]] = share.states[used]
    return states


def too_long(table: Array, threads: int) -> Array:
    """Return the rows of ``table`` to cut in time: with fewer sequences than threads, those long enough to gain."""
    busy = int(np.count_nonzero(table[:, LENGTH]))
    if busy >= threads:
        return np.zeros(0, np.int64)
    return np.flatnonzero(table[:, LENGTH] >= 2 * LEAST_CHUNK)


def cut(table: Array, threads: int, lanes: int) -> tuple[Array, Array]:
    """Cut every row of ``table`` into pieces, enough to fill all lanes of all threads.

    Returns:
        The table of the pieces, those of a row together and the latest in time first, and the row that each belongs to.
    """
    wanted = -(-threads * lanes // len(table))
    pieces, owners = [], []
    for owner, row in enumerate(table):
        length = int(row[LENGTH])
        count = min(wanted, length // LEAST_CHUNK)
        size = -(-length // (count * ALIGN)) * ALIGN
        for first in reversed(range(0, length, size)):
            piece = row + first
            piece[LENGTH] = min(size, length - first)
            pieces.append(piece)
            owners.append(owner)
    return np.stack(pieces), np.array(owners)


def compose(owners: Array, exits: Array, maps: Array) -> Array:
    """Return each piece's entry state, [K, 2], from its exit state on a zero entry and its linear map.

    ``maps`` [K, 3] holds what becomes of the entry: next value = p * next value, running result = c * running result +
    d * next value, as columns p, d, c.
    """
    entries = np.zeros_like(exits)
    for piece in range(1, len(owners)):
        if owners[piece] != owners[piece - 1]:
            continue
        next_value, running = entries[piece - 1]
        p, d, c = maps[piece - 1]
        entries[piece, 0] = exits[piece - 1, 0] + p * next_value
        entries[piece, 1] = exits[piece - 1, 1] + c * running + d * next_value
    return entries


def _share(groups: list[Array], table: Array, states: Array, lanes: int) -> Share:
    members = np.full((len(groups), lanes), -1, np.int64)
    for index, group in enumerate(groups):
        members[index, : len(group)] = group
    used = members >= 0
    lane_table = np.zeros((*members.shape, table.shape[1]), np.int64)
    lane_table[used] = table[members[used]]
    lane_states = np.zeros((*members.shape, 2), states.dtype)
    lane_states[used] = states[members[used]]
    return Share(lane_table, lane_states, members)
