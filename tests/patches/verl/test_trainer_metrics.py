"""Tests what the log of a training step says about each feature that is on."""

import pytest

import rl_accel
from rl_accel.patches.verl import trainer_metrics
from rl_accel.runtime import CHECKS, RUNTIME
from rl_accel.telemetry import metrics

STEP = {"training/global_step": 3}


@pytest.fixture
def logged():
    """``logged(data)`` returns what verl's logger gets for ``data``."""
    rows = []
    log = trainer_metrics._with_ours(lambda _self, data, step: rows.append(data), None)

    def of(data):
        log(None, data, 3)
        return rows[-1]

    return of


def test_a_feature_counts_as_applied_in_the_steps_in_which_it_did_something(logged):
    with rl_accel.enabled("gae", "skip_zero", "advantages"):
        metrics.drain()
        metrics.add("gae/stock_calls", 1)
        idle = logged(STEP)
        metrics.add("gae/seconds", 0.1)
        busy = logged({**STEP, "actor/rl_accel/skip_zero/rows": 0.0})
    assert [idle[f"rl_accel/{name}/applied"] for name in ("gae", "skip_zero", "advantages")] == [0, 0, 0]
    assert [busy[f"rl_accel/{name}/applied"] for name in ("gae", "skip_zero", "advantages")] == [1, 1, 0]


def test_a_validation_alone_and_features_that_act_elsewhere_have_no_such_number(logged, monkeypatch):
    monkeypatch.setattr("rl_accel.runtime.is_installed", lambda name: name != "slime")  # final_output needs vLLM
    with rl_accel.enabled("gae", "final_output"):
        assert not [name for name in logged({"val/acc": 1.0}) if name.endswith("/applied")]
        assert [name for name in logged(STEP) if name.endswith("/applied")] == ["rl_accel/gae/applied"]


def test_a_feature_that_the_checks_of_a_run_ruled_out_counts_as_not_applied(logged):
    with rl_accel.enabled(auto=True):
        RUNTIME.set_source(CHECKS, {"skip_zero": False})
        assert logged(STEP)["rl_accel/skip_zero/applied"] == 0
        RUNTIME.set_source(CHECKS, {})
