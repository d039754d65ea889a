"""Tests the files beside a checkpoint: they are read back as written or refused with a reason, and the log is rewound to a step."""

import datetime
import fractions
import itertools
import json
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from rl_accel.errors import ConfigError
from rl_accel.rollout.round_driver import PromptSupply, StepResult
from rl_accel.rollout.saved import Ledger, ResumeError, restore, save
from rl_accel.rollout.tail_batching import TailBatching, TailRun
from rl_accel.rollout.tail_decisions import TrainBatch

ROW = {"raw_prompt": [{"role": "user", "content": "hi"}], "index": 5}
RICH = {"count": np.int64(3), "names": np.array(["x", None], object), "tensor": torch.ones(2), "bytes": b"\xff\x00"}
RICH |= {"image": Image.new("RGB", (2, 1), (1, 2, 3)), "time": datetime.datetime(2026, 1, 1), "pair": (1, {2.5})}


def new_run():
    core = TailBatching(TailRun(2, 2, data_id="train.parquet"))
    return core, PromptSupply(core.run, lambda: ROW, 10)


def saved_run(folder, prompts=3):
    core, supply = new_run()
    core.offer(supply.take({"": prompts}), 0.0)
    save(folder, 4, core.state_dict(), supply.fetched, supply.payloads)


def test_the_log_forgets_what_a_checkpoint_does_not_hold(tmp_path):
    log = Ledger(tmp_path)
    log.rewind(0)
    for step in (1, 2, 3):
        log.add(step, StepResult(TrainBatch(step, "short", ()), trained={f"1:{step}": step - 1}))
    with log.path.open("a") as file:
        file.write('{"step": 4, "tr')  # killed while it wrote
    log.rewind(2)
    prompts = {"trained": {"1:9": 8}, "rejected": {"1:4": 3}, "failed": {"1:5": 4}, "errors": {"1:5": "Died: gone"}}
    log.add(3, StepResult(TrainBatch(3, "long", ()), **prompts))
    rows = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [(row["step"], row["trained"]) for row in rows] == [(1, {"1:1": 0}), (2, {"1:2": 1}), (3, {"1:9": 8})]
    assert rows[-1] == {"step": 3, "round": 3, "kind": "long", **prompts}


def core_with(**fields):
    return lambda state: state["core"].update(fields)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda state: state.update(step=5), "must be of step 4, found 5"),
        (core_with(version=1), "state must have version = 2, found 1"),
        (core_with(format="x"), "state must have format = 'rl_accel.tail_batching', found 'x'"),
        (core_with(prompts_per_step=3), "state must have prompts_per_step = 2, found 3"),
        (core_with(responses_per_prompt=8), "state must have responses_per_prompt = 2, found 8"),
        (core_with(rounds=None), "state is damaged or does not fit: TypeError"),
        (core_with(times=[]), "state is damaged or does not fit: TypeError"),
        (core_with(data_id="x"), "does not fit this run: state must have data_id = 'train.pa"),
        (lambda state: state["core"]["prompts"].append(["1:4"]), "does not fit this run: state is damaged"),
        (lambda state: state.pop("rows_fetched"), "is damaged: KeyError: 'rows_fetched'"),
        (lambda state: state.update(rows_fetched=2), "3 prompts are open and 0 settled, but 2 rows were fetched"),
        (lambda state: state["core"]["prompts"].pop(), "the queue and the saved rows differ in 1 prompts, such as 1:3"),
    ],
)
def test_a_state_that_is_damaged_or_of_another_run_is_refused_and_nothing_changes(tmp_path, edit, message):
    saved_run(tmp_path)
    file = tmp_path / "state.pt"
    state = torch.load(file, weights_only=True)
    edit(state)
    torch.save(state, file)
    core, supply = new_run()
    with pytest.raises(ResumeError, match=message):
        restore(tmp_path, 4, core, supply)
    assert (core.unsettled_prompts(), supply.fetched, supply.payloads) == ([], 0, {})


def test_a_damaged_file_and_checkpoints_of_a_stock_run_and_of_an_earlier_format_are_refused(tmp_path):
    saved_run(tmp_path)
    file = tmp_path / "state.pt"
    content = file.read_bytes()
    for size in (0, 10, len(content) // 2):
        file.write_bytes(content[:size])
        with pytest.raises(ResumeError, match="is damaged: "):
            restore(tmp_path, 4, *new_run())
    file.unlink()
    with pytest.raises(ResumeError, match=r"saved without tail batching: .*state\.pt is missing"):
        restore(tmp_path, 4, *new_run())
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(ResumeError, match=r"format of an earlier version of rl-accel, which is not read any more$"):
        restore(tmp_path, 4, *new_run())


def test_a_run_comes_back_with_its_prompts_and_its_place_in_the_data_wherever_a_save_was_killed(tmp_path, killed_at):
    for write in itertools.count():
        saved_run(tmp_path)
        was_killed = killed_at(write, lambda: saved_run(tmp_path, prompts=5))
        core, supply = new_run()
        restore(tmp_path, 4, core, supply)
        assert supply.fetched in (3, 5), "the old state or the new one"
        prompts = {f"1:{row + 1}" for row in range(supply.fetched)}
        assert set(core.unsettled_prompts()) == set(supply.payloads) == prompts
        assert supply.payloads["1:1"] == ROW
        if not was_killed:
            break
    assert supply.fetched == 5
    assert write > 3


def test_rows_come_back_as_they_were_and_what_would_run_code_is_refused_when_it_is_saved_and_when_it_is_read(tmp_path):
    core, supply = new_run()
    core.offer(supply.take({"": 1}), 0.0)
    supply.payloads["1:1"] = RICH
    save(tmp_path, 4, core.state_dict(), supply.fetched, supply.payloads)
    restore(tmp_path, 4, core, supply)
    row, wanted = supply.payloads["1:1"], dict(RICH)
    assert row.pop("image").tobytes() == wanted.pop("image").tobytes()
    assert repr(row) == repr(wanted)
    with pytest.raises(ConfigError, match=r"cannot save rows of the data that hold fractions\.Fraction$"):
        save(tmp_path, 4, core.state_dict(), 1, {"1:1": {"share": fractions.Fraction(1)}})
    torch.save({"payloads": fractions.Fraction(1)}, tmp_path / "state.pt")
    with pytest.raises(ResumeError, match="is damaged: UnpicklingError"):
        restore(tmp_path, 4, core, supply)


def test_a_run_that_is_killed_while_it_resumes_keeps_its_log(tmp_path, monkeypatch):
    log = Ledger(tmp_path)
    log.add(1, StepResult(TrainBatch(1, "short", ()), trained={"1:1": 0}))
    before = log.path.read_text()
    monkeypatch.setattr("pathlib.Path.replace", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        log.rewind(0)
    assert log.path.read_text() == before
