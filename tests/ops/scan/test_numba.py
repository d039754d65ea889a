"""Tests the CPU scan: it has the bits of verl's own functions for every shape, number of threads and process."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from verl.trainer.ppo import core_algos
from verl.utils.torch_functional import masked_whiten

from rl_accel.ops import discounted_returns, gae


def of_verl(c):
    """Whitened advantages, returns and discounted returns by verl's functions."""
    config = SimpleNamespace(gamma=c.gamma)
    _, sums = core_algos.compute_reinforce_plus_plus_outcome_advantage(c.rewards, c.mask, config=config)
    return *core_algos.compute_gae_advantage_return(c.rewards, c.values, c.mask, c.gamma, c.lam), sums


def of_numba(c, **options):
    advantages, returns = gae(c.rewards, c.values, c.mask, c.gamma, c.lam, backend="numba", **options)
    sums = discounted_returns(c.rewards, c.mask, c.gamma, backend="numba", **options)
    return masked_whiten(advantages, c.mask), returns, sums


def test_results_have_the_bits_of_verls_functions(make_case, same_bits):
    for seed in range(240):
        c = make_case(seed)
        assert all(map(same_bits, of_numba(c, num_threads=1 + seed % 3), of_verl(c))), seed


MASKS = (None, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16)
COMPILED = [(torch.float64, mask) for mask in MASKS[:2]] + [(torch.float32, mask) for mask in (MASKS[2], MASKS[-1])]
PAIRS = list(itertools.product((torch.float32, torch.float64), MASKS))


@pytest.mark.slow  # compiles a kernel for each pair
@pytest.mark.parametrize(
    ("dtype", "mask_type"), [pytest.param(*pair, marks=[] if pair in COMPILED else pytest.mark.full) for pair in PAIRS]
)
def test_every_mask_type_gives_the_bits_of_the_loop(dtype, mask_type, make_case, same_bits):
    for seed in (1, 2, 5):
        c = make_case(seed)
        arguments = (c.rewards.to(dtype), c.values.to(dtype), None if mask_type is None else c.mask.to(mask_type))
        ours, loop = (gae(*arguments, c.gamma, c.lam, backend=backend) for backend in ("numba", "naive"))
        assert all(map(same_bits, ours, loop))


def test_the_number_of_threads_does_not_change_a_bit(same_bits):
    torch.manual_seed(7)
    batch = torch.randn(40, 16_400), torch.randn(40, 16_400), (torch.rand(40, 16_400) < 0.8).long()
    for rows in (1, 2, 5, 40):
        rewards, values, mask = (x[:rows] for x in batch)
        c = SimpleNamespace(rewards=rewards, values=values, mask=mask, gamma=0.99, lam=0.95)
        wanted = of_verl(c)
        for threads in (None, 1, 2, 3, 16, 64):
            assert all(map(same_bits, of_numba(c, num_threads=threads), wanted)), (rows, threads)


def test_calls_from_many_threads_at_once_do_not_disturb_each_other(make_case, same_bits):
    cases = [make_case(seed, most_rows=60, most_tokens=900) for seed in range(24)]
    loops = [gae(c.rewards, c.values, c.mask, c.gamma, c.lam, backend="naive") for c in cases]

    def call(index: int) -> bool:
        c = cases[index % len(cases)]
        ours = gae(c.rewards, c.values, c.mask, c.gamma, c.lam, backend="numba", num_threads=3)
        return all(map(same_bits, ours, loops[index % len(cases)]))

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(call, range(200)))


@pytest.mark.slow
def test_works_where_compiled_code_cannot_be_kept_and_in_a_forked_child_after_the_parent_used_its_threads(python):
    done = python(
        """
        import os, torch
        from rl_accel.ops import gae
        ones = torch.ones(2, 3)
        assert gae(ones, ones, backend="numba")[1].tolist() == [[3, 2, 1]] * 2
        from rl_accel.ops.scan import numba
        assert type(numba.gae_rows._cache).__name__ == "NullCache"

        rewards, values = torch.randn(16, 200), torch.randn(16, 200)
        mine = gae(rewards, values, None, 0.99, 0.95, backend="numba", num_threads=4)
        child = os.fork()
        if child == 0:
            theirs = gae(rewards, values, None, 0.99, 0.95, backend="numba", num_threads=4)
            os._exit(0 if all(torch.equal(a, b) for a, b in zip(mine, theirs)) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the forked child found other bits"
        assert torch.equal(gae(rewards, values, None, 0.99, 0.95, backend="numba", num_threads=4)[0], mine[0])
        """,
        NUMBA_CACHE_DIR="/dev/null/nowhere",
        NUMBA_CACHE_LOCATOR_CLASSES="_UserProvidedCacheLocator",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
