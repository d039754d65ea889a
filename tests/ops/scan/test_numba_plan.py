"""Dealing sequences to threads and lanes: all of them, once, evenly."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rl_accel.ops.scan import numba as plan


def table_of(lengths):
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    return np.column_stack([starts, starts, starts, starts, lengths]).astype(np.int64)


@given(
    lengths=st.lists(st.integers(0, 1000), min_size=1, max_size=80), threads=st.integers(1, 20), lanes=st.integers(1, 8)
)
def test_every_sequence_with_tokens_is_dealt_once(lengths, threads, lanes):
    table = table_of(lengths)
    shares = plan.deal(table, np.zeros((len(table), 2)), threads, lanes)
    members = np.concatenate([share.members.ravel() for share in shares]) if shares else np.zeros(0, int)
    assert sorted(members[members >= 0]) == [i for i, length in enumerate(lengths) if length]
    for share in shares:
        used = share.members >= 0
        assert (share.table[used] == table[share.members[used]]).all()
        assert (share.table[~used] == 0).all()
        # the kernel walks as far as the first lane of a group says
        assert (share.table[:, 0, plan.LENGTH] == share.table[:, :, plan.LENGTH].max(1)).all()
    assert sum(len(share.table) for share in shares) >= min(threads, sum(map(bool, lengths)))


@given(lengths=st.lists(st.integers(1, 10**6), min_size=1, max_size=6), threads=st.integers(1, 32))
def test_pieces_cover_each_sequence_from_its_end_to_its_start(lengths, threads):
    table = table_of(lengths)
    rows = plan.too_long(table, threads)
    if not len(rows):
        return
    pieces, owners = plan.cut(table[rows], threads, 8)
    assert (pieces[:, plan.LENGTH] > 0).all()
    for owner, row in enumerate(table[rows]):
        own = pieces[owners == owner]
        assert own[-1, plan.OUT_START] == row[plan.OUT_START]
        assert (own[1:, plan.OUT_START] + own[1:, plan.LENGTH] == own[:-1, plan.OUT_START]).all()
        assert own[0, plan.OUT_START] + own[0, plan.LENGTH] == row[plan.OUT_START] + row[plan.LENGTH]


def test_only_long_sequences_are_cut_and_only_where_threads_would_idle():
    long, short = 2 * plan.LEAST_CHUNK, 2 * plan.LEAST_CHUNK - 1
    assert plan.too_long(table_of([long, short]), 3).tolist() == [0]
    assert plan.too_long(table_of([long, long]), 2).tolist() == []
