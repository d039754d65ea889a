"""What reward_timeout on slime is made of, as far as it needs no slime."""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest

from rl_accel.errors import ConfigError
from rl_accel.features.reward_timeout import RewardTimeoutFlags
from rl_accel.integrations.slime.reward_timeout import JUDGE, MARK, arguments
from rl_accel.integrations.slime.reward_timeout.awaited import within
from rl_accel.integrations.slime.reward_timeout.programs import cases_of, program_of
from rl_accel.integrations.slime.reward_timeout.scores import Scores
from rl_accel.reward.limit_updates import LimitUpdates
from rl_accel.reward.program import Case, Limits

ON = RewardTimeoutFlags(enable=True)


def scores(*keys, **flags):
    return Scores(RewardTimeoutFlags(**flags), keys)


@pytest.mark.parametrize(
    ("rewards", "problem"),
    [
        ([1.0, 0, True, -1, {"score": 1.0}, {"verdict": "fine"}, "text"], ""),
        ([None], "returned nothing"),
        ([0.0, float("nan")], "returned nan"),
        ([float("-inf")], "returned -inf"),
        ([{"score": float("nan")}], "returned nan"),
        ([{"acc": float("inf"), "score": 1.0}], "returned inf"),
        (3.0, "returned no list of 1 rewards"),
    ],
)
def test_a_reward_that_training_cannot_use_is_known(rewards, problem):
    size = len(rewards) if isinstance(rewards, list) else 1
    found = scores().problem(rewards, size)
    assert problem in found
    assert bool(found) == bool(problem)


def test_a_reward_without_the_key_that_slime_looks_up_is_of_no_use():
    assert scores("acc").problem([{"score": 1.0}], 1) == "it returned a dict without 'acc'"
    assert scores("acc").problem([{"acc": 1}], 1) == ""
    assert scores().problem([1.0], 2) == "it returned no list of 2 rewards"


def test_correct_is_what_scores_above_a_bound_by_the_key_then_acc_then_score():
    assert scores().any_correct([0.0, 0.5])
    assert not scores(correct_above=0.5).any_correct([0.5, {"other": 1}, "text"])
    assert not scores().any_correct([{"acc": False, "score": 1.0}])
    assert scores().any_correct([{"score": 1.0}])
    assert scores("score").any_correct([{"acc": False, "score": 1.0}])


def test_a_stand_in_looks_like_the_grader_s_own():
    plain = scores(timeout_score=-1.0)
    assert plain.stand_in("a.b") == -1.0
    plain.remember("a.b", [{"score": 1.0, "acc": True, "pred": "x", "n": 3, "other": object()}])
    assert plain.stand_in("a.b") == {"score": -1.0, "acc": False, "pred": "", "n": 0, "other": None}
    assert plain.stand_in("c.d") == -1.0, "another grader"
    keyed = scores("acc", "eval_acc", timeout_score=-1.0)
    assert keyed.stand_in("a.b") == {"acc": -1.0, "eval_acc": -1.0}, "slime will look it up"
    keyed.remember("a.b", [{"acc": 1.0, "pred": "x"}])
    assert keyed.stand_in("a.b") == {"acc": -1.0, "eval_acc": -1.0, "pred": ""}


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("so\n```python\nprint(1)\n```\nor\n```python\nprint(2)\n```\n", "print(2)\n"),
        ("```py\nprint(1)\n```\n```\nsome output\n```", "print(1)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```bash\nls\n```", None),
        ("```python\nprint('cut off", "print('cut off"),
        ("no code at all", None),
        ("", None),
    ],
)
def test_the_program_is_the_last_block_of_python(response, program):
    assert program_of(response) == program


def test_test_cases_are_read_in_the_forms_that_data_has_them():
    assert cases_of({"inputs": ["1\n", ["2", "3"]], "outputs": ["1", ["2", 3]]}) == (
        [Case("stdin", "1\n", "1"), Case("stdin", "2\n3", "2\n3")],
        "",
    )
    cases, addition = cases_of(json.dumps({"fn_name": "add", "inputs": [[1, 2], "[1]\n[2]"], "outputs": [3, "[1, 2]"]}))
    assert cases == [Case("call", '["add", [1, 2]]', "3"), Case("call", '["add", [[1], [2]]]', "[1, 2]")]
    space = {"Solution": type("Solution", (), {"add": lambda self, a, b: a + b})}
    exec(addition, space)
    assert space["add"](2, 3) == 5
    space = {"add": len, "Solution": None}
    exec(addition, space)
    assert space["add"] is len


@pytest.mark.parametrize(
    "tests",
    [
        *(None, "no JSON", "3", [], {"inputs": [1]}, {"inputs": [], "outputs": []}, {"inputs": 3, "outputs": 3}),
        {"inputs": [1, 2], "outputs": [1]},
        {"fn_name": "os.system", "inputs": [[1]], "outputs": [1]},
        {"fn_name": "f", "inputs": [3], "outputs": [1]},
        {"fn_name": "f", "inputs": ["x"], "outputs": [1]},
    ],
)
def test_test_cases_of_another_form_are_refused(tests):
    with pytest.raises(ValueError):
        cases_of(tests)


def test_an_awaited_grader_is_held_to_its_limit():
    async def answer(seconds, value):
        await asyncio.sleep(seconds)
        return value

    async def fails():
        await asyncio.sleep(0)
        raise TimeoutError("the server's own")

    async def quits():
        raise SystemExit(3)

    async def gives_up():
        raise asyncio.CancelledError

    async def main():
        limits = Limits(wall=0.2)
        found = await asyncio.gather(
            within(answer(0.01, 7), limits, "a"),
            within(answer(60, 7), limits, "a"),
            within(fails(), limits, "a"),
            within(quits(), limits, "a"),
            within(gives_up(), limits, "a"),
        )
        return [(result.verdict, result.value, result.reason) for result in found]

    began = time.monotonic()
    assert asyncio.run(main()) == [
        ("done", 7, ""),
        ("timeout", None, "wall limit"),
        ("error", None, "TimeoutError: the server's own"),
        ("error", None, "RuntimeError: SystemExit: 3"),
        ("error", None, "it was cancelled, and not by us"),
    ]
    assert time.monotonic() - began < 5


def test_a_limit_may_change_while_a_grader_is_awaited():
    async def main():
        updates = LimitUpdates()
        grading = asyncio.ensure_future(within(asyncio.sleep(60), Limits(wall=50.0, updates=updates), "a"))
        longer = LimitUpdates()
        other = asyncio.ensure_future(within(asyncio.sleep(0.6, 7), Limits(wall=0.3, updates=longer), "a"))
        await asyncio.sleep(0.1)
        updates.publish(0.2, 1.0)
        longer.publish(30.0, 1.0)
        return await grading, await other

    short, long = asyncio.run(main())
    assert (short.verdict, long.verdict, long.value) == ("timeout", "done", 7)
    assert 0.15 < short.wall < 2


def test_cancelling_reaches_an_awaited_grader():
    seen = []

    async def grader():
        try:
            await asyncio.sleep(60)
        finally:
            seen.append("stopped")

    async def main():
        task = asyncio.ensure_future(within(grader(), Limits(), "a"))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)

    asyncio.run(main())
    assert seen == ["stopped"]


def test_a_grader_that_holds_the_event_loop_is_reported_once(caplog):
    async def grader():
        time.sleep(1.1)
        await asyncio.sleep(0)

    async def main():
        for _ in range(2):
            assert (await within(grader(), Limits(), "my.grader")).verdict == "done"

    asyncio.run(main())
    assert [record.getMessage().split(" for ")[0] for record in caplog.records] == [
        "rl-accel: my.grader held slime's event loop"
    ]


def test_the_processor_time_of_an_awaited_grader_is_its_own():
    async def busy():
        for _ in range(10):
            sum(range(500_000))
            await asyncio.sleep(0)

    async def idle():
        await asyncio.sleep(0.2)

    async def main():
        return await asyncio.gather(within(busy(), Limits(), "a"), within(idle(), Limits(), "b"))

    first, second = asyncio.run(main())
    assert first.cpu > 0.02 > 5 * second.cpu


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        ({}, RewardTimeoutFlags(), r"rl_accel\.reward_timeout\.enable is not set"),
        (
            {"rollout_sample_hook_path": ["my.hook"]},
            ON,
            r"rollout_sample_hook_path to hold rl_accel.*found \['my\.hook'\]",
        ),
        ({}, RewardTimeoutFlags(enable=True, grader=JUDGE), "grader wants the grader that --custom-rm-path named"),
    ],
)
def test_what_would_judge_wrongly_is_refused(change, flags, message):
    fine = {"rollout_sample_hook_path": ["my.hook", MARK]}
    arguments.check(SimpleNamespace(**fine), ON)
    with pytest.raises(ConfigError, match=message):
        arguments.check(SimpleNamespace(**{**fine, **change}), flags)


def test_bounds_that_contradict_each_other_are_named():
    with pytest.raises(ConfigError, match=r"rl_accel\.reward_timeout: maximum must be at least minimum = 5"):
        arguments.settings_of(RewardTimeoutFlags(minimum=5.0, maximum=1.0))
