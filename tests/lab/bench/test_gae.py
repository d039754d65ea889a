"""Tests ``bench gae``: correct contestants get numbers; a wrong contestant gets none and makes the command fail."""

import json
import shlex

import pytest
import torch

from rl_accel.lab.bench import gae as bench
from rl_accel.lab.bench.helpers import peak_extra_bytes


@pytest.mark.slow
def test_prints_table_goals_and_files(monkeypatch, tmp_path, invoke):
    monkeypatch.setattr(bench, "BATCHES", (8, 64))
    monkeypatch.setattr(bench, "TOKENS", (4096,))
    output = invoke(bench.bench_gae, "--out", tmp_path)
    assert "correct: rl-accel numba equals the loop bit for bit" in output
    document = json.loads((tmp_path / "gae.json").read_text())
    assert [(row["batch"], row["tokens"]) for row in document["shapes"]] == [(8, 4096), (64, 4096)]
    assert all(row["seconds"]["plain copy"]["median"] > 0 for row in document["shapes"])
    last = document["shapes"][-1]
    assert all(timing["peak_extra_bytes"] is not None for timing in last["seconds"].values())
    assert last["seconds"]["rl-accel numba"]["peak_extra_bytes"] < 1.5 * last["output_bytes"]
    assert (tmp_path / "gae.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_wrong_contestant_gets_no_number_and_one_shape_a_verdict(monkeypatch, invoke):
    wrong = bench.Contestant("off by one bit", lambda inputs: (inputs[0], inputs[1]), masked=True)
    contestants = bench.contestants
    monkeypatch.setattr(bench, "contestants", lambda device: [*contestants(device)[:2], wrong])
    output = invoke(bench.bench_gae, "--batch", 2, "--tokens", 64, code=1)
    assert "WRONG: off by one bit" in output
    table = output.split("milliseconds")[1]
    assert "off by one bit" not in table
    assert table.count("2 x 64: ") == 1, "one sentence says whether it is worth it"


def test_the_verdict_follows_the_numbers():
    def row(loop, ours):
        seconds = {"verl's loop": {"median": loop}, "rl-accel numba": {"median": ours}}
        return {"batch": 2, "tokens": 3, "seconds": seconds}

    assert "worth it, every step saves 1.90 s" in bench.verdict(row(2.0, 0.1))
    assert "hard to notice" in bench.verdict(row(0.010, 0.001))
    assert "not worth it" in bench.verdict(row(0.001, 0.002))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batch 4", "--batch and --tokens go together"),
        ("--tokens 4", "--batch and --tokens go together"),
        ("--batch 0 --tokens 1", "0 is not in the range"),
        *([] if torch.cuda.is_available() else [("--device cuda", "no CUDA device")]),
        ("--lengths absent", "--lengths wants"),
        *((f"--lengths {text!r}", "--lengths wants") for text in ("", "3 0", "3 five", "2.5")),
    ],
)
def test_wrong_options_and_files_are_refused(tmp_path, invoke, arguments, message):
    words = shlex.split(arguments)
    if words[0] == "--lengths" and words[1] != "absent":
        (tmp_path / "lengths").write_text(words[1])
        words[1] = str(tmp_path / "lengths")
    assert message in invoke(bench.bench_gae, *words, code=2)


def test_memory_is_measured_at_its_highest():
    def grow():
        temporary = torch.ones(64 << 20, dtype=torch.uint8)
        return temporary[:1].clone()

    peaks = [peak_extra_bytes(grow) for _ in range(5)]
    assert None not in peaks
    assert 60 << 20 < max(peaks) < 90 << 20  # not each: earlier tests' memory may go back to the system at that moment


def test_a_contestant_that_would_take_too_long_is_left_out_and_said_so():
    row = {"batch": 2, "tokens": 1000, "seconds": {"slow": {"median": 1.0}}}
    assert bench.expected_seconds("slow", (2, 100_000), [row]) == pytest.approx(100.0)
    assert bench.expected_seconds("slow", (1, 10), [row]) == 0.0
    assert bench.expected_seconds("new", (2, 100_000), [row]) == 0.0


def test_lengths_may_be_separated_by_anything_or_be_drawn(tmp_path):
    for text in ("3 5\n7", "[3, 5, 7]", "3,5,7\n"):
        (tmp_path / "lengths").write_text(text)
        assert bench.sequence_lengths(str(tmp_path / "lengths")) == [3, 5, 7]
    lengths = bench.sequence_lengths("lognormal")
    assert (len(lengths), max(lengths)) == (64, 16384)
    assert 8 < 64 * max(lengths) / sum(lengths) < 20


@pytest.mark.slow
def test_prints_both_and_keeps_the_numbers(tmp_path, invoke):
    (tmp_path / "lengths").write_text(" ".join(str(n) for n in [3000, 20, 30, 1, 500]))
    output = invoke(bench.bench_gae, "--lengths", tmp_path / "lengths", "--out", tmp_path)
    for line in ("correct: slime, padded", "correct: rl-accel", "padded 4.2x"):
        assert line in output
    results = json.loads((tmp_path / "gae_lengths.json").read_text())
    assert results["padding"] == pytest.approx(5 * 3000 / 3551)
    assert results["time"] == pytest.approx(results["seconds"]["slime, padded"] / results["seconds"]["rl-accel"])


def test_wrong_padding_gets_no_number(monkeypatch, invoke):
    monkeypatch.setattr(bench, "slime_padded", lambda rewards, values: (rewards, values))
    monkeypatch.setattr(bench, "sequence_lengths", lambda source: [3, 5])
    output = invoke(bench.bench_gae, "--lengths", "x", code=1)
    assert "WRONG: slime, padded" in output
    assert "milliseconds" not in output
