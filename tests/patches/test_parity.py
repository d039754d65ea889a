import pytest
import torch

from rl_accel.errors import PatchRefused
from rl_accel.patches.parity import require_agreement, with_fallback
from rl_accel.telemetry import metrics

X = torch.tensor([[1.0, 2.0], [3.0, float("nan")]])


def same(x, scale):
    return x * scale, x.sum()


def test_equal_outputs_pass_nan_included_and_near_ones_within_a_tolerance_that_is_given():
    def near(x, scale):
        return x * scale * (1 + 1e-6), x.sum()

    require_agreement(same, lambda x, scale: [x * scale, x.sum()], {"x": X, "scale": 2})
    require_agreement(same, near, {"x": X, "scale": 2}, rtol=1e-5)
    with pytest.raises(PatchRefused):
        require_agreement(same, near, {"x": X, "scale": 2}, rtol=1e-8)


def test_neither_function_may_touch_the_arguments_of_the_other():
    require_agreement(*[lambda x: x.mul_(2)] * 2, {"x": torch.ones(2)})


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        (lambda x, scale: (x * scale, x.sum(), x), "length of the sequences mismatch: 3 != 2"),
        (lambda x, scale: ((x * scale).double(), x.sum()), r"float64 != .*float32.* item \[0\]"),
        (lambda x, scale: (x * scale, x.sum()[None]), r"\[1\]\) != .*\[\]\).* item \[1\]"),
        (
            lambda x, scale: (x * scale + torch.tensor([[0, 1e-6], [0, 0]]), x.sum()),
            r"difference: .* at index \(0, 1\).* item \[0\]",
        ),
        (lambda x, scale: (torch.nan_to_num(x * scale), x.sum()), r" at index \(1, 1\).* item \[0\]"),
    ],
)
def test_differences_are_located(replacement, message):
    with pytest.raises(PatchRefused, match=message):
        require_agreement(same, replacement, {"x": X, "scale": 2})


def test_a_comparison_counts_no_call_of_another_replacement_that_the_original_makes():
    def refuse(x):
        raise ValueError("not this one")

    metrics.drain()
    helper = with_fallback(lambda x: x + 1, lambda x: x + 1, "helper")
    refused = with_fallback(refuse, lambda x: x + 1, "refused")
    require_agreement(lambda x: helper(x) + refused(x), lambda x: 2 * x + 2, {"x": X})
    assert metrics.drain() == {}
    helper(X)
    refused(X)
    assert metrics.drain() == {"rl_accel/helper/calls": 1.0, "rl_accel/refused/stock_calls": 1.0}
