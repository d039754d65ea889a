"""Observers see what is logged, and one that fails costs a warning and nothing else."""

import pytest

from rl_accel.telemetry import metrics


@pytest.fixture(autouse=True)
def nobody_is_left():
    yield
    metrics.observe("clock", None)


def test_an_observer_sees_each_step_until_it_is_taken_off():
    seen = []
    metrics.observe("clock", lambda step, logged: seen.append((step, logged)) or {"clock/steps": len(seen)})
    assert metrics.observed(1, {"a": 1.0}) == {"rl_accel/clock/steps": 1}
    assert metrics.observed(2, {}) == {"rl_accel/clock/steps": 2}
    metrics.observe("clock", None)
    assert metrics.observed(3, {}) == {}
    assert seen == [(1, {"a": 1.0}), (2, {})]


def test_an_observer_that_fails_warns_once_and_is_asked_again(caplog):
    def look(step, logged):
        if step < 3:
            raise RuntimeError("no")
        return {"clock/step": step}

    metrics.observe("clock", look)
    assert [metrics.observed(step, {}) for step in (1, 2)] == [{}, {}]
    assert len(caplog.records) == 1
    assert metrics.observed(3, {}) == {"rl_accel/clock/step": 3}
