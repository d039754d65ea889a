"""Code rewards: the program in a response, and the test cases in a sample's metadata."""

import json
import re
from typing import Any

from rl_accel.features.reward_timeout import RewardTimeoutFlags
from rl_accel.reward.limited_executor import LimitedExecutor, execute_program
from rl_accel.reward.program import Case
from rl_accel.reward.sandbox import Sandbox

_BLOCK = re.compile(r"```[ \t]*([A-Za-z0-9_+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("python", "python3", "py")


def program_of(response: str) -> str | None:
    """Return the last block of Python in a response, or, if none says that it is, the last that says nothing. None without."""
    blocks = _BLOCK.findall(response)
    for wanted in (_PYTHON, ("",)):
        found = [code for language, code in blocks if language.lower() in wanted]
        if found:
            return str(found[-1])
    return None


class Programs:
    """Runs the programs in responses.

    Args:
        executor: slots and limits.
        workers: programs at once.
        flags: our flags.
    """

    def __init__(self, executor: LimitedExecutor, workers: int, flags: RewardTimeoutFlags) -> None:
        self._executor = executor
        self._workers = workers
        self._flags = flags
        self._sandbox: Sandbox | None = None

    async def share(self, prompt: str, sample: Any, teach: bool) -> float:
        """Return the share of a sample's ``metadata["test_cases"]`` that the program in its response passes.

        Raises:
            ValueError: the test cases are of another form than :func:`cases_of` reads.
            SandboxError: the isolation that was asked for does not work here.
        """
        cases, addition = cases_of((sample.metadata or {}).get("test_cases"))
        program = program_of(sample.response)
        if program is None:
            return 0.0
        if self._sandbox is None:
            isolation = None if self._flags.isolation == "auto" else self._flags.isolation
            self._sandbox = Sandbox(self._workers, isolation)
        program, early_stop = program + addition, self._flags.early_stop
        results = await execute_program(self._executor, self._sandbox, prompt, program, cases, teach, early_stop)
        return sum(result.verdict == "passed" for result in results) / len(cases)

    async def close(self) -> None:
        """Stop what runs."""
        if self._sandbox is not None:
            await self._sandbox.close()


_METHOD = """

if {name!r} not in globals() and "Solution" in globals():
    {name} = getattr(Solution(), {name!r})
"""


def cases_of(tests: Any) -> tuple[list[Case], str]:
    """Return test cases from ``{"inputs": [...], "outputs": [...]}`` or the same as JSON, and what is to stand after the program.

    Each input is what the program reads and each output what it is to print, or lists of their lines. With ``fn_name`` an input is
    the list of the function's arguments and an output its value; if they are text, JSON: of an input each line is an argument.
    The function may be a method of a class ``Solution``.

    Raises:
        ValueError: they are of another form.
    """
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
        pairs, name = list(zip(tests["inputs"], tests["outputs"], strict=True)), tests.get("fn_name")
        if not pairs:
            raise ValueError("there is none")
        if name is None:
            return [Case("stdin", _text(given), _text(wanted)) for given, wanted in pairs], ""
        if not str(name).isidentifier():
            raise ValueError(f"fn_name {name!r} is no function's name")
        return [_call(str(name), given, wanted) for given, wanted in pairs], _METHOD.format(name=str(name))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"test_cases wants as many inputs as outputs ({error!r}), found {str(tests)[:100]}") from error


def _call(name: str, given: Any, wanted: Any) -> Case:
    if isinstance(given, str):
        arguments = [json.loads(line) for line in given.split("\n") if line.strip()]
        expected = wanted if isinstance(wanted, str) else json.dumps(wanted)
    else:
        arguments, expected = list(given), json.dumps(wanted)
    return Case("call", json.dumps([name, arguments]), expected)


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
