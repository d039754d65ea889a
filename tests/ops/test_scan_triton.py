"""The GPU kernels in Triton's interpreter, which runs the same program on CPU tensors, slowly."""

import importlib.util

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (extra [triton])"),
]

CHECK = """
import itertools, torch
from rl_accel.ops import discounted_returns, gae, resolve_backend
from rl_accel.ops.inputs import check
from rl_accel.ops.scan_triton import scan

assert resolve_backend("triton", "cpu") == "triton"
random = torch.Generator().manual_seed(0)
count = 0

def agree(a, b, tolerance):
    global count
    count += 1
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)

"""
PADDED = """
for (rows, tokens), kind in itertools.product([(1, 1), (3, 17), (2, 130), (5, 64)], ["none", "bits", "fractions"]):
    rewards, values = (torch.randn(rows, tokens, generator=random, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(rows, tokens, generator=random)
    mask = {"none": None, "bits": (mask < 0.7).long(), "fractions": mask}[kind]
    for block, programs in ((16, None), (32, 8)):  # few rows for the programs: cut in time
        truth = gae(rewards, values, mask, 0.99, 0.95, backend="naive")
        for a, b in zip(scan(check(rewards, values, mask, None, needs_values=True), 0.99, 0.99 * 0.95,
                             block=block, programs=programs), truth):
            agree(a, b, 1e-10)
        sums = scan(check(rewards, None, mask, None, needs_values=False), 0.9, 0.9, block=block, programs=programs)[0]
        agree(sums, discounted_returns(rewards, mask, 0.9, backend="naive"), 1e-10)
assert count == 4 * 3 * 2 * 3
"""
PACKED = """
offsets = torch.tensor([0, 5, 5, 70, 71, 140])
rewards, values = (torch.randn(140, generator=random, dtype=torch.float64) for _ in range(2))
mask = (torch.rand(140, generator=random) < 0.6).int()
ours = gae(rewards, values, mask, 0.99, 0.95, cu_seqlens=offsets, backend="triton")
for a, b in zip(ours, gae(rewards, values, mask, 0.99, 0.95, cu_seqlens=offsets, backend="naive")):
    agree(a, b, 1e-10)
for shape in ((0, 4), (4, 0)):
    assert gae(torch.zeros(shape), torch.zeros(shape), backend="triton")[0].shape == shape
assert count == 2
"""
HALF = """
for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
    rewards, values = (torch.rand(3, 50, generator=random).to(dtype) for _ in range(2))
    mask = torch.rand(3, 50, generator=random) < 0.8
    ours = gae(rewards, values, mask, 0.9, 0.5, backend="triton")
    for a, b in zip(ours, gae(rewards.double(), values.double(), mask, 0.9, 0.5, backend="naive")):
        assert a.dtype == dtype
        agree(a.double(), b, tolerance * 4)
assert count == 6
"""
NOT_FINITE = """
for value in (float("inf"), float("nan")):
    rewards, values = torch.randn(4, 60, generator=random), torch.randn(4, 60, generator=random)
    rewards[1, 40], values[2, 20] = value, value
    mask = (torch.rand(4, 60, generator=random) < 0.7).long()
    ours = gae(rewards, values, mask, 0.99, 0.95, backend="triton")
    for a, b in zip(ours, gae(rewards, values, mask, 0.99, 0.95, backend="naive")):
        agree(a, b, 1e-5)
assert count == 4
"""


@pytest.mark.parametrize("part", [PADDED, PACKED, HALF, NOT_FINITE], ids=["padded", "packed", "half", "not finite"])
def test_agrees_with_the_loop(python, part):
    done = python(CHECK + part, TRITON_INTERPRET="1", timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]


def test_without_a_gpu_it_is_refused_by_name(python):
    done = python("""
        import torch
        from rl_accel.errors import BackendMissing
        from rl_accel.ops import gae
        if torch.cuda.is_available():
            raise SystemExit(0)
        try:
            gae(torch.zeros(1, 1), torch.zeros(1, 1), backend="triton")
        except BackendMissing as error:
            assert "there is no CUDA device" in str(error), error
        else:
            raise SystemExit("it ran")
    """)
    assert done.returncode == 0, done.stderr
