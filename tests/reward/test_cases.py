"""Tests reading programs and test cases of a code reward in the forms of slime's data."""

import json

import pytest

from rl_accel.reward.sandbox import Case, cases_of, program_of


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
    result = cases_of({"inputs": ["1\n", ["2", "3"]], "outputs": ["1", ["2", 3]]})
    assert result == ([Case("stdin", "1\n", "1"), Case("stdin", "2\n3", "2\n3")], "")
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
