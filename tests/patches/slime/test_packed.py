"""Compares the advantage functions for slime with plain loops. Needs no slime."""

import pytest
import torch

from rl_accel.features import GaeFlags
from rl_accel.ops import gae as naive_gae
from rl_accel.patches.slime import gae, reinforce_plus_plus

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


def test_lists_that_do_not_belong_together_are_refused_and_a_masked_sequence_is_named_as_slime_does():
    kl = [torch.zeros(2), torch.zeros(3)]
    for scores, lengths in ((2, (3, 2)), (1, (2, 3))):
        masks = [torch.ones(n) for n in lengths]
        with pytest.raises(ValueError, match=rf"{scores} rewards and masks of .* do not go with sequences of \[2, 3\]"):
            reinforce_plus_plus.packed_returns(torch.zeros(scores), kl, masks, 0.1, 1.0)
    with pytest.raises(AssertionError, match="Sequence at index 1 is fully masked"):
        reinforce_plus_plus.packed_returns(torch.zeros(2), kl, [torch.ones(2), torch.zeros(3)], 0.1, 1.0)
