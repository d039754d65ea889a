"""The CPU scan: the bits of verl's own functions, whatever the shape, the threads and the process."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from rl_accel.ops import discounted_returns, gae
from rl_accel.ops.scan import numba as scan_numba


def test_results_have_the_bits_of_verls_functions(core_algos, case, same_bits, monkeypatch):
    from verl.utils.torch_functional import masked_whiten

    for seed in range(240):
        c = case(seed)
        monkeypatch.setattr(scan_numba, "STREAM_BYTES", 0 if seed % 2 else 1 << 40)
        whitened, returns = core_algos.compute_gae_advantage_return(c.rewards, c.values, c.mask, c.gamma, c.lam)
        ours, our_returns = gae(c.rewards, c.values, c.mask, c.gamma, c.lam, backend="numba", num_threads=1 + seed % 3)
        assert same_bits(our_returns, returns), seed
        assert same_bits(masked_whiten(ours, c.mask), whitened), seed
        config = SimpleNamespace(gamma=c.gamma)
        _, sums = core_algos.compute_reinforce_plus_plus_outcome_advantage(c.rewards, c.mask, config=config)
        assert same_bits(discounted_returns(c.rewards, c.mask, c.gamma, backend="numba"), sums), seed


MASKS = (None, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16)
COMPILED = [(torch.float64, mask) for mask in MASKS[:2]] + [(torch.float32, mask) for mask in (MASKS[2], MASKS[-1])]
PAIRS = list(itertools.product((torch.float32, torch.float64), MASKS))


@pytest.mark.slow  # compiles a kernel for each pair
@pytest.mark.parametrize(
    ("dtype", "mask_type"), [pytest.param(*pair, marks=[] if pair in COMPILED else pytest.mark.full) for pair in PAIRS]
)
def test_every_mask_type_gives_the_bits_of_the_loop(dtype, mask_type, case, same_bits):
    for seed in (1, 2, 5):
        c = case(seed)
        arguments = (c.rewards.to(dtype), c.values.to(dtype), None if mask_type is None else c.mask.to(mask_type))
        ours, loop = (gae(*arguments, c.gamma, c.lam, backend=backend) for backend in ("numba", "naive"))
        assert all(same_bits(a, b) for a, b in zip(ours, loop, strict=True))


def test_the_number_of_threads_does_not_change_a_bit(core_algos, same_bits):
    from verl.utils.torch_functional import masked_whiten

    torch.manual_seed(7)
    rewards, values = torch.randn(40, 16_400), torch.randn(40, 16_400)
    mask = (torch.rand(40, 16_400) < 0.8).long()
    whitened, returns = core_algos.compute_gae_advantage_return(rewards, values, mask, 0.99, 0.95)
    config = SimpleNamespace(gamma=0.99)
    _, sums = core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config=config)
    for rows, threads in itertools.product((1, 2, 5, 40), (None, 1, 2, 3, 16, 64)):
        options = {"backend": "numba", "num_threads": threads}
        ours, our_returns = gae(rewards[:rows], values[:rows], mask[:rows], 0.99, 0.95, **options)
        our_sums = discounted_returns(rewards[:rows], mask[:rows], 0.99, **options)
        assert same_bits(our_returns, returns[:rows]), (rows, threads)
        assert same_bits(our_sums, sums[:rows]), (rows, threads)
        assert rows < 40 or same_bits(masked_whiten(ours, mask), whitened), threads


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
def test_works_where_compiled_code_cannot_be_kept_and_in_a_forked_child_after_the_parent_used_its_threads(python):
    done = python(
        """
        import os, torch
        from rl_accel.ops import gae
        ones = torch.ones(2, 3)
        assert gae(ones, ones, backend="numba")[1].tolist() == [[3, 2, 1]] * 2
        from rl_accel.ops.scan import numba
        assert type(numba.scan_lanes._cache).__name__ == "NullCache"

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
