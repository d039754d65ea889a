"""Tests ``bench tail``: the load on verl is exact, and nothing stays behind."""

import contextlib
import json
import tempfile

import psutil
import pytest

from rl_accel.lab.bench import tail as bench

pytestmark = pytest.mark.slow


@pytest.mark.full  # rounds of real trainers are in tests/e2e/test_tail_batching.py
def test_the_load_on_verl_is_exact_and_leaves_no_process_and_no_folder(monkeypatch, tmp_path, invoke):
    monkeypatch.setattr(bench, "LOADS", ((4, 2, 3),))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", "/tmp")
    folders, real = [], bench.ray_temp_dir

    @contextlib.contextmanager
    def remembered():
        with real() as folder:
            folders.append(folder)
            yield folder

    monkeypatch.setattr(bench, "ray_temp_dir", remembered)
    output = invoke(bench.bench_tail, "--out", tmp_path)
    assert "correct: 4 x 2: exact batches, no key left behind, no prompt trained twice or lost" in output
    (size,) = json.loads((tmp_path / "tail.json").read_text())["load"]
    assert len(size["rounds"]) == 3
    for row in size["rounds"]:
        assert row["events"] >= 4 * 2 * 2
        assert 0 < row["after_last_s"] < row["seconds"]
        assert row["trainer_bytes"] > 0
    (folder,) = folders
    assert not folder.exists()
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]


def test_a_load_that_fails_shows_why_and_no_number(monkeypatch, invoke):
    monkeypatch.setattr(bench, "LOADS", ((4, 2, 1),))
    monkeypatch.setattr(bench, "LOAD_MODULE", "rl_accel.no_such_module")
    output = invoke(bench.bench_tail, code=1)
    assert "WRONG: 4 x 2: exit status 1; the end of its log" in output
    assert "No module named rl_accel.no_such_module" in output
    assert "trainer CPU s" not in output
