"""Compares the advantage functions for slime with plain loops. Needs no slime."""

import sys
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rl_accel.errors import PatchRefused
from rl_accel.features import GaeFlags
from rl_accel.ops import gae as naive_gae
from rl_accel.patches.slime import gae, reinforce_plus_plus
from rl_accel.switch import SwitchState

LENGTHS = [5, 1, 130, 2, 64]


@pytest.fixture
def lists():
    torch.manual_seed(0)
    return [torch.randn(n) for n in LENGTHS], [torch.randn(n) for n in LENGTHS]


def looped(rewards, values, gamma, lam):
    """The advantages of one sequence by the plain loop, in float64."""
    return naive_gae(rewards[None].double(), values[None].double(), None, gamma, lam, backend="naive")[0][0]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.0, 0.5)])
def test_each_sequence_is_computed_by_itself(lists, gamma, lam):
    rewards, values = lists
    advantages, returns = gae.packed_gae(values, rewards, LENGTHS, gamma, lam, GaeFlags())
    for i in range(len(LENGTHS)):
        wanted = looped(rewards[i], values[i], gamma, lam)
        torch.testing.assert_close(advantages[i].double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(returns[i].double(), wanted + values[i].double(), rtol=1e-5, atol=1e-5)


def test_tokens_beyond_a_response_are_left_out_and_the_dtype_is_that_of_the_values(lists):
    rewards, values = lists
    short = [max(1, n - 1) for n in LENGTHS]
    advantages, _ = gae.packed_gae([v.double() for v in values], rewards, short, 1.0, 0.9, GaeFlags())
    assert [len(each) for each in advantages] == short
    assert all(each.dtype is torch.float64 for each in advantages)
    torch.testing.assert_close(advantages[2], looped(rewards[2][:-1], values[2][:-1], 1.0, 0.9), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_returns_put_the_reward_on_the_last_token_that_counts(gamma):
    torch.manual_seed(1)
    kl, scores = [torch.rand(n) for n in LENGTHS], torch.randn(len(LENGTHS))
    masks = [torch.ones(n, dtype=torch.int) for n in LENGTHS]
    masks[2][100:] = 0
    masks[4][::2] = 0
    result = reinforce_plus_plus.packed_returns(scores, kl, masks, 0.1, gamma)
    for i, mask in enumerate(masks):
        token_rewards = (-0.1 * kl[i] * mask).double()
        token_rewards[int(mask.nonzero()[-1])] += scores[i].double()
        wanted = looped(token_rewards, torch.zeros(LENGTHS[i]), gamma, 1.0)
        torch.testing.assert_close(result[i].double(), wanted, rtol=1e-5, atol=1e-5)


def test_lists_that_slimes_own_function_must_take_are_refused():
    kl = [torch.zeros(2), torch.zeros(3)]
    for scores, lengths in ((2, (3, 2)), (1, (2, 3))):
        masks = [torch.ones(n) for n in lengths]
        with pytest.raises(ValueError, match=rf"{scores} rewards and masks of .* do not go with sequences of \[2, 3\]"):
            reinforce_plus_plus.packed_returns(torch.zeros(scores), kl, masks, 0.1, 1.0)
    masks = [torch.ones(2), torch.ones(3)]
    with pytest.raises(ValueError, match="a result is not finite"):
        reinforce_plus_plus.packed_returns(torch.tensor([0, torch.inf]), kl, masks, 0.1, 0.9)
    with pytest.raises(ValueError, match="a result is not finite"):
        gae.packed_gae([torch.zeros(2)], [torch.tensor([0, torch.inf])], [2], 0.9, 1.0, GaeFlags())


SOURCE = """
    import torch

    def chunked_discounted_returns(rewards, discount, chunk_size=128):
        running, reversed_returns = torch.zeros_like(rewards[:, 0]), []
        for t in reversed(range(rewards.shape[1])):
            running = rewards[:, t] + discount * running
            reversed_returns.append(running)
        return torch.stack(reversed_returns[::-1], dim=1)

    def chunked_gae(rewards, values, gamma, lambd, chunk_size=128):
        deltas = rewards + gamma * torch.nn.functional.pad(values[:, 1:], (0, 1)) - values
        advantages = chunked_discounted_returns(deltas, gamma * lambd)
        return advantages, advantages + values

    def get_reinforce_plus_plus_returns(rewards, kl, loss_masks, response_lengths, total_lengths, kl_coef, gamma):
        from megatron.core import mpu
        assert mpu.get_context_parallel_world_size() == 1
        returns = []
        for i, (reward, row, mask) in enumerate(zip(rewards, kl, loss_masks)):
            assert mask.sum() > 0, f"Sequence at index {i} is fully masked."
            token_rewards = -kl_coef * row * mask
            token_rewards[mask.nonzero()[-1]] += reward
            returns.append(chunked_discounted_returns(token_rewards[None], gamma)[0])
        return returns

    def get_advantages_and_returns_batch(
        total_lengths, response_lengths, values_list, rewards_list, gamma, lambd, chunked=True
    ):
        pad = torch.nn.utils.rnn.pad_sequence
        both = chunked_gae(pad(rewards_list, batch_first=True), pad(values_list, batch_first=True), gamma, lambd)
        return [[row[:n] for row, n in zip(rows, response_lengths)] for rows in both]
"""
"""Module like slime's, with scans that a comparison of the scans alone would find equal in each of :data:`OTHER_BODIES`."""
RETURNS, GAE = "get_reinforce_plus_plus_returns", "get_advantages_and_returns_batch"
PATCHES = {RETURNS: reinforce_plus_plus.SWITCHES[0], GAE: gae.SWITCHES[0]}
OTHER_BODIES = [
    (RETURNS, "row * mask", "row"),
    (RETURNS, "mask.nonzero()[-1]", "-1"),
    (RETURNS, "mask.nonzero()[-1]", "mask.sum() - 1"),
    (RETURNS, "(token_rewards[None], gamma)[0]", "(token_rewards[None], gamma)[0] * mask"),
    (RETURNS, "loss_masks)):", "loss_masks[:1] * len(kl))):"),
    (GAE, "pad(rewards_list, batch_first=True), ", "pad(rewards_list, batch_first=True) / 2, "),
    (GAE, "row[:n] for", "row[-n:] for"),
    (GAE, "gamma, lambd)\n        return", "gamma, lambd if chunked else 1.0)\n        return"),
]


@pytest.fixture
def ranks(monkeypatch):
    """Stands for Megatron's ``mpu``: this process is one of two context-parallel ranks."""
    mpu = SimpleNamespace(get_context_parallel_world_size=lambda: 2)
    monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(mpu=mpu))
    return mpu


@pytest.fixture
def installed(framework, ranks):
    """``installed(name, old, new)``: the patch of this function in a module like slime's where ``new`` stands for ``old``, and the
    module."""

    def make(name, old="", new=""):
        assert old in SOURCE
        module = sys.modules[f"{framework(SOURCE.replace(old, new))}.core"]
        return replace(PATCHES[name], target=f"{module.__name__}:{name}", bindings=()), module

    return make


@pytest.mark.parametrize(("name", "old", "new"), OTHER_BODIES)
def test_a_function_that_computes_something_else_is_refused_by_name(installed, name, old, new):
    patch, module = installed(name, old, new)
    original = getattr(module, name)
    with pytest.raises(PatchRefused, match=rf"{patch.name}: parity probe against .*{name} failed: "):
        patch.apply(GaeFlags())
    assert getattr(module, name) is original


@pytest.mark.parametrize("name", PATCHES)
def test_another_body_with_the_same_results_is_replaced_without_a_warning(installed, ranks, name, caplog):
    patch, _ = installed(
        name, "torch.stack(reversed_returns[::-1], dim=1)", "torch.stack(reversed_returns, dim=1).flip(1)"
    )
    patch.apply(GaeFlags())
    assert patch.state() is SwitchState.APPLIED
    patch.revert()
    assert not caplog.records
    assert ranks.get_context_parallel_world_size() == 2


@pytest.fixture
def running(installed, ranks):
    """``running(name)``: our function in place of that of a module like slime's, in a run without context parallelism."""
    with ExitStack() as patches:

        def make(name):
            patch, module = installed(name)
            patch.apply(GaeFlags())
            patches.callback(patch.revert)
            ranks.get_context_parallel_world_size = lambda: 1
            return getattr(module, name)

        yield make


REWARDS = (float("inf"), 1.0)
INFINITE_FIRST = [[float("inf")] * 5, [pytest.approx(0.81), pytest.approx(0.9), 1.0]]


def test_responses_with_an_infinite_reward_or_without_a_token_that_counts_get_slimes_own_returns(running):
    function = running(RETURNS)
    masks = [torch.ones(n, dtype=torch.int) for n in (5, 3)]
    batch = {
        "kl": [torch.zeros(5), torch.zeros(3)],
        "response_lengths": [5, 3],
        "total_lengths": [9, 9],
        "kl_coef": 0.1,
    }
    returns = function(rewards=torch.tensor(REWARDS), loss_masks=masks, gamma=0.9, **batch)
    assert [row.tolist() for row in returns] == INFINITE_FIRST
    masks[1][:] = 0
    with pytest.raises(AssertionError, match="Sequence at index 1 is fully masked"):
        function(rewards=torch.ones(2), loss_masks=masks, gamma=0.9, **batch)


def test_responses_with_an_infinite_reward_get_slimes_own_advantages(running):
    values, rewards = ([torch.zeros(n) for n in (5, 3)] for _ in range(2))
    for row, reward in zip(rewards, REWARDS, strict=True):
        row[-1] = reward
    for rows in running(GAE)([9, 9], [5, 3], values, rewards, 0.9, 1.0):
        assert [row.tolist() for row in rows] == INFINITE_FIRST
