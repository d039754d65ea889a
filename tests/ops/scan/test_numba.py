"""The CPU scan: the bits of verl's own functions, whatever the shape, the threads and the process."""

import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_accel.ops import discounted_returns, gae
from rl_accel.ops.scan import numba as scan_numba

CASES = 240


@pytest.fixture(scope="module")
def stock():
    from verl.trainer.ppo import core_algos

    return core_algos


def test_gae_has_the_bits_of_verls_function(stock, case, same_bits, monkeypatch):
    from verl.utils.torch_functional import masked_whiten

    for seed in range(CASES):
        c = case(seed)
        monkeypatch.setattr(scan_numba, "STREAM_BYTES", 0 if seed % 2 else 1 << 40)
        whitened, returns = stock.compute_gae_advantage_return(c.rewards, c.values, c.mask, c.gamma, c.lam)
        ours, our_returns = gae(c.rewards, c.values, c.mask, c.gamma, c.lam, backend="numba", num_threads=1 + seed % 3)
        assert same_bits(our_returns, returns), seed
        assert same_bits(masked_whiten(ours, c.mask), whitened), seed


def test_discounted_returns_have_the_bits_of_verls_function(stock, case, same_bits, monkeypatch):
    for seed in range(CASES):
        c = case(seed)
        monkeypatch.setattr(scan_numba, "STREAM_BYTES", 0 if seed % 2 else 1 << 40)
        config = SimpleNamespace(gamma=c.gamma)
        _, returns = stock.compute_reinforce_plus_plus_outcome_advantage(c.rewards, c.mask, config=config)
        assert same_bits(discounted_returns(c.rewards, c.mask, c.gamma, backend="numba"), returns), seed


@pytest.mark.slow  # compiles a kernel for each pair
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "mask_type", [None, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16]
)
def test_every_mask_type_gives_the_bits_of_the_loop(dtype, mask_type, case, same_bits):
    for seed in (1, 2, 5):
        c = case(seed)
        arguments = (c.rewards.to(dtype), c.values.to(dtype), None if mask_type is None else c.mask.to(mask_type))
        for a, b in zip(
            gae(*arguments, c.gamma, c.lam, backend="numba"),
            gae(*arguments, c.gamma, c.lam, backend="naive"),
            strict=True,
        ):
            assert same_bits(a, b)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 20),
    tokens=st.sampled_from([1, 2, 15, 16, 17, 100, 500, 2047, 2048, 2049]),
    threads=st.integers(1, 5),
    seed=st.integers(0, 2**30),
)
def test_fractional_masks_give_the_bits_of_the_loop(rows, tokens, threads, seed, same_bits):
    random = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(rows, tokens, generator=random) for _ in range(2))
    mask = torch.rand(rows, tokens, generator=random)
    ours = gae(rewards, values, mask, 0.99, 0.95, backend="numba", num_threads=threads)
    loop = gae(rewards, values, mask, 0.99, 0.95, backend="naive")
    assert all(same_bits(a, b) for a, b in zip(ours, loop, strict=True))
    assert same_bits(
        discounted_returns(rewards, mask, 0.9, backend="numba", num_threads=threads),
        discounted_returns(rewards, mask, 0.9, backend="naive"),
    )


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
def test_the_number_of_threads_does_not_change_a_bit(rows, stock, same_bits):
    from verl.utils.torch_functional import masked_whiten

    torch.manual_seed(7)
    rewards, values = torch.randn(rows, 16_400), torch.randn(rows, 16_400)
    mask = (torch.rand(rows, 16_400) < 0.8).long()
    whitened, returns = stock.compute_gae_advantage_return(rewards, values, mask, 0.99, 0.95)
    config = SimpleNamespace(gamma=0.99)
    _, sums = stock.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config=config)
    for threads in (None, 1, 2, 3, 16, 64):
        ours, our_returns = gae(rewards, values, mask, 0.99, 0.95, backend="numba", num_threads=threads)
        assert same_bits(our_returns, returns), threads
        assert same_bits(masked_whiten(ours, mask), whitened), threads
        assert same_bits(discounted_returns(rewards, mask, 0.99, backend="numba", num_threads=threads), sums), threads


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_spreads_as_in_the_loop(value, same_bits):
    torch.manual_seed(3)
    for place, into_values, fractional in ((150, 0, 0), (150, 1, 0), (700, 0, 1), (700, 1, 1), (0, 1, 0), (999, 0, 0)):
        rewards, values = torch.randn(2, 1000), torch.randn(2, 1000)
        (values if into_values else rewards)[1, place] = value
        mask = torch.rand(2, 1000)
        mask = mask if fractional else (mask < 0.7).long()
        ours = gae(rewards, values, mask, 0.99, 0.95, backend="numba", num_threads=4)
        loop = gae(rewards, values, mask, 0.99, 0.95, backend="naive")
        for pair in zip(ours, loop, strict=True):
            # a sum of two NaNs may have the bits of either
            assert same_bits(*(torch.where(x.isnan(), torch.nan, x) for x in pair))


def test_an_untouched_row_keeps_its_bits_beside_one_with_nan(same_bits):
    rewards, values = torch.randn(8, 300), torch.randn(8, 300)
    clean = gae(rewards, values, None, 0.99, 0.95, backend="numba")
    rewards[3, 200] = float("nan")
    dirty = gae(rewards, values, None, 0.99, 0.95, backend="numba")
    others = [row for row in range(8) if row != 3]
    assert all(same_bits(a[others], b[others]) for a, b in zip(dirty, clean, strict=True))


def test_calls_from_many_threads_at_once_do_not_disturb_each_other(case, same_bits):
    cases = [case(seed, most_rows=60, most_tokens=900) for seed in range(24)]
    loops = [gae(c.rewards, c.values, c.mask, c.gamma, c.lam, backend="naive") for c in cases]

    def call(index: int) -> bool:
        c = cases[index % len(cases)]
        ours = gae(c.rewards, c.values, c.mask, c.gamma, c.lam, backend="numba", num_threads=3)
        return all(same_bits(a, b) for a, b in zip(ours, loops[index % len(cases)], strict=True))

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(call, range(200)))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_works_in_a_forked_child_after_the_parent_used_its_threads(python):
    done = python(
        """
        import os, torch
        from rl_accel.ops import gae
        rewards, values = torch.randn(16, 200), torch.randn(16, 200)
        mine = gae(rewards, values, None, 0.99, 0.95, backend="numba", num_threads=4)
        child = os.fork()
        if child == 0:
            theirs = gae(rewards, values, None, 0.99, 0.95, backend="numba", num_threads=4)
            os._exit(0 if all(torch.equal(a, b) for a, b in zip(mine, theirs)) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(gae(rewards, values, None, 0.99, 0.95, backend="numba", num_threads=4)[0], mine[0])
        """,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_works_where_compiled_code_cannot_be_kept(python):
    done = python(
        """
        import torch
        from rl_accel.ops import gae
        ones = torch.ones(2, 3)
        assert gae(ones, ones, backend="numba")[1].tolist() == [[3, 2, 1]] * 2
        from rl_accel.ops.scan import numba
        assert type(numba.scan_lanes._cache).__name__ == "NullCache"
        """,
        NUMBA_CACHE_DIR="/dev/null/nowhere",
        NUMBA_CACHE_LOCATOR_CLASSES="_UserProvidedCacheLocator",
    )
    assert done.returncode == 0, done.stderr


def test_arguments_are_left_alone_and_memory_is_not_shared(case):
    c = case(4)
    before = [x.clone() for x in (c.rewards, c.values, c.mask)]
    advantages, returns = gae(c.rewards, c.values, c.mask, backend="numba")
    advantages.zero_()
    returns.zero_()
    for now, then in zip((c.rewards, c.values, c.mask), before, strict=True):
        assert torch.equal(now, then)


@given(lengths=st.lists(st.integers(0, 1000), min_size=1, max_size=80), threads=st.integers(1, 20))
def test_every_sequence_with_tokens_is_dealt_once_and_evenly(lengths, threads):
    lengths = np.array(lengths)
    shares = scan_numba.deal(lengths, threads)
    groups = np.concatenate(shares) if shares else np.zeros((0, 8), int)
    assert sorted(groups[groups >= 0]) == np.flatnonzero(lengths).tolist()
    # the kernel walks as far as the first lane of a group says
    tokens = np.where(groups >= 0, lengths[groups], 0)
    assert (tokens[:, 0] == tokens.max(1)).all()
    assert len(groups) >= min(threads, np.count_nonzero(lengths))
