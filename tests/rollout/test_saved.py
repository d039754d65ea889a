"""The sidecar of a checkpoint comes back as it was written, or is refused with the reason; the log rewinds to a step."""

import json

import pytest

from rl_accel.rollout.driver import PromptSupply, StepResult
from rl_accel.rollout.saved import ResumeError, SettlementLog, restore, save
from rl_accel.rollout.tail_batching import TailBatching, TailRun
from rl_accel.rollout.tail_decisions import TrainBatch

ROW = {"raw_prompt": [{"role": "user", "content": "hi"}], "index": 5}


def new_run():
    core = TailBatching(TailRun(2, 2, data_id="train.parquet"))
    return core, PromptSupply(core.run, lambda: ROW, 10)


def saved_run(folder):
    core, supply = new_run()
    core.offer(supply.take({"": 3}), 0.0)
    save(folder, 4, core.state_dict(), supply.fetched, supply.payloads)


def test_the_log_forgets_what_a_checkpoint_does_not_hold(tmp_path):
    log = SettlementLog(tmp_path)
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


def test_a_run_comes_back_with_its_prompts_and_its_place_in_the_data(tmp_path):
    saved_run(tmp_path)
    core, supply = new_run()
    restore(tmp_path, 4, core, supply)
    assert set(core.unsettled_prompts()) == set(supply.payloads) == {"1:1", "1:2", "1:3"}
    assert supply.payloads["1:1"] == ROW
    assert (supply.fetched, len(supply.payloads)) == (3, 3)


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
    file = tmp_path / "state.json"
    state = json.loads(file.read_text())
    edit(state)
    file.write_text(json.dumps(state))
    core, supply = new_run()
    with pytest.raises(ResumeError, match=message):
        restore(tmp_path, 4, core, supply)
    assert (core.unsettled_prompts(), supply.fetched, supply.payloads) == ([], 0, {})


@pytest.mark.parametrize("name", ["state.json", "prompts.pt"])
def test_a_file_that_was_written_in_part_and_a_checkpoint_of_a_stock_run_are_refused(tmp_path, name):
    saved_run(tmp_path)
    content = (tmp_path / name).read_bytes()
    for size in (0, 10, len(content) // 2):
        (tmp_path / name).write_bytes(content[:size])
        with pytest.raises(ResumeError, match="is damaged: "):
            restore(tmp_path, 4, *new_run())
    (tmp_path / "state.json").unlink()
    with pytest.raises(ResumeError, match=r"saved without tail batching: .*state\.json is missing"):
        restore(tmp_path, 4, *new_run())


def test_a_run_that_is_killed_while_it_resumes_keeps_its_log(tmp_path, monkeypatch):
    log = SettlementLog(tmp_path)
    log.add(1, StepResult(TrainBatch(1, "short", ()), trained={"1:1": 0}))
    before = log.path.read_text()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        log.rewind(0)
    assert log.path.read_text() == before
