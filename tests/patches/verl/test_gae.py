"""The GAE patch on real verl: same bits, at every binding, and verl's own function wherever we cannot promise that."""

import logging

import numpy as np
import pytest
import torch
from verl.trainer.ppo import core_algos

from rl_accel.errors import PatchRefused
from rl_accel.features import GaeFlags
from rl_accel.patches.verl import gae
from rl_accel.switch import SwitchState
from rl_accel.telemetry import metrics

(PATCH,) = gae.SWITCHES


@pytest.fixture(autouse=True)
def original():
    """verl's own function, with which every test begins and ends; no numbers wait."""
    assert PATCH.state() is SwitchState.WAITING
    metrics.drain()
    yield core_algos.compute_gae_advantage_return
    PATCH.revert()
    metrics.drain()


def batch(seed, rows, tokens, mask_dtype=torch.int64, dtype=torch.float32):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, tokens + 1, rows)
    lengths[0] = tokens
    mask = np.arange(tokens) < lengths[:, None]
    if seed % 2:
        mask &= random.random((rows, tokens)) < 0.7
    rewards = random.normal(size=(rows, tokens)) * (random.random((rows, tokens)) < 0.3)
    values = random.normal(size=(rows, tokens))
    tensors = [torch.from_numpy(x) for x in (rewards, values, mask)]
    return tensors[0].to(dtype), tensors[1].to(dtype), tensors[2].to(mask_dtype)


def cases():
    """Ragged batches with masks of each type; and of float64, strided and with values that are not finite."""
    random = np.random.default_rng(1)
    for seed in range(300):
        mask_dtype = (torch.int64, torch.int32, torch.float32)[seed % 3]
        tensors = batch(seed, int(random.integers(1, 20)), int(random.integers(2, 70)), mask_dtype)
        if int(tensors[2].sum()) > 1:
            yield tensors, *[(1.0, 1.0), (1.0, 0.95), (0.99, 0.95), (random.random(), random.random())][seed % 4]
    for seed in range(10):
        holed = batch(seed, 6, 50)
        holed[0][2, 20], holed[1][4, 10], holed[1][5, 49] = float("inf"), float("nan"), -float("inf")
        wide, turned = [x[::2, 5:] for x in batch(seed, 12, 60)], [x.t().contiguous().t() for x in batch(seed, 6, 50)]
        for tensors in (batch(seed, 6, 50, dtype=torch.float64), wide, turned, holed):
            yield tensors, 0.99, 0.95


def test_bits_of_verl(original, same_bits):
    PATCH.apply(GaeFlags())
    for number, (tensors, gamma, lam) in enumerate(cases()):
        wanted = original(*tensors, gamma, lam)
        found = core_algos.compute_gae_advantage_return(*tensors, gamma=gamma, lam=lam)
        if not all(x.isfinite().all() for x in wanted):  # a sum of two NaNs may have the bits of either
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
        else:
            assert [*map(same_bits, found, wanted)] == [True, True], (number, gamma, lam)
    assert "rl_accel/gae/stock_calls" not in metrics.drain()


def test_arguments_and_random_state_are_left_alone_and_the_seconds_are_logged():
    state = torch.get_rng_state()
    PATCH.apply(GaeFlags())
    tensors = batch(3, 16, 2000)
    copies = [x.clone() for x in tensors]
    tensors[1].requires_grad_()
    assert metrics.drain() == {}
    results = core_algos.compute_gae_advantage_return(*tensors, 1.0, 0.95)
    assert not any(x.requires_grad for x in results)
    for result in results:
        result.zero_()  # no memory is shared
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    logged = metrics.drain()
    assert set(logged) == {f"rl_accel/gae/{name}" for name in ("kernel/numba", "seconds", "seconds_saved")}
    assert logged["rl_accel/gae/seconds_saved"] > logged["rl_accel/gae/seconds"] > 0


R, V, M = batch(1, 5, 30)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((R.bfloat16(), V.bfloat16(), M, 1.0, 0.95), "rewards are torch.bfloat16"),
        ((R, V.double(), M, 1.0, 0.95), "values wants the dtype of rewards"),
        ((R, V, M.double(), 1.0, 0.95), "the mask is torch.float64"),
        ((R, V, M.to(torch.uint8), 1.0, 0.95), "the mask is torch.uint8"),
        ((R, V, M, torch.tensor(1.0), 0.95), "gamma is tensor"),
        ((R, V, M, np.float64(1.0), 0.95), "gamma is "),
        ((R, V, M, 1.5, 0.95), "gamma wants a number between 0 and 1, found 1.5"),
        ((R, V, M * 2, 1.0, 0.95), "mask wants values between 0 and 1"),
        ((R, V, M[:1], 1.0, 0.95), "mask wants the shape of rewards"),
    ],
)
def test_left_to_verl_outside_the_proven_domain(original, same_bits, arguments, reason, caplog):
    PATCH.apply(GaeFlags())
    wanted = original(*arguments)
    with caplog.at_level(logging.WARNING, logger="rl_accel"):
        for _ in range(2):
            found = core_algos.compute_gae_advantage_return(*arguments)
            assert [*map(same_bits, found, wanted)] == [True, True]
    assert [reason in record.message for record in caplog.records] == [True]
    assert metrics.drain() == {"rl_accel/gae/stock_calls": 2}


@pytest.mark.parametrize(
    "tensors", [(R, V, M.bool()), (R, V, torch.zeros_like(M)), (R[:, :0], V[:, :0], M[:, :0]), (R[:0], V[:0], M[:0])]
)
def test_verls_own_errors_stay_its_own(original, tensors):
    with pytest.raises(Exception) as wanted:
        original(*tensors, 1.0, 0.95)
    PATCH.apply(GaeFlags())
    with pytest.raises(wanted.type) as found:
        core_algos.compute_gae_advantage_return(*tensors, 1.0, 0.95)
    assert str(found.value) == str(wanted.value)


@pytest.mark.parametrize("settings", [GaeFlags(backend="chunk"), GaeFlags(backend="naive"), GaeFlags(threads=3)])
def test_asked_for_kernels_agree_with_verl(original, settings):
    PATCH.apply(settings)
    tensors = batch(2, 2, 300)
    found, wanted = core_algos.compute_gae_advantage_return(*tensors, 1.0, 0.95), original(*tensors, 1.0, 0.95)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert "rl_accel/gae/stock_calls" not in metrics.drain()


def test_a_kernel_that_cannot_take_verls_tensors_is_refused():
    for backend, reason in {"triton": "gae.backend=triton|triton", "fastest": "gae.backend=fastest"}.items():
        with pytest.raises(PatchRefused, match=reason):
            PATCH.apply(GaeFlags(backend=backend))
    assert PATCH.state() is SwitchState.WAITING
