"""What reward_timeout on slime is made of, as far as it needs no slime."""

import json
from types import SimpleNamespace

import pytest

from rl_accel.errors import ConfigError
from rl_accel.features import RewardTimeoutFlags
from rl_accel.integrations.slime.reward_timeout import RM_HOOK, SAMPLE_HOOK, check
from rl_accel.integrations.slime.reward_timeout.programs import cases_of, program_of
from rl_accel.reward.sandbox import Case

ON = RewardTimeoutFlags(enable=True)


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


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        ({}, RewardTimeoutFlags(), r"rl_accel\.reward_timeout\.enable is not set"),
        (
            {"rollout_sample_hook_path": ["my.hook"]},
            ON,
            r"rollout_sample_hook_path to hold rl_accel.*found \['my\.hook'\]",
        ),
        ({}, RewardTimeoutFlags(enable=True, grader=RM_HOOK), "grader wants the grader that --custom-rm-path named"),
    ],
)
def test_what_would_grade_wrongly_is_refused(change, flags, message):
    fine = {"rollout_sample_hook_path": ["my.hook", SAMPLE_HOOK]}
    check(SimpleNamespace(**fine), ON)
    with pytest.raises(ConfigError, match=message):
        check(SimpleNamespace(**{**fine, **change}), flags)
