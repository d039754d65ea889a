"""Tests the GAE patch on real verl: the same bits at every binding, and verl's own function for unsupported arguments."""

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


def cases(make_case):
    """Ragged, holed and strided batches with masks of each type; and of float64, and with values that are not finite."""
    for seed in range(300):
        c = make_case(seed, most_rows=20, most_tokens=70)
        mask = c.mask.to((torch.int64, torch.int32, torch.float32)[seed % 3])
        yield c.rewards, c.values, mask, c.gamma, c.lam
    for seed in range(20):
        c = make_case(seed)
        yield c.rewards.double(), c.values.double(), c.mask.long(), c.gamma, c.lam
        c.rewards[0, 0], c.values[0, 1], c.values[-1, -1] = float("inf"), float("nan"), -float("inf")
        yield c.rewards, c.values, c.mask, c.gamma, c.lam


def test_bits_of_verl(original, same_bits, make_case):
    PATCH.apply(GaeFlags())
    for number, arguments in enumerate(cases(make_case)):
        wanted, found = original(*arguments), core_algos.compute_gae_advantage_return(*arguments)
        if not all(x.isfinite().all() for x in wanted):  # a sum of two NaNs may have the bits of either
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
        else:
            assert [*map(same_bits, found, wanted)] == [True, True], number
    assert "rl_accel/gae/stock_calls" not in metrics.drain()


def test_arguments_and_random_state_are_left_alone_and_the_seconds_are_logged():
    tensors = torch.randn(16, 2000), torch.randn(16, 2000), torch.ones(16, 2000, dtype=torch.int64)
    copies, state = [x.clone() for x in tensors], torch.get_rng_state()
    PATCH.apply(GaeFlags())
    tensors[1].requires_grad_()
    assert metrics.drain() == {}
    results = core_algos.compute_gae_advantage_return(*tensors, gamma=1.0, lam=0.95)
    assert not any(x.requires_grad for x in results)
    for result in results:
        result.zero_()  # no memory is shared
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    logged = metrics.drain()
    assert set(logged) == {f"rl_accel/gae/{name}" for name in ("calls", "kernel/numba", "seconds", "seconds_saved")}
    assert logged["rl_accel/gae/seconds_saved"] > logged["rl_accel/gae/seconds"] > 0


def test_the_time_of_the_estimate_itself_is_not_subtracted():
    """A batch hardly longer than the columns on which verl's loop is timed, whose timing takes longer than the batch in verl."""
    PATCH.apply(GaeFlags())
    core_algos.compute_gae_advantage_return(
        torch.ones(64, 33), torch.ones(64, 33), torch.ones(64, 33).long(), 1.0, 0.95
    )
    logged = metrics.drain()
    assert logged["rl_accel/gae/seconds_saved"] >= -logged["rl_accel/gae/seconds"]


R, V = torch.randn(2, 5, 30, generator=torch.Generator().manual_seed(0))
M = (R < 0.7).long()


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
            result = core_algos.compute_gae_advantage_return(*arguments)
            assert [*map(same_bits, result, wanted)] == [True, True]
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
    tensors = [x.repeat(1, 10) for x in (R, V, M)]
    found, wanted = core_algos.compute_gae_advantage_return(*tensors, 1.0, 0.95), original(*tensors, 1.0, 0.95)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert "rl_accel/gae/stock_calls" not in metrics.drain()


def test_a_kernel_that_cannot_take_verls_tensors_is_refused():
    for backend, reason in {"triton": "gae.backend=triton|triton", "fastest": "gae.backend=fastest"}.items():
        with pytest.raises(PatchRefused, match=reason):
            PATCH.apply(GaeFlags(backend=backend))
    assert PATCH.state() is SwitchState.WAITING
