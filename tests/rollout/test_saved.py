"""Tests the files beside a checkpoint: they are read back as written or refused with a reason, and the log is rewound to a step."""

import contextlib
import copy
import datetime
import fractions
import functools
import itertools
import json
import operator
import resource
import signal
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from rl_accel.errors import ConfigError
from rl_accel.rollout.round_driver import PromptSupply, StepResult
from rl_accel.rollout.saved import Ledger, ResumeError, WriteError, restore, rows_digest, save
from rl_accel.rollout.tail_batching import TailBatching, TailRun
from rl_accel.rollout.tail_decisions import TrainBatch

ROW = {"raw_prompt": [{"role": "user", "content": "hi"}], "index": 5}
RICH = {"count": np.int64(3), "names": np.array(["x", None], object), "tensor": torch.ones(2), "bytes": b"\xff\x00"}
RICH |= {"image": Image.new("RGB", (2, 1), (1, 2, 3)), "time": datetime.datetime(2026, 1, 1), "pair": (1, {2.5})}


def new_run():
    core = TailBatching(TailRun(2, 2, data_id="train.parquet", rows_id="0a1b"))
    return core, PromptSupply(lambda: ROW, 10)


def saved_run(folder, prompts=3):
    core, supply = new_run()
    core.offer(supply.take(prompts), 0.0)
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


def rename_a_prompt(state):
    state["core"]["prompts"][0][0] = "7:1"
    state["payloads"]["7:1"] = state["payloads"].pop("1:1")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda state: state.update(step=5), "must be of step 4, found 5"),
        (core_with(version=1), "state must have version = 3, found 1"),
        (core_with(format="x"), "state must have format = 'rl_accel.tail_batching', found 'x'"),
        (core_with(prompts_per_step=3), "state must have prompts_per_step = 2, found 3"),
        (core_with(responses_per_prompt=8), "state must have responses_per_prompt = 2, found 8"),
        (
            core_with(rows_id="2c3d"),
            "data set has other rows than the saved run. Resume with the data of the saved run$",
        ),
        (core_with(rounds=None), "state is damaged or does not fit: TypeError"),
        (core_with(settled=-1), "state is damaged or does not fit: ValueError: a number must be at least 0, found -1"),
        (core_with(version=torch.ones(2)), "state must have version = 3, found tensor"),
        (core_with(prompts=3), "state is damaged or does not fit: TypeError"),
        (core_with(data_id="x"), "does not fit this run: state must have data_id = 'train.pa"),
        (lambda state: state["core"]["prompts"].append(["1:4"]), "does not fit this run: state is damaged"),
        (lambda state: state["core"]["prompts"].append(state["core"]["prompts"][0]), "a prompt is there twice"),
        (lambda state: state["core"]["prompts"][0].__setitem__(0, 7), "TypeError: the id of a prompt"),
        (lambda state: state.pop("rows_fetched"), "is damaged: KeyError: 'rows_fetched'"),
        (lambda state: state.update(rows_fetched="3"), "rows_fetched must be of type int, found str"),
        (lambda state: state.update(payloads=[]), "payloads must be of type dict, found list"),
        (
            lambda state: state["payloads"].update({"1:1": None}),
            "row of prompt 1:1 must be of type dict, found NoneType",
        ),
        (rename_a_prompt, "prompt 7:1 is none of the 3 rows that were fetched"),
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
    with pytest.raises(ResumeError, match=message) as caught:
        restore(tmp_path, 4, core, supply)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
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


def all_edits(node, path=()):
    """Yields the path to each value in ``node``, a tree of dictionaries and lists."""
    yield path
    if isinstance(node, dict | list):
        for key in node if isinstance(node, dict) else range(len(node)):
            yield from all_edits(node[key], (*path, key))


@pytest.mark.parametrize("value", [None, -1, 2**70, 1.5, "x", [], [[]], {}, {"a": 1}, torch.ones(2)], ids=repr)
def test_whatever_a_value_of_the_state_became_it_is_read_or_refused_in_one_line(tmp_path, value):
    saved_run(tmp_path)
    file = tmp_path / "state.pt"
    state = torch.load(file, weights_only=True)
    for path in [*all_edits(state)][1:]:
        edited = copy.deepcopy(state)
        *parents, key = path
        functools.reduce(operator.getitem, parents, edited)[key] = value
        torch.save(edited, file)
        with contextlib.suppress(ResumeError):
            restore(tmp_path, 4, *new_run())
    torch.save(value, file)
    with pytest.raises(ResumeError, match=r"state\.pt is damaged: .*\. Resume from another checkpoint"):
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
    core.offer(supply.take(1), 0.0)
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


def test_the_digest_tells_other_rows_and_another_order_and_is_that_of_every_process(python):
    rows = [{"prompt": "a", "data": np.arange(2)}, dict(RICH), {"none": None, "number": float("nan")}]
    digest = rows_digest(rows)
    assert digest == rows_digest(copy.deepcopy(rows))
    others = [[*rows[1:], rows[0]], rows[:2], [{**rows[0], "prompt": "b"}, *rows[1:]]]
    others += [[rows[0], {**RICH, "image": Image.new("RGB", (2, 1))}, rows[2]]]
    assert len({digest, *map(rows_digest, others)}) == 5
    script = "from rl_accel.rollout.saved import rows_digest; print(rows_digest([{'prompt': 'a', 'of': b'x', 'by': object()}]))"
    assert python(script).stdout.strip() == rows_digest([{"prompt": "a", "of": b"x", "by": object()}])


GOOD = b'{"step": 1, "trained": {}}\n'


@pytest.mark.parametrize(
    "bad_line",
    [b"[]\n", b"7\n", b"null\n", b"{}\n", b'{"step": "1"}\n', b'{"st\n', b"\xff\xfe\n", b"[" * 100_000 + b"\n"],
)
def test_a_damaged_log_is_named_with_what_helps_and_left_as_it_is(tmp_path, bad_line):
    log = Ledger(tmp_path)
    log.path.parent.mkdir()
    log.path.write_bytes(GOOD + bad_line + GOOD)
    with pytest.raises(ResumeError, match=r"ledger\.jsonl is damaged: .*\. Move it away; the resumed") as caught:
        log.rewind(1)
    assert "\n" not in str(caught.value)
    assert log.path.read_bytes() == GOOD + bad_line + GOOD


def test_a_folder_in_place_of_the_log_is_named(tmp_path):
    log = Ledger(tmp_path)
    log.path.mkdir(parents=True)
    with pytest.raises(ResumeError, match=r"ledger\.jsonl is damaged: IsADirectoryError"):
        log.rewind(1)


@contextlib.contextmanager
def files_up_to(size):
    """Files of this process may not grow beyond ``size`` bytes, as on a disk that is full then."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_no_half_line_and_no_half_state_and_one_line_says_what_helps(tmp_path):
    log = Ledger(tmp_path)
    log.add(1, StepResult(TrainBatch(1, "short", ()), trained={"1:1": 0}))
    saved_run(tmp_path)
    lines, state = log.path.read_bytes(), (tmp_path / "state.pt").read_bytes()
    words = r" cannot be written \(File too large\)\. Free space there, then resume from the last checkpoint$"
    with files_up_to(len(lines) + 20):
        with pytest.raises(WriteError, match=r"ledger\.jsonl" + words):
            log.add(2, StepResult(TrainBatch(2, "short", ()), trained={"1:2": 1}))
        with pytest.raises(WriteError, match=r"state\.pt" + words):
            saved_run(tmp_path, prompts=5)
    assert (log.path.read_bytes(), (tmp_path / "state.pt").read_bytes()) == (lines, state)
    log.add(2, StepResult(TrainBatch(2, "short", ()), trained={"1:2": 1}))
    assert len(log.path.read_text().splitlines()) == 2
