"""The public calls: every backend gives what the loop gives in float64, and every wrong argument is named."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_accel.errors import BackendMissing
from rl_accel.ops import available_backends, discounted_returns, gae, resolve_backend

CPU_BACKENDS = ("naive", "chunk", "numba")
OK = {"rewards": torch.zeros(2, 3), "values": torch.zeros(2, 3), "mask": torch.ones(2, 3)}


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 9),
    tokens=st.integers(0, 400),
    chunk=st.none() | st.integers(1, 500),
    kind=st.sampled_from(["none", "bits", "fractions"]),
    rates=st.sampled_from([(1.0, 1.0), (0.99, 0.95), (0.5, 0.0), (0.0, 1.0)]),
    seed=st.integers(0, 2**30),
)
def test_chunks_agree_with_the_loop(rows, tokens, chunk, kind, rates, seed):
    random = torch.Generator().manual_seed(seed)
    rewards, values, mask = (torch.rand(rows, tokens, generator=random, dtype=torch.float64) - 0.5 for _ in range(3))
    mask = {"none": None, "bits": mask < 0.2, "fractions": mask + 0.5}[kind]
    for ours, loop in zip(
        gae(rewards, values, mask, *rates, backend="chunk", chunk_size=chunk),
        gae(rewards, values, mask, *rates, backend="naive"),
        strict=True,
    ):
        torch.testing.assert_close(ours, loop, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        discounted_returns(rewards, mask, rates[0], backend="chunk", chunk_size=chunk),
        discounted_returns(rewards, mask, rates[0], backend="naive"),
        rtol=1e-10,
        atol=1e-10,
    )


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("masked", [False, True])
def test_packed_sequences_are_the_same_as_padded_ones(backend, masked):
    random = torch.Generator().manual_seed(5)
    lengths = [7, 0, 1, 300, 64, 0, 2]
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    rewards, values = (torch.randn(sum(lengths), generator=random, dtype=torch.float64) for _ in range(2))
    mask = (torch.rand(sum(lengths), generator=random) < 0.7).long() if masked else None
    advantages, returns = gae(rewards, values, mask, 0.99, 0.95, cu_seqlens=offsets, backend=backend)
    sums = discounted_returns(rewards, mask, 0.9, cu_seqlens=offsets, backend=backend)
    for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        row = [None if x is None else x[None, first:last] for x in (rewards, values, mask)]
        alone = gae(*row, 0.99, 0.95, backend="naive")
        torch.testing.assert_close(advantages[first:last], alone[0][0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(returns[first:last], alone[1][0], rtol=1e-12, atol=1e-12)
        loop = discounted_returns(row[0], row[2], 0.9, backend="naive")
        torch.testing.assert_close(sums[first:last], loop[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(("dtype", "close"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)])
def test_other_precisions_are_near_the_truth_and_keep_their_dtype(backend, dtype, close):
    random = torch.Generator().manual_seed(1)
    rewards, values = (torch.rand(4, 200, generator=random).to(dtype) for _ in range(2))
    mask = torch.rand(4, 200, generator=random) < 0.8
    found = gae(rewards, values, mask, 0.9, 0.5, backend=backend)
    truth = gae(rewards.double(), values.double(), mask, 0.9, 0.5, backend="naive")
    for ours, exact in zip(found, truth, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - exact).norm() / exact.norm() < close


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_strides_do_not_matter_and_nothing_is_tracked(backend):
    random = torch.Generator().manual_seed(2)
    wide = torch.randn(6, 40, generator=random, dtype=torch.float64, requires_grad=True)
    for view in (wide[:, ::2], wide.t(), wide[::2], wide[:, 3:9]):
        plain = view.detach().contiguous()
        ours = gae(view, view, view > 0, 0.9, 0.9, backend=backend)
        loop = gae(plain, plain, plain > 0, 0.9, 0.9, backend="naive")
        for a, b in zip(ours, loop, strict=True):
            assert a.is_contiguous()
            assert not a.requires_grad
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (3, 0)])
def test_nothing_in_gives_nothing_out(backend, shape):
    empty = torch.empty(shape)
    assert [x.shape for x in gae(empty, empty, backend=backend)] == [shape, shape]
    assert discounted_returns(empty, backend=backend).shape == shape
    packed = torch.empty(0)
    assert gae(packed, packed, cu_seqlens=torch.tensor([0]), backend=backend)[0].shape == (0,)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rewards": [[0.0]]}, TypeError, r"rewards wants a torch\.Tensor, found list"),
        (
            {"rewards": torch.zeros(2, 3, dtype=torch.int64)},
            TypeError,
            r"rewards wants one of the dtypes .*found int64",
        ),
        ({"rewards": torch.zeros(3)}, ValueError, r"rewards wants shape \[B, T\], found \[3\]"),
        ({"values": torch.zeros(2, 4)}, ValueError, r"values wants the shape of rewards, \[2, 3\], found \[2, 4\]"),
        ({"values": torch.zeros(2, 3).double()}, ValueError, r"values wants the dtype of rewards"),
        (
            {"values": torch.zeros(2, 3, device="meta")},
            ValueError,
            r"values wants the device of rewards, cpu, found meta",
        ),
        ({"mask": torch.ones(2, 2)}, ValueError, r"mask wants the shape of rewards"),
        ({"mask": torch.full((2, 3), 2)}, ValueError, r"mask wants values between 0 and 1"),
        ({"mask": torch.full((2, 3), -0.5)}, ValueError, r"mask wants values between 0 and 1"),
        ({"mask": torch.full((2, 3), float("nan"))}, ValueError, r"mask wants values between 0 and 1"),
        ({"mask": torch.zeros(2, 3, dtype=torch.complex64)}, TypeError, r"mask wants one of the dtypes"),
        ({"gamma": 1.5}, ValueError, r"gamma wants a number between 0 and 1, found 1\.5"),
        ({"gamma": float("nan")}, ValueError, r"gamma wants a number between 0 and 1, found nan"),
        ({"lam": -0.1}, ValueError, r"lam wants a number between 0 and 1, found -0\.1"),
        ({"lam": "0.9"}, TypeError, r"lam wants a number between 0 and 1, found '0\.9'"),
        ({"chunk_size": 0}, ValueError, r"chunk_size wants a whole number of at least 1"),
        ({"num_threads": 1.5}, TypeError, r"num_threads wants a whole number of at least 1"),
        ({"backend": "nunba"}, ValueError, r"backend wants auto or one of .*\(did you mean numba\?\)"),
        ({"cu_seqlens": torch.tensor([0, 6])}, ValueError, r"rewards wants shape \[N\], packed"),
    ],
)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_wrong_argument_is_named(backend, change, error, message):
    with pytest.raises(error, match=message):
        gae(**{**OK, "backend": backend, **change})


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 4], "from 0 to 6"),
        ([1, 6], "from 0 to 6"),
        ([0, 4, 2, 6], "never fall"),
        ([[0, 6]], r"wants shape \[S \+ 1\]"),
    ],
)
def test_wrong_offsets_are_named(offsets, message):
    with pytest.raises(ValueError, match=message):
        gae(torch.zeros(6), torch.zeros(6), cu_seqlens=torch.tensor(offsets))


def test_auto_takes_the_best_that_is_here():
    assert resolve_backend("auto", "cpu") == "numba"
    assert available_backends()["naive"] is available_backends()["chunk"] is None
    assert resolve_backend("auto", "meta") == "chunk"


def test_a_backend_that_cannot_run_says_why():
    reason = available_backends()["triton"]
    if reason is None:
        pytest.skip("triton can run in this process")
    with pytest.raises(BackendMissing, match="backend 'triton' was asked for, but "):
        gae(**OK, backend="triton")
