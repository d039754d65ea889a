"""Script of test_triton.py: compares the programs of the GPU scan, run by triton's interpreter, with a loop in float64."""

import itertools

import pytest
import torch

from rl_accel.ops import available_backends, discounted_returns, gae, resolve_backend
from rl_accel.ops.inputs import check_scan
from rl_accel.ops.scan import triton as scan_triton

STEPS = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2**-7, torch.float16: 2**-10}
MASKS = (None, torch.bool, torch.int64, torch.int8, torch.float32)
NAMED = tuple(zip((*STEPS, torch.float32), MASKS, strict=True))


def agree(rewards, values, mask, bounds=None, rtol=1e-12, **options):
    """Compare advantages, returns and discounted returns with those of the loop."""
    loop, exact = {"cu_seqlens": bounds, "backend": "naive"}, rewards.double()
    wanted = [gae(exact, values.double(), mask, 0.99, 0.95, **loop), [discounted_returns(exact, mask, 0.99, **loop)]]
    for given, results in zip((values, None), wanted, strict=True):
        inputs = check_scan(rewards, given, mask, 0.99, 0.95, bounds, None, None, needs_values=given is not None)
        for a, b in zip(scan_triton.scan(inputs, **options), results, strict=True):
            assert a.dtype is rewards.dtype
            torch.testing.assert_close(a.double(), b, rtol=rtol, atol=rtol, equal_nan=True)


def doubles(seed, *shape):
    torch.manual_seed(seed)
    return (torch.randn(*shape, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize(
    ("dtype", "mask_type"),
    [pytest.param(*pair, marks=[] if pair in NAMED else pytest.mark.full) for pair in itertools.product(STEPS, MASKS)],
)
def test_every_dtype_and_mask_agrees_with_the_loop(dtype, mask_type):
    rewards, values, mask = (x.to(dtype) for x in doubles(0, 2, 40))
    mask = mask.double().sigmoid().float()
    mask = None if mask_type is None else mask if mask_type is torch.float32 else (mask < 0.8).to(mask_type)
    agree(rewards, values, mask, rtol=STEPS[dtype], block=32)


@pytest.mark.parametrize("tokens", [1, 16, 17, 131])
def test_any_length_agrees_with_the_loop(tokens):
    rewards, values, mask = doubles(1, 2, tokens)
    for kind in (mask < 0.5, mask.sigmoid()):
        agree(rewards, values, kind, block=16)


def test_packed_sequences_agree_with_the_loop():
    bounds = torch.tensor([0, 0, 5, 105, 106, 106, 190])
    rewards, values, mask = doubles(2, 190)
    for kind in (None, mask < 0.5, mask.sigmoid()):
        agree(rewards, values, kind, bounds, block=16)


def test_memory_layout_does_not_matter():
    wide, *_ = doubles(3, 4, 90)
    agree(wide[:, 20:60], wide[:1, :40].expand(4, 40), (wide > 0)[:, 50:], block=16)
    agree(wide.t(), wide.t() * 2, (wide > 0).t(), block=16)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("into_values", [False, True])
def test_what_is_not_finite_spreads_as_in_the_loop(value, into_values):
    for place in (0, 12):
        rewards, values, mask = doubles(4, 2, 20)
        (values if into_values else rewards)[1, place] = value
        for kind in (mask < 0.5, mask.sigmoid()):
            agree(rewards, values, kind, block=8)


def test_the_public_calls_reach_it():
    assert available_backends()["triton"] is None
    assert resolve_backend("triton", "cpu") == "triton"
    ones, empty = torch.ones(2, 3), torch.empty(0, 5)
    assert gae(ones, ones, backend="triton")[1].tolist() == [[3, 2, 1]] * 2
    assert discounted_returns(ones, gamma=0.5, backend="triton").tolist() == [[1.75, 1.5, 1]] * 2
    assert gae(empty, empty, backend="triton")[0].shape == (0, 5)
    with pytest.raises(ValueError, match="mask wants values between 0 and 1"):
        gae(ones, ones, 2 * ones, backend="triton")
