"""Tests ``bench gae``: correct contestants get numbers; a wrong contestant gets none and makes the command fail."""

import pytest

from rl_accel.__main__ import bench_gae
from rl_accel.lab import bench_gae as bench


@pytest.mark.slow
def test_prints_table_goals_and_picture(monkeypatch, tmp_path, invoke):
    monkeypatch.setattr(bench, "BATCHES", (8, 64))
    monkeypatch.setattr(bench, "TOKENS", (512,))
    monkeypatch.setattr(bench, "GOAL_SHAPE", (64, 512))
    output = invoke(bench_gae, "--out", tmp_path)
    assert "correct: rl-accel equals the loop bit for bit" in output
    rows = [line.split() for line in output.splitlines() if line.strip().startswith(("8 x 512", "64 x 512"))]
    assert len(rows) == 2
    assert all(float(cell.replace(",", "")) > 0 for row in rows for cell in row[3:-1])
    assert output.count("times as long as ours; goal at least") == len(bench.GOALS)
    assert (tmp_path / "gae.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_wrong_contestant_gets_no_number_and_one_shape_a_verdict(monkeypatch, invoke):
    wrong = bench.Contestant("off by one bit", lambda inputs: (inputs[0], inputs[1]))
    contestants = bench.contestants
    monkeypatch.setattr(bench, "contestants", lambda device: [*contestants(device)[:2], wrong])
    output = invoke(bench_gae, "--batch", 2, "--tokens", 64, code=1)
    assert "WRONG: off by one bit" in output
    table = output.split("milliseconds")[1]
    assert "off by one bit" not in table
    assert table.count("2 x 64: ") == 1, "one sentence says whether it is worth it"


def test_the_verdict_follows_the_numbers():
    def verdict(loop, ours):
        return bench.verdict((2, 3), {bench.LOOP: loop, bench.OURS: ours})

    assert "worth it, every step saves 1.90 s" in verdict(2.0, 0.1)
    assert "hard to notice" in verdict(0.010, 0.001)
    assert "not worth it" in verdict(0.001, 0.002)
    assert "no verdict" in bench.verdict((2, 3), {bench.LOOP: 1.0})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch", 4), "--batch and --tokens go together"),
        (("--tokens", 4), "--batch and --tokens go together"),
        (("--batch", 0, "--tokens", 1), "0 is not in the range"),
        (("--device", "cuda"), "no CUDA device"),
    ],
)
def test_wrong_options_are_refused(monkeypatch, invoke, words, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert message in invoke(bench_gae, *words, code=2)
