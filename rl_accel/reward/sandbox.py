"""Sandbox for untrusted programs, and the test cases of a program. Runs in the process that grades.

The programs run below supervisors (``program_process``), which can neither stall nor exhaust nor outlive the process that grades.
"""

import asyncio
import contextlib
import functools
import json
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from rl_accel.reward import program_process
from rl_accel.reward.graders import Peer, Pool, SandboxError, finished
from rl_accel.reward.limited_executor import ExecutionResult, LimitedExecutor, Limits, gather_until
from rl_accel.reward.program_process import OUTPUT_KEPT, REPORT_BYTES, WAITED_FACTOR

logger = logging.getLogger("rl_accel")

Kind = Literal["stdin", "call"]
_LOST = (ConnectionError, asyncio.IncompleteReadError, TimeoutError, ValueError)
"""Exceptions that a supervisor causes if it has died, does not answer, or sends what is no answer."""
_GRACE_SECONDS = 10.0
"""Seconds after the longest time of a program by which its supervisor must have answered. Chosen by hand."""
_START_SECONDS = 60.0
_MOST_ANSWER_BYTES = 8 * (REPORT_BYTES + OUTPUT_KEPT)  # JSON in JSON: a character may take six
_LONG_ANSWER_BYTES = 1 << 16
"""Size in bytes above which an answer is read in a thread, not on the event loop."""
_VERDICTS = ("passed", "wrong", "done", "error", "timeout", "memory", "killed")


@dataclass(frozen=True)
class Case:
    """One test case of a program.

    Kind ``stdin``: the program reads ``given`` from its standard input. The text that the program prints must equal ``expected``,
    apart from trailing white space.
    Kind ``call``: a function of the program is called. ``given`` is the JSON text ``[name, arguments]``. The return value must
    equal the value in the JSON text ``expected``.

    Raises:
        ValueError: ``kind`` is unknown. Or the kind is ``call``, and ``given`` or ``expected`` is no such JSON text.
    """

    kind: Kind
    given: str
    expected: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, found {self.kind!r}")
        if self.kind == "call":
            try:
                name, arguments = json.loads(self.given)
                json.loads(self.expected)
            except (ValueError, TypeError) as error:
                raise ValueError(f"a call wants JSON, [name, arguments] and the value expected: {error}") from error
            if not isinstance(name, str) or not isinstance(arguments, list):
                raise ValueError(f"a call wants [name, arguments], found {self.given!r}")


@dataclass(eq=False)
class _Supervisor(Peer):
    """Supervisor, or bubblewrap, which runs it."""

    answer: "asyncio.Future[dict[str, Any]] | None" = None

    async def read(self) -> dict[str, Any]:
        """Returns the next message. Raises an exception of :data:`_LOST` if it is too long or no JSON object."""
        data = await self.receive(_MOST_ANSWER_BYTES)
        message = await asyncio.to_thread(json.loads, data) if len(data) > _LONG_ANSWER_BYTES else json.loads(data)
        if not isinstance(message, dict):
            raise ValueError("a supervisor sent no JSON object")
        return message

    async def run(self, request: dict[str, Any], limits: Limits) -> dict[str, Any]:
        """Has a program run, and tells the supervisor of new limits. Raises an exception of :data:`_LOST`."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        times = (limits.wall, limits.cpu)
        self.send(pickle.dumps(request))
        self.answer = asyncio.ensure_future(self.read())
        while not (await asyncio.wait({self.answer}, timeout=limits.check_seconds))[0]:
            if loop.time() > began + WAITED_FACTOR * times[0] + _GRACE_SECONDS:
                raise TimeoutError
            if (changed := limits.times()) != times:
                times = changed
                self.send(pickle.dumps({"wall": times[0], "cpu": times[1]}))
        return self.answer.result()

    async def stop(self) -> bool:
        """Stops the running program. Returns whether the supervisor can go on."""
        self.send(pickle.dumps({"stop": True}))
        with contextlib.suppress(*_LOST):
            if self.answer:
                await asyncio.wait_for(asyncio.shield(self.answer), _GRACE_SECONDS)
                return True
        return False

    async def end(self) -> None:
        """Ends the supervisor and its program."""
        await super().end()
        if self.answer:
            with contextlib.suppress(*_LOST):
                await self.answer


class Sandbox(Pool[_Supervisor]):
    """Pool of supervisors for untrusted programs. Each program runs in a newly forked process. Use it from one event loop.

    SECURITY.md says what each isolation guarantees. A warning lists what is not protected from programs: network, processes or
    files of this process's user.

    Args:
        workers: maximum number of programs that run at once; further ones wait in order. None: number of cores of this process.
        isolation: "process", "bubblewrap", or "auto" (bubblewrap if it works on this machine, else process).
        judge: "" to run programs, or "/path/file.py:function": a function that itself executes the programs that it gets, such as
            verl's grading code. It runs like a program, with limits and without rights.

    Raises:
        SandboxError: ``isolation`` is "bubblewrap", and bubblewrap does not work on this machine.
        ValueError: ``workers`` is below 1, or ``isolation`` is unknown.
    """

    def __init__(self, workers: int | None = None, isolation: str = "auto", judge: str = "") -> None:
        size = len(os.sched_getaffinity(0)) if workers is None else workers
        if size < 1:
            raise ValueError(f"workers must be at least 1, found {workers!r}")
        super().__init__()
        self._isolation = _choose_isolation(isolation)
        self._judge = judge
        self._slots = asyncio.Semaphore(size)
        self._warned = False

    async def run(self, code: str, case: Case, limits: Limits | None = None) -> ExecutionResult:
        """Runs the program ``code`` on a test case. Cancelling this call stops the program at once.

        If the supervisor dies, the program runs again below another one. If that one dies too, the verdict is "killed".

        Raises:
            SandboxError: no supervisor can be started, or the sandbox is closed.
        """
        return await self._run(code, asdict(case), limits or Limits())

    async def call_judge(self, arguments: Mapping[str, Any], limits: Limits | None = None) -> ExecutionResult:
        """Calls the judge with keyword arguments. ``value`` of the result is what it returned, as JSON of at most 1 MB.

        A program that the judge executed may have forged this value. Raises and cancels as :meth:`run`.
        """
        return await self._run("", {"kind": "judge", "arguments": dict(arguments)}, limits or Limits())

    async def _run(self, code: str, case: dict[str, Any], limits: Limits) -> ExecutionResult:
        request = {"limits": limits.numbers(), "code": code, "case": case}
        for _ in range(2):
            async with self._slots:
                supervisor = await self._take(limits.memory)
                can_go_on = False
                try:
                    answer = await supervisor.run(request, limits)
                    can_go_on = True
                    return await _result_of(answer)
                except asyncio.CancelledError:
                    can_go_on = await finished(supervisor.stop())
                    raise
                except _LOST as error:
                    if self._closed:
                        raise SandboxError("the sandbox is closed") from None
                    self.deaths += 1
                    logger.warning("rl-accel: a supervisor of programs died (%r)", error)
                finally:
                    if can_go_on and not self._closed:
                        self._idle.append(supervisor)
                    else:
                        await finished(self._end(supervisor))
        return ExecutionResult("killed", reason="two supervisors died while running it")

    async def _take(self, memory: int) -> _Supervisor:
        while self._idle:
            supervisor = self._idle.pop()
            if supervisor.host and supervisor.host.poll() is None and not supervisor.reader.at_eof():
                return supervisor
            self.deaths += 1  # it died while idle: no program is to blame
            await self._end(supervisor)
        if self._closed:
            raise SandboxError("the sandbox is closed")
        command = [sys.executable, "-I", program_process.__file__]
        if self._isolation == "bubblewrap":
            command = [*_bubblewrap(memory, self._judge), *command]
        libraries = os.environ.get("LD_LIBRARY_PATH", "")
        supervisor = await _Supervisor.start(
            command,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "LD_LIBRARY_PATH": libraries},
            cwd="/",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._all.add(supervisor)
        try:
            start = {"isolation": self._isolation, "judge": self._judge, "memory": memory}
            supervisor.send(pickle.dumps(start))
            ready = await asyncio.wait_for(supervisor.read(), _START_SECONDS)
            if ready["problem"]:
                raise SandboxError(ready["problem"])
        except BaseException as error:
            await finished(self._end(supervisor))
            if isinstance(error, _LOST):
                raise SandboxError(f"a supervisor of programs cannot be started: {error!r}") from error
            raise
        if ready["shared"] and not self._warned:
            self._warned = True
            logger.warning("rl-accel: untrusted programs share this user's %s", " and ".join(ready["shared"]))
        return supervisor

    async def close(self) -> None:
        """Ends all supervisors. Stops running programs, whose callers get a SandboxError."""
        self._closed = True
        while self._all:
            await asyncio.gather(*map(self._end, list(self._all)), return_exceptions=True)
        self._idle.clear()


async def _result_of(answer: dict[str, Any]) -> ExecutionResult:
    """Returns the result in the answer of a supervisor. Raises ValueError if it has another form."""
    texts = [answer.get(name) for name in ("verdict", "reason", "output")]
    seconds = [answer.get(name) for name in ("wall", "cpu")]
    if not all(isinstance(text, str) for text in texts) or not all(type(number) is float for number in seconds):
        raise ValueError("a supervisor sent an answer of another form")
    verdict: Any = answer["verdict"]
    if verdict not in _VERDICTS:
        raise ValueError(f"a supervisor sent the verdict {verdict!r}")
    value = None
    if verdict == "done":
        text = str(answer.get("value"))
        try:
            value = await asyncio.to_thread(json.loads, text) if len(text) > _LONG_ANSWER_BYTES else json.loads(text)
        except RecursionError:  # the supervisor could read it, because fewer calls were open there
            return ExecutionResult("error", wall=answer["wall"], reason="its value is nested too deep")
    return ExecutionResult(
        verdict, value, wall=answer["wall"], cpu=answer["cpu"], reason=answer["reason"], output=answer["output"]
    )


def _choose_isolation(wanted: str) -> str:
    if wanted not in ("auto", "process", "bubblewrap"):
        raise ValueError(f"isolation must be auto, process or bubblewrap, found {wanted!r}")
    problem = bubblewrap_problem() if wanted != "process" else ""
    if wanted == "bubblewrap" and problem:
        raise SandboxError(f"bubblewrap does not work here: {problem}")
    return "process" if wanted == "process" or problem else "bubblewrap"


@functools.cache
def bubblewrap_problem() -> str:
    """Returns the reason why bubblewrap cannot be used on this machine, or "" if bubblewrap works."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed"
    done = subprocess.run([*_bubblewrap(1 << 20, ""), "true"], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr.strip()[:200]


def _bubblewrap(memory: int, judge: str) -> list[str]:
    """Returns the words to put before a command so that the command runs under bubblewrap.

    The command then sees only the interpreter, the system's programs and the judge. It has no network, and a private /tmp of
    ``memory`` bytes.
    """
    bwrap = shutil.which("bwrap") or "bwrap"  # the environment of supervisors has another PATH
    standard = os.path.dirname(os.__file__)
    ends = ("-packages", f"{os.sep}lib-dynload")
    installed = [path for path in map(str, sys.path) if path.startswith(standard) or path.endswith(ends)]
    libraries = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    shown = ["/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"]
    shown += [sys.base_prefix, sys.prefix, *installed, *libraries, program_process.__file__]
    shown += [judge.rpartition(":")[0]] if judge else []
    no_namespaces = []  # a program could mount files that are not counted; bubblewrap has the option since 0.8
    if "--disable-userns" in subprocess.run([bwrap, "--help"], capture_output=True, text=True).stdout:
        no_namespaces = ["--disable-userns"]
    private = ["--dev", "/dev", "--proc", "/proc"]
    for folder in ("/tmp", "/var/tmp", "/dev/shm"):
        private += ["--size", str(memory), "--tmpfs", folder]
    return [
        *(bwrap, *private),
        *(word for path in shown for word in ("--ro-bind-try", path, path)),  # last: an interpreter may lie below /tmp
        *("--remount-ro", "/dev", "--remount-ro", "/"),
        *("--unshare-all", "--unshare-user", *no_namespaces, "--uid", "1000", "--gid", "1000", "--as-pid-1"),
        *("--die-with-parent", "--new-session", "--"),
    ]


async def execute_program(
    executor: LimitedExecutor,
    sandbox: Sandbox,
    prompt: str,
    code: str,
    cases: Sequence[Case],
    teach: bool = True,
    early_stop: bool = False,
) -> list[ExecutionResult]:
    """Runs the program ``code`` on its test cases. Returns the results in the order of the test cases.

    With ``early_stop``, the test cases run one after another, and the first one that does not pass is the last.
    """

    async def one(number: int) -> ExecutionResult:
        return await executor.execute(
            prompt,
            str(number),
            lambda limits: sandbox.run(code, cases[number], limits),
            lambda result: result.verdict == "passed",
            teach,
        )

    if not early_stop:
        return await gather_until(map(one, range(len(cases))))
    results: list[ExecutionResult] = []
    for number in range(len(cases)):
        results.append(await one(number))
        if results[-1].verdict != "passed":
            break
    return results


_BLOCK = re.compile(r"```[ \t]*([A-Za-z0-9_+-]*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = ("python", "python3", "py")


def program_of(response: str) -> str | None:
    """Returns the last Python code block of a response, else the last code block without a language, else None."""
    blocks = _BLOCK.findall(response)
    for languages in (_PYTHON, ("",)):
        programs = [code for language, code in blocks if language.lower() in languages]
        if programs:
            return str(programs[-1])
    return None


_METHOD = """

if {name!r} not in globals() and "Solution" in globals():
    {name} = getattr(Solution(), {name!r})
"""


def cases_of(tests: Any) -> tuple[list[Case], str]:
    """Parses test cases: a mapping ``{"inputs": [...], "outputs": [...]}``, or this mapping as JSON text.

    Without the key ``fn_name``, an input is the program's standard input and an output is the expected standard output. Both are
    text or lists of lines.

    With the key ``fn_name``, the program defines a function of this name, perhaps as a method of a class ``Solution``. An input is
    the list of the function's arguments, or text with one argument as JSON per line. An output is the expected return value, or its
    JSON if the input is text.

    Returns the test cases, and code to append to the program, which makes a method of ``Solution`` available as a function.

    Raises:
        ValueError: ``tests`` has another form.
    """
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
        pairs = list(zip(tests["inputs"], tests["outputs"], strict=True))
        name = tests.get("fn_name")
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
        arguments = list(given)
        expected = json.dumps(wanted)
    return Case("call", json.dumps([name, arguments]), expected)


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
