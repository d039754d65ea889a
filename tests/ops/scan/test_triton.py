"""The GPU scan, run by triton's interpreter on the CPU: the same programs, block by block, without a device.

The interpreter is chosen when triton is imported, so each test runs in a process of its own.
"""

import importlib.util

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.slow,
]

COMMON = """
import itertools, torch
from rl_accel.ops import discounted_returns, gae
from rl_accel.ops.inputs import check_scan
from rl_accel.ops.scan import triton as scan_triton

def both(rewards, values, mask, bounds, gamma=0.99, lam=0.95, **options):
    inputs = check_scan(rewards, values, mask, gamma, lam, bounds, None, None, needs_values=values is not None)
    ours = scan_triton.scan(inputs, **options)
    wide = [None if x is None else x.double() for x in (rewards, values)]
    if values is None:
        return ours, (discounted_returns(wide[0], mask, gamma, cu_seqlens=bounds, backend="naive"),)
    return ours, gae(*wide, mask, gamma, lam, cu_seqlens=bounds, backend="naive")

def agree(pair, rtol):
    for a, b in zip(*pair, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=rtol, equal_nan=True)
"""


@pytest.fixture
def interpreted(python):
    def run(source: str) -> None:
        done = python(COMMON + source, TRITON_INTERPRET="1", timeout=500)
        assert done.returncode == 0, done.stderr

    return run


def test_every_dtype_and_mask_agrees_with_the_loop(interpreted):
    interpreted("""
torch.manual_seed(0)
steps = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2**-7, torch.float16: 2**-10}
masks = (None, torch.bool, torch.int64, torch.int8, torch.float32)
for (dtype, rtol), mask_type in itertools.product(steps.items(), masks):
    rewards, values, mask = torch.randn(2, 40).to(dtype), torch.randn(2, 40).to(dtype), torch.rand(2, 40)
    mask = None if mask_type is None else mask if mask_type is torch.float32 else (mask < 0.8).to(mask_type)
    agree(both(rewards, values, mask, None, block=32), rtol)
    agree(both(rewards, None, mask, None, block=32), rtol)
    assert both(rewards, values, mask, None, block=32)[0][0].dtype is dtype
""")


def test_any_length_whole_or_cut_in_time_agrees_with_the_loop(interpreted):
    interpreted("""
torch.manual_seed(1)
for tokens in (1, 16, 17, 131):
    rewards, values, mask = (torch.randn(2, tokens, dtype=torch.float64) for _ in range(3))
    for kind in (mask < 0.5, mask.sigmoid()):
        for programs in (1, 64):
            agree(both(rewards, values, kind, None, block=16, programs=programs), 1e-12)
            agree(both(rewards, None, kind, None, block=16, programs=programs), 1e-12)
assert scan_triton._pieces(2, 200, 16, 64) == (4, 64)
assert scan_triton._pieces(2, 200, 16, 1) == (1, 208)
""")


def test_packed_sequences_agree_with_the_loop(interpreted):
    interpreted("""
torch.manual_seed(2)
bounds = torch.tensor([0, 0, 5, 105, 106, 106, 190])
rewards, values, mask = (torch.randn(190, dtype=torch.float64) for _ in range(3))
for kind, programs in itertools.product((None, mask < 0.5, mask.sigmoid()), (1, 64)):
    agree(both(rewards, values, kind, bounds, block=16, programs=programs), 1e-12)
    agree(both(rewards, None, kind, bounds, block=16, programs=programs), 1e-12)
""")


def test_memory_layout_does_not_matter(interpreted):
    interpreted("""
torch.manual_seed(3)
wide = torch.randn(4, 90, dtype=torch.float64)
agree(both(wide[:, 20:60], wide[:1, :40].expand(4, 40), (wide > 0)[:, 50:], None, block=16), 1e-12)
agree(both(wide.t(), wide.t() * 2, (wide > 0).t(), None, block=16), 1e-12)
""")


def test_what_is_not_finite_spreads_as_in_the_loop(interpreted):
    interpreted("""
torch.manual_seed(4)
for value, into_values, place, programs in itertools.product(
    (float("inf"), float("nan")), (0, 1), (0, 12), (1, 64)
):
    rewards, values, mask = (torch.randn(2, 20, dtype=torch.float64) for _ in range(3))
    (values if into_values else rewards)[1, place] = value
    for kind in (mask < 0.5, mask.sigmoid()):
        agree(both(rewards, values, kind, None, block=8, programs=programs), 1e-12)
        if not into_values:
            agree(both(rewards, None, kind, None, block=8, programs=programs), 1e-12)
""")


def test_the_public_calls_reach_it(interpreted):
    interpreted("""
from rl_accel.ops import available_backends, resolve_backend
assert available_backends()["triton"] is None
assert resolve_backend("triton", "cpu") == "triton"
ones = torch.ones(2, 3)
assert gae(ones, ones, backend="triton")[1].tolist() == [[3, 2, 1]] * 2
assert discounted_returns(ones, gamma=0.5, backend="triton").tolist() == [[1.75, 1.5, 1]] * 2
empty = torch.empty(0, 5)
assert gae(empty, empty, backend="triton")[0].shape == (0, 5)
try:
    gae(ones, ones, 2 * ones, backend="triton")
except ValueError as error:
    assert "mask wants values between 0 and 1" in str(error)
else:
    raise SystemExit("a mask of twos was taken")
""")
