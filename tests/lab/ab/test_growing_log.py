"""Metrics are read while the trainer writes them."""

from rl_accel.lab.ab.runner import GrowingLog


def test_it_returns_each_complete_line_once_and_counts_lines_that_are_no_records(tmp_path):
    log = GrowingLog(tmp_path / "m.jsonl")
    assert log.read() == []
    with log.path.open("wb", buffering=0) as file:
        file.write(b'{"step": 1, "data": {"a": 1.5}}\n{"step": 2, "da')
        assert log.read() == [(1, {"a": 1.5})]
        assert log.read() == []
        file.write(b'ta": {"a": 2}}\n')
        assert log.read() == [(2, {"a": 2.0})]
        assert log.bad_lines == 0
        file.write(b'nonsense\n[1]\n{"step": 1}\n{"step": "x", "data": {}}\n{"step": 3, "data": {"a": 1}}\n')
    assert log.read() == [(3, {"a": 1.0})]
    assert log.bad_lines == 4
