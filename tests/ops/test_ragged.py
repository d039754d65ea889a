"""GAE of sequences end to end is that of each by itself, and lists that do not belong together are refused."""

import pytest
import torch

from rl_accel.ops import gae
from rl_accel.ops.ragged import gae_of_lists

LENGTHS = (5, 1, 700, 33)


def lists(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=generator) for length in lengths]


@pytest.mark.parametrize("backend", ["naive", "numba"])
def test_each_sequence_is_scanned_by_itself(backend):
    rewards, values = lists(LENGTHS, 0), lists(LENGTHS, 1)
    advantages, returns = gae_of_lists(rewards, values, 0.99, 0.9, backend=backend)
    for index, (reward, value) in enumerate(zip(rewards, values, strict=True)):
        wanted = gae(reward[None], value[None], None, 0.99, 0.9, backend="naive")
        torch.testing.assert_close(advantages[index], wanted[0][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(returns[index], wanted[1][0], rtol=1e-5, atol=1e-5)


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
        gae_of_lists(lists(rewards, 0), lists(values, 1))
