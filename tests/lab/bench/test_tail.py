"""``bench tail``: the core's numbers come after its check, and the load on verl leaves nothing behind."""

import importlib.util
import json

import pytest
from click.testing import CliRunner

from rl_accel.features.tail_batching import TailBatchingFlags
from rl_accel.lab.bench import tail as bench
from rl_accel.lab.bench.measure import WrongResult
from rl_accel.lab.bench.tail import check_batches, record, time_core
from rl_accel.rollout.tail_decisions import Group, TrainBatch
from rl_accel.rollout.tail_prompts import TailRun


@pytest.mark.parametrize("ratio", [1.0, 1.25, "auto"])
def test_the_calls_of_a_run_can_be_played_back_on_a_fresh_core(ratio):
    speed = time_core(TailRun(4, 2, TailBatchingFlags(prompt_ratio=ratio)), rounds=12, repeats=1)
    assert sum(speed.kinds.values()) == speed.rounds == 12
    assert speed.events > 12 * 4 * 2 * 2
    assert speed.to_dict()["events_per_s"] > 0
    assert (speed.kinds["long"] > 0) == (ratio != 1.0)


def test_a_run_is_the_same_for_the_same_seed():
    run = TailRun(3, 2)
    assert record(run, 5, seed=1) == record(run, 5, seed=1)
    assert record(run, 5, seed=1) != record(run, 5, seed=2)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([("1:1", (0, 1))], "a batch must have 2 x 2 responses, found 1 x {2}"),
        ([("1:1", (0, 1)), ("1:2", (2,))], "a batch must have 2 x 2 responses"),
        ([("1:1", (0, 1)), ("1:1", (2, 3))], "2 prompts must be trained once each, found 2, 1 of them distinct"),
        ([("1:1", (0, 1)), ("1:2", (1, 2))], "a response must be trained once"),
    ],
)
def test_a_wrong_batch_is_named(groups, message):
    batch = TrainBatch(1, "short", tuple(Group(*group) for group in groups))
    with pytest.raises(WrongResult) as caught:
        check_batches([batch], TailRun(2, 2), rounds=1)
    assert message in str(caught.value)


def test_no_number_stands_beside_a_red_check(monkeypatch, tmp_path):
    def wrong(*_):
        raise WrongResult("a prompt was trained twice")

    monkeypatch.setattr(bench, "time_core", wrong)
    done = CliRunner().invoke(bench.bench_tail, ["--only", "core", "--quick"])
    assert done.exit_code == 1
    assert "WRONG: 8 x 8, prompt_ratio 1.25: a prompt was trained twice; no numbers" in done.output
    assert "events a second" not in done.output


def test_the_core_part_prints_a_table_and_writes_files(tmp_path):
    done = CliRunner().invoke(bench.bench_tail, ["--only", "core", "--quick", "--out", str(tmp_path / "deep")])
    assert done.exit_code == 0, done.output
    assert "events a second; goal at least 100,000" in done.output
    found = json.loads((tmp_path / "deep" / "tail.json").read_text())
    assert [(row["prompts"], row["prompt_ratio"]) for row in found["core"]] == [
        (8, "1.25"),
        (8, "auto"),
        (32, "1.25"),
        (32, "auto"),
    ]
    assert found["load"] == []
    assert (tmp_path / "deep" / "tail.png").read_bytes().startswith(b"\x89PNG")


def needs_verl():
    for module in ("verl", "transfer_queue", "ray"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


@pytest.mark.slow
def test_the_load_on_verl_is_exact_and_leaves_no_process_and_no_folder(monkeypatch, tmp_path):
    needs_verl()
    import tempfile

    psutil = pytest.importorskip("psutil")
    monkeypatch.setattr(bench, "QUICK_LOADS", ((4, 2, 3),))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", "/tmp")
    folders = []
    real = bench.ray_temp_dir
    monkeypatch.setattr(bench, "ray_temp_dir", lambda: Remembered(real(), folders))
    done = CliRunner().invoke(bench.bench_tail, ["--only", "load", "--quick", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "correct: 4 x 2: exact batches, no key left behind, no prompt trained twice or lost" in done.output
    (size,) = json.loads((tmp_path / "tail.json").read_text())["load"]
    assert len(size["rounds"]) == 3
    for row in size["rounds"]:
        assert row["events"] >= 4 * 2 * 2
        assert 0 < row["after_last_s"] < row["seconds"]
        assert row["trainer_bytes"] > 0
    (folder,) = folders
    assert not folder.exists()
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]


class Remembered:
    """A context manager that keeps what another one gives."""

    def __init__(self, inner, given):
        self.inner, self.given = inner, given

    def __enter__(self):
        self.given.append(self.inner.__enter__())
        return self.given[-1]

    def __exit__(self, *error):
        return self.inner.__exit__(*error)


@pytest.mark.slow
def test_a_load_that_fails_shows_why_and_no_number(monkeypatch):
    needs_verl()
    pytest.importorskip("psutil")
    monkeypatch.setattr(bench, "QUICK_LOADS", ((4, 2, 1),))
    monkeypatch.setattr(bench, "LOAD_MODULE", "rl_accel.no_such_module")
    done = CliRunner().invoke(bench.bench_tail, ["--only", "load", "--quick"])
    assert done.exit_code == 1
    assert "WRONG: 4 x 2: exit status 1; the end of its log" in done.output
    assert "No module named rl_accel.no_such_module" in done.output
    assert "trainer CPU s" not in done.output
