"""Lengths from a file, both ways right, ratios printed; a wrong way gets no number."""

import json

import pytest
from click.testing import CliRunner

from rl_accel.lab.bench import gae_lengths
from rl_accel.lab.bench.gae import bench_gae


@pytest.mark.parametrize("text", ["3 5\n7", "[3, 5, 7]", "3,5,7\n"])
def test_lengths_may_be_separated_by_anything(tmp_path, text):
    (tmp_path / "lengths").write_text(text)
    assert gae_lengths.read_lengths(str(tmp_path / "lengths")) == [3, 5, 7]


@pytest.mark.parametrize("text", ["", "3 0", "3 five", "2.5"])
def test_other_files_are_refused_with_what_was_found(tmp_path, text):
    (tmp_path / "lengths").write_text(text)
    done = CliRunner().invoke(bench_gae, ["--lengths", str(tmp_path / "lengths")])
    assert done.exit_code == 2
    assert "--lengths wants" in done.output
    assert CliRunner().invoke(bench_gae, ["--lengths", str(tmp_path / "absent")]).exit_code == 2


def test_the_drawn_batch_is_that_of_the_name():
    lengths = gae_lengths.read_lengths("lognormal")
    assert (len(lengths), max(lengths)) == (64, 16384)
    assert 8 < 64 * max(lengths) / sum(lengths) < 20


@pytest.mark.slow
def test_prints_both_ways_and_keeps_the_numbers(tmp_path):
    (tmp_path / "lengths").write_text(" ".join(str(n) for n in [3000, 20, 30, 1, 500]))
    done = CliRunner().invoke(bench_gae, ["--lengths", str(tmp_path / "lengths"), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "correct: slime, padded" in done.output
    assert "correct: rl-accel" in done.output
    assert "padded 4.2x" in done.output
    found = json.loads((tmp_path / "gae_lengths.json").read_text())
    assert found["padding"] == pytest.approx(5 * 3000 / 3551)
    assert found["time"] == pytest.approx(found["seconds"]["slime, padded"] / found["seconds"]["rl-accel"])


def test_a_wrong_way_gets_no_number(monkeypatch):
    monkeypatch.setattr(gae_lengths, "slime_padded", lambda rewards, values: (rewards, values))
    monkeypatch.setattr(gae_lengths, "read_lengths", lambda source: [3, 5])
    done = CliRunner().invoke(bench_gae, ["--lengths", "x"])
    assert done.exit_code == 1
    assert "WRONG: slime, padded" in done.output
    assert "milliseconds" not in done.output
