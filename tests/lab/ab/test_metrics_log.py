"""Metrics are read while the trainer writes them."""

from rl_accel.lab.ab.metrics_log import Tail


def test_a_tail_returns_each_complete_line_once(tmp_path):
    tail = Tail(tmp_path / "m.jsonl")
    assert tail.read() == []
    with tail.path.open("wb", buffering=0) as file:
        file.write(b'{"step": 1, "data": {"a": 1.5}}\n{"step": 2, "da')
        assert tail.read() == [(1, {"a": 1.5})]
        assert tail.read() == []
        file.write(b'ta": {"a": 2}}\n')
        assert tail.read() == [(2, {"a": 2.0})]
    assert tail.bad_lines == 0


def test_lines_that_are_no_records_are_counted(tmp_path):
    tail = Tail(tmp_path / "m.jsonl")
    tail.path.write_text('nonsense\n[1]\n{"step": 1}\n{"step": "x", "data": {}}\n{"step": 3, "data": {"a": 1}}\n')
    assert tail.read() == [(3, {"a": 1.0})]
    assert tail.bad_lines == 4
