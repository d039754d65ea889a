"""verl's rule for groups: one whose metric is the same throughout teaches nothing."""

import pytest

from rl_accel.integrations.verl.tail_batching.actors import Stored, varies


@pytest.mark.parametrize(("metrics", "passes"), [((1.0, 1.0), False), ((0.0, 1.0), True), ((0.0,), True)])
def test_a_constant_group_is_rejected(metrics, passes):
    assert varies("1:1", [Stored((f"k{i}",), metric) for i, metric in enumerate(metrics)]) is passes


def test_a_missing_filter_metric_is_named():
    with pytest.raises(RuntimeError, match=r"algorithm\.filter_groups\.metric must name a metric .* prompt 1:7"):
        varies("1:7", [Stored(("a",), 1.0), Stored(("b",))])
