"""The sidecar of a checkpoint comes back as it was written, or is refused with the reason; the ledger rewinds to a step."""

import importlib.util
import json

import pytest

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed", allow_module_level=True)

from rl_accel.integrations.verl.tail_batching.saved import Ledger, ResumeError, load, save

CORE = {"format": "core", "rounds": 3}


def test_what_is_saved_comes_back(tmp_path):
    payloads = {"1:7": {"raw_prompt": [{"role": "user", "content": "hi"}], "index": 6}}
    save(tmp_path, 3, CORE, 42, payloads)
    assert load(tmp_path, 3) == (CORE, 42, payloads)


def test_a_checkpoint_of_a_stock_run_is_refused(tmp_path):
    with pytest.raises(ResumeError, match=r"saved without tail batching: .*state\.json is missing"):
        load(tmp_path, 3)


def test_another_step_and_a_damaged_file_are_refused(tmp_path):
    save(tmp_path, 3, CORE, 42, {})
    with pytest.raises(ResumeError, match=r"4\) \(format, version, step\), found .* 3\)"):
        load(tmp_path, 4)
    (tmp_path / "tail_batching" / "state.json").write_text("{")
    with pytest.raises(ResumeError, match="is damaged: JSONDecodeError"):
        load(tmp_path, 3)


def test_the_ledger_forgets_what_a_checkpoint_does_not_hold(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.rewind(0)
    for step in (1, 2, 3):
        ledger.add(step, step, "short", [f"1:{step}"], [step - 1])
    with ledger.path.open("a") as file:
        file.write('{"step": 4, "tr')  # killed while it wrote
    ledger.rewind(2)
    ledger.add(3, 3, "long", ["1:9"], [8])
    rows = [json.loads(line) for line in ledger.path.read_text().splitlines()]
    assert [(row["step"], row["trained"]) for row in rows] == [(1, ["1:1"]), (2, ["1:2"]), (3, ["1:9"])]
