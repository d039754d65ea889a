"""Tests the public functions of the scan: choice of backend, refused arguments, and properties of all backends."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_accel.errors import BackendMissing, RlAccelError
from rl_accel.ops import available_backends, discounted_returns, gae, gae_of_lists, resolve_backend

CPU_BACKENDS = ["naive", "chunk", "numba"]
every_cpu_backend = pytest.mark.parametrize("backend", CPU_BACKENDS)
PAIR = torch.ones(2, 3)


def results(rewards, values, mask, gamma=0.99, lam=0.95, **options):
    """Advantages, returns and discounted returns."""
    return *gae(rewards, values, mask, gamma, lam, **options), discounted_returns(rewards, mask, gamma, **options)


def test_a_hand_made_example():
    """gamma = lam = 1/2; the middle token is an observation: stepped over, and shown the advantage it carries."""
    rewards = torch.tensor([[1.0, 8.0, 2.0]])
    values = torch.tensor([[1.0, 4.0, 1.0]])
    mask = torch.tensor([[1, 0, 1]])
    advantages, returns = gae(rewards, values, mask, 0.5, 0.5)
    # A2 = 2 - 1; A1 = A2; A0 = 1 + 1/2 * 1 - 1 + 1/4 * 1
    assert advantages.tolist() == [[0.75, 1.0, 1.0]]
    assert returns.tolist() == [[1.75, 5.0, 2.0]]
    # G2 = 2; the observation shows 0 and its reward is not counted; G0 = 1 + 1/2 * 2
    assert discounted_returns(rewards, mask, 0.5).tolist() == [[2.0, 0.0, 2.0]]


@settings(max_examples=60)
@given(
    rows=st.integers(1, 20),
    tokens=st.sampled_from([*range(1, 100, 3), 300, 2047, 2048, 2049]),
    chunk_size=st.none() | st.integers(1, 400),
    threads=st.integers(1, 5),
    kind=st.sampled_from(["none", "bits", "fractions"]),
    rates=st.sampled_from([(1.0, 1.0), (0.99, 0.95), (0.5, 1.0), (0.0, 0.5), (1.0, 0.0)]),
    seed=st.integers(0, 2**30),
)
def test_fast_backends_agree_with_the_loop(rows, tokens, chunk_size, threads, kind, rates, seed, same_bits):
    """In float32 numba has the bits of the loop; in float64 the chunk scan is within rounding. No mask means a mask of ones."""
    random = torch.Generator().manual_seed(seed)
    rewards, values, mask = (torch.randn(rows, tokens, generator=random, dtype=torch.float64) for _ in range(3))
    mask = {"none": None, "bits": mask < 0.7, "fractions": mask.sigmoid()}[kind]

    def found(dtype, backend):
        its_mask = torch.ones(rows, tokens) if mask is None and backend == "naive" else mask
        arguments = rewards.to(dtype), values.to(dtype), its_mask.to(dtype) if kind == "fractions" else its_mask
        return results(*arguments, *rates, backend=backend, chunk_size=chunk_size, num_threads=threads)

    torch.testing.assert_close(found(torch.float64, "chunk"), found(torch.float64, "naive"), rtol=1e-11, atol=1e-11)
    assert all(map(same_bits, found(torch.float32, "numba"), found(torch.float32, "naive")))


@pytest.mark.parametrize("backend", ["chunk", "numba"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_not_finite_spreads_as_in_the_loop(backend, value, packed, same_bits):
    torch.manual_seed(1)
    for place, into_values, fractional in ((150, 0, 0), (150, 1, 0), (390, 0, 1), (350, 1, 1), (0, 1, 0), (399, 0, 0)):
        rewards, values, mask = torch.randn(3, 400), torch.randn(3, 400), torch.rand(3, 400)
        (values if into_values else rewards)[1, place] = value
        mask = mask if fractional else (mask < 0.7).long()
        bounds = None
        if packed:
            rewards, values, mask = rewards.flatten(), values.flatten(), mask.flatten()
            bounds = torch.tensor([0, 400, 800, 1200])
        ours = gae(rewards, values, mask, 0.99, 0.95, cu_seqlens=bounds, backend=backend, chunk_size=32, num_threads=4)
        loop = gae(rewards, values, mask, 0.99, 0.95, cu_seqlens=bounds, backend="naive")
        if backend == "chunk":
            torch.testing.assert_close(ours, loop, equal_nan=True)
        else:  # a sum of two NaNs may have the bits of either
            bits = [[torch.where(x.isnan(), torch.nan, x) for x in both] for both in (ours, loop)]
            assert all(map(same_bits, *bits))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=12),
    kind=st.sampled_from(["none", "bits", "fractions"]),
    backend=st.sampled_from(CPU_BACKENDS),
    offset_type=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**30),
)
def test_packed_sequences_give_what_each_gives_alone(lengths, kind, backend, offset_type, seed):
    random, tokens = torch.Generator().manual_seed(seed), sum(lengths)
    dtype = torch.float32 if backend == "numba" else torch.float64  # there the bits must agree
    rewards, values = (torch.randn(tokens, generator=random, dtype=dtype) for _ in range(2))
    mask = torch.rand(tokens, generator=random)
    mask = {"none": None, "bits": (mask < 0.7).long(), "fractions": mask}[kind]
    close = {"rtol": 0, "atol": 0} if backend == "numba" else {"rtol": 1e-11, "atol": 1e-11}
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=offset_type)
    packed = results(rewards, values, mask, cu_seqlens=bounds, backend=backend)
    assert [x.shape for x in packed] == [(tokens,)] * 3
    for row in map(slice, bounds.tolist(), bounds.tolist()[1:]):
        alone = rewards[None, row], values[None, row], None if mask is None else mask[None, row]
        rows = tuple(x[None, row] for x in packed)
        torch.testing.assert_close(rows, results(*alone, backend="naive"), **close)


@every_cpu_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_comes_back_in_its_own_dtype_and_within_its_rounding(backend, dtype):
    torch.manual_seed(0)
    rewards, values = torch.randn(4, 60).to(dtype), torch.randn(4, 60).to(dtype).requires_grad_()
    mask = torch.rand(4, 60) < 0.8
    exact = results(rewards.double(), values.double(), mask, 0.9, 0.9, backend="naive")
    step = torch.finfo(dtype).eps * (16 if backend == "naive" else 1)
    for a, b in zip(results(rewards, values, mask, 0.9, 0.9, backend=backend), exact, strict=True):
        assert (a.dtype, a.requires_grad) == (dtype, False)
        torch.testing.assert_close(a.double(), b, rtol=step, atol=step)


@every_cpu_backend
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_no_rows_or_no_tokens_give_empty_results(backend, shape):
    empty = torch.empty(shape)
    assert [x.shape for x in results(empty, empty, empty, backend=backend)] == [shape] * 3
    nothing = torch.empty(0)
    for bounds in ([0], [0, 0, 0]):
        packed = gae(nothing, nothing, cu_seqlens=torch.tensor(bounds), backend=backend)
        assert [x.shape for x in packed] == [(0,), (0,)]


@every_cpu_backend
def test_memory_layout_does_not_matter(backend):
    torch.manual_seed(0)
    wide = torch.randn(6, 80)
    mask = (torch.rand(6, 80) < 0.8).long()
    dense = gae(wide[:, 20:60].contiguous(), wide[:, 40:].contiguous(), mask[:, :40].contiguous(), backend=backend)
    views = gae(wide[:, 20:60], wide[:, 40:], mask[:, :40], backend=backend)
    turned, turned_mask = wide[:, 20:60].t().contiguous().t(), mask[:, :40].t().contiguous().t()
    steps = gae(turned, wide.repeat_interleave(2, 1)[:, 80::2], turned_mask, backend=backend)
    for found in (views, steps):
        assert all(torch.equal(a, b) and b.is_contiguous() for a, b in zip(dense, found, strict=True))
    shared = gae(wide[:, :40], wide[:1, :40].expand(6, 40), mask[0, :40].expand(6, 40), backend=backend)
    apart = gae(wide[:, :40], wide[:1, :40].repeat(6, 1), mask[:1, :40].repeat(6, 1), backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(shared, apart, strict=True))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"rewards": [1.0]}, TypeError, "rewards wants a torch.Tensor, found list"),
        ({"rewards": PAIR.long()}, TypeError, "rewards wants one of the dtypes .*, found int64"),
        ({"rewards": PAIR + 0j}, TypeError, "rewards wants one of the dtypes .*, found complex64"),
        ({"rewards": PAIR[0]}, ValueError, r"rewards wants shape \[B, T\], found \[3\]"),
        ({"rewards": PAIR[None]}, ValueError, r"rewards wants shape \[B, T\], found \[1, 2, 3\]"),
        ({"values": PAIR[:, :2]}, ValueError, r"values wants the shape of rewards, \[2, 3\], found \[2, 2\]"),
        ({"values": PAIR.double()}, ValueError, "wants the dtype of rewards, torch.float32, found torch.float64"),
        ({"values": PAIR.to("meta")}, ValueError, "values wants the device of rewards, cpu, found meta"),
        ({"values": PAIR.to_sparse()}, TypeError, "values wants a dense tensor"),
        ({"mask": PAIR[:1]}, ValueError, r"mask wants the shape of rewards, \[2, 3\], found \[1, 3\]"),
        ({"mask": PAIR + 0j}, TypeError, "mask wants one of the dtypes"),
        ({"gamma": 1.1}, ValueError, "gamma wants a number between 0 and 1, found 1.1"),
        ({"gamma": float("nan")}, ValueError, "gamma wants a number between 0 and 1, found nan"),
        ({"lam": -0.5}, ValueError, "lam wants a number between 0 and 1, found -0.5"),
        ({"gamma": "1"}, TypeError, "gamma wants a number between 0 and 1, found '1' "),
        ({"lam": True}, TypeError, "lam wants a number between 0 and 1, found True"),
        ({"backend": "nmuba"}, ValueError, r"backend wants auto or one of .*, found 'nmuba' \(did you mean numba\?\)"),
        ({"chunk_size": 0}, ValueError, "chunk_size wants a whole number of at least 1 or None, found 0"),
        ({"chunk_size": 1.5}, TypeError, "chunk_size wants a whole number"),
        ({"num_threads": 0}, ValueError, "num_threads wants a whole number of at least 1 or None, found 0"),
        ({"num_threads": True}, TypeError, "num_threads wants a whole number"),
    ],
)
def test_wrong_arguments_are_refused_with_their_name(wrong, error, message):
    with pytest.raises(error, match=message):
        gae(**{"rewards": PAIR, "values": PAIR, **wrong})
    if not wrong.keys() & {"values", "lam"}:
        with pytest.raises(error, match=message):
            discounted_returns(**{"rewards": PAIR, **wrong})


@pytest.mark.parametrize(
    ("tensor", "bounds", "error", "message"),
    [
        (PAIR[0], [0, 2], ValueError, "cu_seqlens wants to run from 0 to 3 .*, found 0 to 2"),
        (PAIR[0], [1, 3], ValueError, "cu_seqlens wants to run from 0 to 3 .*, found 1 to 3"),
        (PAIR[0], [0, 2, 1, 3], ValueError, "cu_seqlens wants values that never fall, found 2 before 1 at position 2"),
        (PAIR[0], [[0, 3]], ValueError, r"cu_seqlens wants shape \[S \+ 1\], found \[1, 2\]"),
        (PAIR[0], [0.0, 3.0], TypeError, "cu_seqlens wants one of the dtypes int32, int64, found float32"),
        (PAIR, [0, 6], ValueError, r"rewards wants shape \[N\], packed, with cu_seqlens, found \[2, 3\]"),
    ],
)
def test_bad_boundaries_are_refused(tensor, bounds, error, message):
    with pytest.raises(error, match=message):
        gae(tensor, tensor, cu_seqlens=torch.tensor(bounds))


@every_cpu_backend
@pytest.mark.parametrize(
    ("value", "dtype"),
    [*((n, torch.int64) for n in (2, -1, 1 << 40)), (255, torch.uint8), *((x, None) for x in (1.5, -0.1, torch.nan))],
)
def test_mask_values_outside_zero_to_one_are_refused(backend, value, dtype):
    mask = torch.tensor([1, value, 0], dtype=dtype)
    with pytest.raises(ValueError, match="mask wants values between 0 and 1"):
        gae(PAIR, PAIR, mask.expand(2, 3), backend=backend)
    with pytest.raises(ValueError, match="mask wants values between 0 and 1"):
        discounted_returns(PAIR, mask.expand(2, 3), backend=backend)


def test_the_automatic_backend_goes_by_the_device_and_one_that_cannot_read_it_refuses():
    usable = [name for name, reason in available_backends().items() if reason is None]
    assert resolve_backend("auto", "cpu") == "numba"
    assert resolve_backend("auto", "cuda") == ("triton" if "triton" in usable else "chunk")
    assert resolve_backend("auto", "mps") == "chunk"
    assert resolve_backend("naive", "cuda") == "naive"
    with pytest.raises(ValueError, match="backend 'numba' wants tensors on cpu, found cuda"):
        resolve_backend("numba", "cuda")


@pytest.mark.skipif(available_backends()["triton"] is None, reason="triton works here")
def test_a_missing_backend_asked_for_by_name_is_an_error_that_says_why():
    reason = available_backends()["triton"]
    with pytest.raises(BackendMissing, match="backend 'triton' was asked for, but") as caught:
        gae(PAIR, PAIR, backend="triton")
    assert reason in str(caught.value)
    assert isinstance(caught.value, RlAccelError)
    assert isinstance(caught.value, ImportError)


@pytest.mark.slow
def test_importing_us_loads_no_compiler_and_no_framework_and_without_numba_the_cpu_has_the_chunk_scan(python):
    done = python(
        """
        import sys
        import rl_accel.ops, rl_accel.patches.verl.advantages, rl_accel.patches.verl.gae, rl_accel.patches.verl.sampler
        assert not {"numba", "triton", "verl", "ray"} & set(sys.modules)
        sys.modules["numba"] = None
        import pytest, torch
        from rl_accel.errors import BackendMissing
        from rl_accel.ops import available_backends, gae, resolve_backend
        assert "pip install numba" in available_backends()["numba"]
        assert resolve_backend("auto", "cpu") == "chunk"
        ones = torch.ones(1, 3)
        assert gae(ones, ones)[1].tolist() == [[3, 2, 1]]
        with pytest.raises(BackendMissing, match="backend 'numba' was asked for, but numba is not installed"):
            gae(ones, ones, backend="numba")
        """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("rewards", "values", "message"),
    [
        ((3, 2), (2, 3), r"lengths of values, \[2, 3\], found \[3, 2\]"),
        ((3, 2), (5,), r"lengths of values, \[5\], found \[3, 2\]"),
        ((1,) * 12, (1,) * 11 + (2,), r"found \[1, 1, 1, 1, 1, 1, 1, 1\] and 4 more"),
        ((), (), "at least one sequence"),
    ],
    ids=["same total", "same tokens in fewer", "many", "none"],
)
def test_lists_that_do_not_belong_together_are_refused(rewards, values, message):
    with pytest.raises(ValueError, match=message):
        gae_of_lists([torch.ones(n) for n in rewards], [torch.ones(n) for n in values])


def test_the_chunk_scan_in_float32_stays_within_rounding_of_float64(make_case):
    for seed in range(80):
        c = make_case(seed)
        exact = gae(c.rewards.double(), c.values.double(), c.mask, c.gamma, c.lam, backend="naive")
        for a, b in zip(gae(c.rewards, c.values, c.mask, c.gamma, c.lam, backend="chunk"), exact, strict=True):
            scale = float(b.abs().max()) + 1e-30
            assert float((a.double() - b).abs().max()) <= 1e-5 * scale, seed


def test_memory_of_the_chunk_scan_stays_linear_in_the_tokens():
    """A chunk matrix per token, or one of T x T, would be over 100 times the input here."""
    rewards = torch.randn(1, 1 << 16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        gae(rewards, rewards, (rewards > 0).long(), 0.99, 0.95, backend="chunk")
    level = highest = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            level += event.nbytes()
            highest = max(highest, level)
    assert 0 < highest < 30 * rewards.nbytes
