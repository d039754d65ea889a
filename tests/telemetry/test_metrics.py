from rl_accel.telemetry import metrics


def test_an_observer_sees_each_step_until_taken_off_and_one_that_fails_warns_once_and_goes_on(caplog, monkeypatch):
    monkeypatch.setattr(metrics, "_observers", {})
    seen = []

    def look(step, logged):
        seen.append((step, logged))
        if step in (2, 3):
            raise RuntimeError("no")
        return {"clock/steps": len(seen)}

    metrics.set_observer("clock", look)
    logged = [{"a": 1.0}, {}, {}, {"b": 2.0}]
    results = [metrics.run_observers(step, values) for step, values in enumerate(logged, 1)]
    assert results == [{"rl_accel/clock/steps": 1}, {}, {}, {"rl_accel/clock/steps": 4}]
    assert len(caplog.records) == 1
    metrics.set_observer("clock", None)
    assert metrics.run_observers(5, {}) == {}
    assert seen == list(enumerate(logged, 1))
