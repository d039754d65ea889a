"""Tests rewards through verl's own loading of managers and functions: they equal those without rl-accel, except for time."""

import asyncio
import functools
import os
import re
import threading
import time

import pytest
from verl.trainer.ppo.reward import load_reward_manager

from rl_accel import process_start
from rl_accel.errors import ConfigError
from rl_accel.reward.graders import SandboxError

pytestmark = pytest.mark.slow

SYNC = """
import os, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    assert not any("rl_accel" in key for key in extra_info), extra_info
    if solution_str == "hang":
        while True:
            pass
    if solution_str == "sleep":
        time.sleep(600)
    if solution_str == "die":
        os._exit(3)
    if solution_str == "raise":
        raise ValueError("no such thing")
    if solution_str in ("nan", "none"):
        return {"nan": float("nan"), "none": None}[solution_str]
    right = solution_str == ground_truth
    return {"score": (1.0 if right else 0.25) + bonus, "acc": right, "pred": solution_str, "length": len(solution_str)}
"""


ASYNC = """
import asyncio

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "hang":
        await asyncio.sleep(600)
    if solution_str == "stubborn":
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            await asyncio.sleep(600)
    if solution_str == "raise":
        raise asyncio.TimeoutError("of an http client")
    return float(solution_str == ground_truth)
"""
QUICK = {"maximum": 1.0, "minimum": 0.5, "timeout_score": -1.0, "workers": 4, "min_correct": 3}


@pytest.fixture
def stock(configured, manager_of, tmp_path):
    """``stock(keys)``: the manager that verl loads without us, for the same function."""
    path = {"reward.custom_reward_function.path": str(tmp_path / "graded.py")}
    return lambda keys=(): manager_of(configured({**path, **dict(keys)}))


def test_a_hang_costs_its_own_reward_only_and_errors_are_as_in_verl(configure, manager_of, responses, score, stock):
    manager = manager_of(configure(SYNC, QUICK))
    texts = ("7", "8", "raise", "nan", "none")
    *scores, dies, hangs, sleeps = score(manager, responses(*texts, "die", "hang", "sleep"))
    assert list(map(repr, scores)) == list(map(repr, score(stock(), responses(*texts))))
    assert repr(scores[2]) == "ValueError('no such thing')"
    assert (type(dies).__name__, str(dies)[-24:]) == ("GraderError", "its process ended with 3")
    assert hangs["reward_score"] == sleeps["reward_score"] == -1.0
    counted = manager.anchors.totals
    assert (counted["executions"], counted["correct"], counted["timeouts"], counted["timeouts_full"]) == (8, 1, 2, 2)
    assert (counted["killed"], counted["errors"]) == (1, 3)


def test_the_full_budget_is_the_frameworks_or_the_users(configure, manager_of, mine):
    limited = {"reward.reward_manager.name": "rate_limited"}
    source = "from verl.experimental.reward_loop.reward_manager.limited import RateLimitedRewardManager"
    keys = mine(f"{source}\nclass Mine(RateLimitedRewardManager): ...\n")
    budgets = [({}, {}), ({}, limited), ({}, {**limited, "reward.timeout": 77.0}), ({"maximum": 12.0}, limited)]
    budgets.append(({}, {**keys, "reward.timeout": 400.0}))
    results = [manager_of(configure(ASYNC, *given))._executor._maximum for given in budgets]
    assert results == [300.0, 300.0, 77.0, 12.0, 400.0]


@pytest.mark.parametrize("name", ["naive", "dapo", "gdpo", "rate_limited", "remote"])
def test_every_manager_of_verls_gives_the_rewards_of_stock(configure, manager_of, responses, score, stock, name):
    keys = {"reward.reward_manager.name": name, "reward.custom_reward_function.reward_kwargs": {"bonus": 0.5}}
    if name == "dapo":
        buffer = {"enable": True, "len": 4, "penalty_factor": 1.0, "log": True}
        keys["reward.reward_kwargs"] = {"overlong_buffer_cfg": buffer, "max_resp_len": 5}
    manager = manager_of(configure(SYNC, {"timeout_score": -1.0}, keys))
    texts = ["7", "8", "abcd", "7777777"]
    ours = score(manager, responses(*texts))
    if name == "remote":  # verl's own makes actors; it differs from "naive" in where the function runs
        keys["reward.reward_manager.name"] = "naive"
    theirs = score(stock(keys), responses(*texts))
    assert [dict(item) for item in ours] == [dict(item) for item in theirs]
    if name == "rate_limited":
        assert manager.held.timeout is None, "its own limit would strike"


ALARM = """
import signal

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    try:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
    except ValueError:  # not in the main thread
        return 0.0
    return 1.0
"""


@pytest.mark.parametrize(("name", "expected"), [("naive", 0.0), ("remote", 1.0)])
def test_a_grader_may_set_an_alarm_where_it_may_in_verl(configure, responses, score, name, expected):
    """verl's ``remote`` calls the function in the main thread of an actor, the other managers in a pool of threads."""
    (found,) = score(configure(ALARM, keys={"reward.reward_manager.name": name}), responses("7"))
    assert found["reward_score"] == expected


def test_an_async_function_is_cancelled_at_its_limit(configure, manager_of, responses, score):
    manager = manager_of(configure(ASYNC, {**QUICK, "maximum": 0.5}))
    began = time.monotonic()
    *scores, raised = score(manager, responses("7", "8", "hang", "stubborn", "raise"))
    assert time.monotonic() - began < 10
    assert [item["reward_score"] for item in scores] == [1.0, 0.0, -1.0, -1.0]
    assert repr(raised) == "TimeoutError('of an http client')"
    told = manager.anchors.totals
    assert (told["timeouts"], told["errors"], told["correct"]) == (2, 1, 1), "a TimeoutError of its own is an error"


TOGETHER = """
import asyncio

arrived, full = [], asyncio.Event()

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    arrived.append(solution_str)
    if len(arrived) == 300:
        full.set()
    await full.wait()
    return 1.0
"""


def test_a_coroutine_may_wait_until_all_responses_of_a_batch_have_arrived(configure, manager_of, responses, score):
    manager = manager_of(configure(TOGETHER))
    assert [item["reward_score"] for item in score(manager, responses(*["7"] * 300))] == [1.0] * 300


def test_prompts_are_told_apart_by_their_text_and_not_by_uid(configure, manager_of, responses, score):
    manager, data = manager_of(configure(SYNC)), []
    for uid, text, source in (("one", "q1", "a"), ("two", "q1", "a"), ("one", "q2", "a"), ("one", "q1", "b")):
        data += responses("7", uid=uid, raw_prompt=[{"role": "user", "content": text}], data_source=source)
    score(manager, data)
    assert sorted(anchor[2] for anchor in manager.anchors.timeout.anchors().values()) == [1, 1, 2]


LOADS = """
import time

model = None

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global model
    if solution_str == "hang":
        time.sleep(600)
    if solution_str == "8":  # wrong at first sight
        return 0.0
    if model is None:
        time.sleep(2.0)
        model = object()
    return 1.0
"""


def test_a_new_process_may_load_what_an_ended_one_had_loaded(configure, manager_of, responses):
    config = configure(LOADS, {"minimum": 0.5, "slack": 0.2, "maximum": 60.0, "workers": 1, "probe_share": 0.0})
    first, second = manager_of(config), manager_of(config)

    async def scores(manager, *texts, prompt="a"):
        manager.loop = manager.held.loop = asyncio.get_running_loop()
        data = responses(*texts, raw_prompt=[{"role": "user", "content": prompt}])
        return [(await manager.run_single(item))["reward_score"] for item in data]

    async def main():
        try:
            assert await scores(first, "7", prompt="another") == [1.0], "loads"
            began = time.monotonic()
            assert await scores(first, "7", "7", "hang", "8", "7") == [1.0, 1.0, 0.0, 0.0, 1.0]
            assert time.monotonic() - began < 30, "the limit of the answer that hangs is not the full budget"
            second.anchors.timeout.merge(first.anchors.timeout.anchors())
            assert await scores(second, "8", "7") == [0.0, 1.0], "limits that another reward worker has learned"
        finally:
            await first.close()
            await second.close()

    asyncio.run(main())


KEEPS = """
seen = []

def compute_score(data_source, solution_str, ground_truth, extra_info, rules, reward_router_address, reward_model_tokenizer):
    seen.append((rules, reward_model_tokenizer))
    same = all(one is other for pair in seen for one, other in zip(pair, seen[0]))
    return float(same) * rules.weights[1] * len(reward_model_tokenizer.decode(reward_model_tokenizer.encode(rules.name)))
"""


def test_what_is_the_same_in_all_calls_is_the_same_object(configure, configured, responses, score, tokenizer):
    """If these objects crossed in each call, each call would pickle verl's whole configuration and a tokenizer."""
    rules = {"weights": [1.0, 0.5], "name": "${trainer.project_name}"}
    keys = {"reward.custom_reward_function.reward_kwargs": {"rules": rules}, "trainer.project_name": "abc"}
    ours = configure(KEEPS, keys=keys)
    stock = configured({"reward.custom_reward_function.path": ours.reward.custom_reward_function.path, **keys})
    given = {"reward_router_address": "localhost:1", "reward_model_tokenizer": tokenizer}
    managers = [load_reward_manager(config, tokenizer, **given) for config in (stock, ours)]
    results = [score(manager, responses("7", "7", "7")) for manager in managers]
    assert results[0] == results[1]
    assert [item["reward_score"] for item in results[0]] == [1.5] * 3


CHANGES = """
import os

SECRET = os.environ.pop("RLA_SECRET")
TEXT = open("data.txt").read()
os.chdir("below")

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(SECRET + TEXT + open("other.txt").read()))
"""


def test_a_module_may_change_the_working_folder_and_the_environment_when_it_is_imported(
    configure, configured, responses, score, tmp_path, monkeypatch
):
    """verl has imported it in the reward worker before a process of the grader imports it."""
    (tmp_path / "below").mkdir()
    (tmp_path / "data.txt").write_text("12")
    (tmp_path / "below" / "other.txt").write_text("345")
    config = configure(CHANGES)
    config.reward.custom_reward_function.path = "graded.py"
    for of in (configured({"reward.custom_reward_function.path": "graded.py"}), config):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("RLA_SECRET", "6789")
        monkeypatch.setattr(process_start, "_FOLDER", str(tmp_path))
        monkeypatch.setattr(process_start, "_VARIABLES", dict(os.environ))
        (scores,) = score(of, responses("7"))
        assert scores["reward_score"] == 9.0


def test_modules_that_verl_imports_for_the_user_are_imported_where_the_function_runs(
    configure, responses, score, monkeypatch, tmp_path
):
    (tmp_path / "rla_registry.py").write_text("SCORES = {}\n")
    (tmp_path / "rla_extension.py").write_text("import rla_registry\nrla_registry.SCORES['test'] = 0.75\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "rla_extension")
    function = (
        "import rla_registry\ndef compute_score(data_source, **_): return rla_registry.SCORES.get(data_source, 0.0)"
    )
    (found,) = score(configure(function), responses("7"))
    assert found["reward_score"] == 0.75


async def test_a_call_that_is_cancelled_kills_its_execution(configure, manager_of, responses, tmp_path, gone):
    file = tmp_path / "pid"
    begins = f"import os, time\nfrom pathlib import Path\n\nFILE = Path({str(file)!r})\n"
    hangs = "def compute_score(**_):\n    FILE.write_text(str(os.getpid()))\n    time.sleep(600)\n"
    manager = manager_of(configure(begins + hangs))
    manager.loop = manager.held.loop = asyncio.get_running_loop()
    (response,) = responses("7")
    scoring = asyncio.create_task(manager.run_single(response))
    while not (file.exists() and file.read_text()):
        await asyncio.sleep(0.01)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    while not gone(file):
        await asyncio.sleep(0.01)
    await manager.close()


CUSTOM = """
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

class Mine(RewardManagerBase):
    def __init__(self, config, tokenizer, compute_score, reward_router_address=None, reward_model_tokenizer=None):
        super().__init__(config, tokenizer, compute_score)
        assert config.reward.reward_manager.name == "Mine", "it sees its own configuration"

    async def run_single(self, data):
"""
ONE_CALL = f"""{CUSTOM}
        assert not any("rl_accel" in name for name in data.non_tensor_batch)
        score = self.compute_score("test", "7", "7", {{"index": 1}})
        if AWAITS:
            score = await score
        return {{"reward_score": score if not AWAITS else score["score"] * 2, "reward_extra_info": {{}}}}
"""


@pytest.fixture
def mine(tmp_path):
    """``mine(source)``: keys that make the class Mine of this source the reward manager."""

    def write(source):
        (tmp_path / "mine.py").write_text(source)
        keys = {"source": "importlib", "name": "Mine", "module.path": str(tmp_path / "mine.py")}
        return {f"reward.reward_manager.{key}": value for key, value in keys.items()}

    return write


def test_a_manager_of_the_users_that_awaits_is_held_and_another_fails_in_one_line(configure, responses, score, mine):
    awaits = configure(SYNC, keys=mine("AWAITS = True\n" + ONE_CALL))
    assert score(awaits, responses("8"))[0]["reward_score"] == 2.0
    for source in (ONE_CALL, ONE_CALL.replace("score if not AWAITS", "2 * score if not AWAITS")):
        (refused,) = score(configure(SYNC, keys=mine("AWAITS = False\n" + source)), responses("8"))
        assert isinstance(refused, ConfigError), refused
        assert re.search(r"awaits its compute_score.*found Mine of", str(refused))


PARTS = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "slow":
        time.sleep(3.0)
    return 1.0
"""
TWO_CALLS = f"""{CUSTOM}
        parts = [await self.compute_score("test", text, "7", {{}}) for text in ("quick", "slow")]
        return {{"reward_score": sum(parts), "reward_extra_info": {{}}}}
"""


def test_each_call_that_a_manager_makes_for_a_response_has_its_own_limit(configure, manager_of, responses, score, mine):
    manager = manager_of(configure(PARTS, {"minimum": 0.5, "slack": 0.2, "probe_share": 0.0}, mine(TWO_CALLS)))
    scores = score(manager, responses(*["8"] * 3))
    assert [item["reward_score"] for item in scores] == [2.0] * 3
    assert sorted(round(wall) for wall, _, _ in manager.anchors.timeout.anchors().values()) == [0, 3]


OWN_PARAMETERS = f"""{CUSTOM}
        notes = {{}}
        score = self.compute_score("a", "b", "c", None, 5, notes=notes)
        return {{"reward_score": (score if isinstance(score, int) else await score), "reward_extra_info": notes}}
"""


def test_a_manager_of_the_users_may_call_a_function_of_its_own_kind(configure, responses, score, stock, mine):
    """With five positional arguments, a dict, and rows in which verl's columns have other types."""
    function = "def compute_score(one, two, three, four, five, notes):\n    return five + len(notes)"
    keys = mine(OWN_PARAMETERS)
    data = responses("8", reward_model="rule", extra_info=["a list"], raw_prompt=None)
    scores = score(configure(function, keys=keys), data)
    assert scores == score(stock(keys), data) == [{"reward_score": 5, "reward_extra_info": {}}]


def test_an_argument_that_cannot_be_sent_is_no_error_that_a_manager_may_score(configure, responses, score):
    """verl's ``rate_limited`` scores 0 if the function raises, and so do managers of users."""
    config = configure(SYNC, keys={"reward.reward_manager.name": "rate_limited"})
    (refused,) = score(config, responses("7", extra_info={"lock": threading.Lock()}))
    assert isinstance(refused, SandboxError)
    assert "cannot be sent: cannot pickle '_thread.lock'" in str(refused)


NEVER_CALLS = """
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

class Mine(RewardManagerBase):
    def __init__(self, config, tokenizer, compute_score, **others):
        super().__init__(config, tokenizer, compute_score)

    async def run_single(self, data):
        text = self.tokenizer.decode(data.batch["responses"][0])
        score = await self.compute_score("test", text, "7") if text == "7" else 0.5
        return {"reward_score": score, "reward_extra_info": {}}
"""


@pytest.mark.parametrize(("first", "warnings"), [("8", 1), ("7", 0)])
def test_a_manager_that_never_calls_its_function_is_named_once(
    configure, responses, score, mine, caplog, first, warnings
):
    function = "def compute_score(*args): return 0.5"
    found = score(configure(function, keys=mine(NEVER_CALLS)), responses(first, *["8"] * 20))
    assert {item["reward_score"] for item in found} == {0.5}
    assert caplog.text.count("nothing to limit: Mine has scored 8 responses without its compute_score") == warnings


def test_the_flag_for_slimes_grader_is_refused(configure):
    with pytest.raises(ConfigError, match=r"reward_timeout\.grader is a flag for slime"):
        configure(SYNC, {"grader": "a.b"})


def test_a_function_of_the_users_in_the_place_of_verls_is_called(configure, responses, score, monkeypatch):
    """Also for code, which verl's own function scores by test cases."""
    from verl.utils import reward_score

    @functools.wraps(reward_score.default_compute_score)
    async def mine(**kwargs):
        return 0.25

    monkeypatch.setattr(reward_score, "default_compute_score", mine)
    (found,) = score(configure(), responses("7", ground_truth="{}", data_source="apps"))
    assert found["reward_score"] == 0.25


def test_verls_own_rewards_are_the_same(configure, configured, responses, score):
    data = responses("7", "boxed7", "answer8", ground_truth="7", data_source="math")
    assert score(configure(), data) == score(configured({}), data)
