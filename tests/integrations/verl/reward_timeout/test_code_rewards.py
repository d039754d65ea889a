"""Tests verl's code rewards with a limit per test case: the scores equal those of verl's own functions."""

import asyncio
import json
import os
import pickle
import socket
import time

import psutil
import pytest
from verl.utils.reward_score import default_compute_score, sandbox_fusion

from rl_accel.reward.sandbox import bubblewrap_problem

pytestmark = pytest.mark.slow

STDIN = {"inputs": [f"{n}\n" for n in range(4)], "outputs": [f"{n * 2}\n" for n in range(4)]}
MANY = {"inputs": [f"{n}\n" for n in range(12)], "outputs": [f"{n * 2}\n" for n in range(12)]}
CALL = {"fn_name": "double", "inputs": ["1", "[1]", '"a"'], "outputs": ["2", "[1, 1]", '"aa"']}
PROGRAMS = {
    "right": "print(int(input()) * 2)",
    "fenced": "Here:\n```python\nimport sys\nprint(2 * int(sys.stdin.read()))\n```\nDone.",
    "main": "def main():\n    print(int(input()) * 2)\nif __name__ == '__main__':\n    main()",
    "half": "n = int(input())\nprint(n * 2 if n % 2 else 'odd')",
    "first ten": "n = int(input())\nprint(n * 2 if n < 10 else 0)",
    "raises": "n = int(input())\nassert n < 2\nprint(n * 2)",
    "floats": "print(float(input()) * 2)",
    "no code": "I do not know.",
    "exits": "import sys\nprint(int(input()) * 2)\nsys.exit(0)",
    "silent": "n = input()",
    "numpy": "import numpy as np\nprint(int(np.int64(input()) * 2))",
    "dies": "import os\nprint(int(input()) * 2)\nos._exit(0)",
    "forks": "import os\nif os.fork():\n    print(int(input()) * 2)",
    "prints elsewhere": "import sys\nprint(int(input()) * 2)\nprint('x' * 9, file=sys.__stdout__)",
}
FUNCTIONS = {
    "right": "def double(x):\n    return x * 2",
    "method": "class Solution:\n    def double(self, x):\n        return x * 2",
    "partly": "def double(x):\n    return x * 2 if isinstance(x, int) else x",
    "other name": "def twice(x):\n    return x * 2",
    "prints": "print(eval(input()) * 2)",
}
FEW = {name: PROGRAMS[name] for name in ("right", "first ten", "half")}


@pytest.fixture
def prime(configure, manager_of):
    """``prime(solutions, truth, keys, **flags)``: our scores of these programs, and what was counted."""

    def run(solutions, truth, keys=(), **flags):
        manager = manager_of(configure(None, {"workers": 2, **flags}, keys))
        truth = truth if isinstance(truth, str) else json.dumps(truth)

        async def all_of_them():
            try:
                return [await manager.score("codecontests", text, truth, {}) for text in solutions]
            finally:
                await manager.close()

        return asyncio.run(all_of_them()), manager.anchors

    return run


@pytest.mark.parametrize(
    ("truth", "programs"),
    [(STDIN, PROGRAMS), (MANY, FEW), (CALL, FUNCTIONS), ({**STDIN, "outputs": []}, {"right": PROGRAMS["right"]})],
    ids=["stdin", "more than ten", "function", "outputs missing"],
)
def test_prime_code_scores_are_verls(prime, truth, programs):
    ours, _ = prime(programs.values(), truth)
    theirs = [default_compute_score("codecontests", text, json.dumps(truth)) for text in programs.values()]
    assert dict(zip(programs, ours, strict=True)) == dict(zip(programs, theirs, strict=True))


def test_early_stop_scores_all_or_nothing_and_a_ground_truth_that_holds_no_cases_is_zero_as_with_verl(prime):
    for truth in ("not json", "[]", "{}", json.dumps({"inputs": None, "outputs": []})):
        assert prime(["print(1)"], truth)[0] == [0.0]
    wrong = "n = int(input())\nprint(n * 2 if n else 'x')"
    assert prime([PROGRAMS["right"], wrong], STDIN, early_stop=True)[0] == [1.0, 0.0]


def test_a_case_that_hangs_fails_alone_and_is_killed(prime):
    hangs = "n = int(input())\nwhile n == 1:\n    pass\nprint(n * 2)"
    began = time.monotonic()
    scores, replica = prime([hangs], STDIN, maximum=1.0, minimum=0.5)
    assert scores == [0.75]
    assert time.monotonic() - began < 20
    counts = replica.totals
    assert (counts["executions"], counts["timeouts"], counts["correct"]) == (4, 1, 3)
    assert len(replica.timeout.anchors()) == 3, "every case has an anchor of its own"


SAYS = r"""
import os
report = b'{"verdict": "done", "reason": ""}' + b"\n" + CONTENT
for descriptor in range(200, 260):
    try:
        while report:
            report = report[os.write(descriptor, report):]
        break
    except OSError:
        pass
os._exit(0)
"""
FORGED = {
    **{text: text.encode() for text in ("null", "5", "1e999", '"text"', "true", "[]", "[[]]", "{}", '{"0": [true]}')},
    **{text: text.encode() for text in ("[[], {}]", "[[true, true], {}]", "[[1], {}]", "[true, {}]", "[[true]]")},
    **{
        text: text.encode() for text in ("[[true], {}, {}]", '[[true], {"error": 1}]', "[[[true]], {}]", "[[true], []]")
    },
    "nothing": b"",
    "a pickle": pickle.dumps(([True], {})),
    "a pickle of a number": pickle.dumps((5, {})),
    "a pickle that grows": r'b"\x80\x04(" + b"}" * 20_000_000 + b"l."',
    "nested too deep": 'b"[" * 1_000_000',
    "an endless number": 'b"9" * 1_000_000',
    "a million lines": r'b"[]\n" * 1_000_000',
    "20 MB": 'b"[" + b"0," * 10_000_000 + b"0]"',
}


def test_an_answer_that_writes_the_report_of_its_judge_is_wrong_and_harms_nothing_else(prime):
    texts = (content if isinstance(content, str) else repr(content) for content in FORGED.values())
    programs = [SAYS.replace("CONTENT", text) for text in texts]
    began = psutil.Process().memory_info().rss
    scores, _ = prime([*programs, PROGRAMS["right"]], STDIN)
    assert dict(zip(FORGED, scores[:-1], strict=True)) == dict.fromkeys(FORGED, 0.0)
    assert scores[-1] == 1.0
    assert psutil.Process().memory_info().rss < began + (200 << 20)


ENDLESS = """
import os
while True:
    for descriptor in range(200, 260):
        try:
            os.write(descriptor, b'{"verdict": "done"' + b" " * 50_000)
        except OSError:
            pass
"""


def test_a_report_without_end_ends_at_its_limit(prime):
    assert prime([ENDLESS, PROGRAMS["right"]], {"inputs": ["1"], "outputs": ["2"]})[0] == [0.0, 1.0]


@pytest.mark.parametrize("isolation", ["auto", "process", "bubblewrap"])
def test_a_solution_reaches_no_file_of_the_users_and_no_network(prime, tmp_path, monkeypatch, caplog, isolation):
    problem = bubblewrap_problem()
    if isolation == "bubblewrap" and problem:
        pytest.skip(f"bubblewrap does not work here: {problem}")
    if os.geteuid() != 0 and (isolation == "process" or problem):
        pytest.skip("without root and bubblewrap nothing keeps a program from this user's files")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        reads = f"import os\nprint(os.read(os.open({str(tmp_path / 'token')!r}, os.O_RDONLY), 99).decode())"
        connects = f"import socket\nsocket.create_connection({server.getsockname()!r}, 5)\nprint('secret')"
        truth = {"inputs": [""], "outputs": ["secret"]}
        theirs = [default_compute_score("codecontests", text, json.dumps(truth)) for text in (reads, connects)]
        assert theirs == [1.0, 1.0], "verl's own function lets them"
        (read, connected, control), _ = prime([reads, connects, "print('secret')"], truth, isolation=isolation)
    assert (read, control) == (0.0, 1.0)
    if not any("share this machine's network" in record.getMessage() for record in caplog.records):
        assert connected == 0.0


class Sandbox:
    """Speaks sandbox_fusion's API about programs that say themselves what is to become of them."""

    def __init__(self):
        self.seen = []

    def answer(self, _path, asked):
        self.seen.append(asked)
        code, given = asked["code"], asked["stdin"]
        run = {"status": "Finished", "execution_time": 0.25, "return_code": 0, "stderr": ""}
        run["stdout"] = f"{int(given) * 2}\n"
        answer = {"status": "Success", "compile_result": None, "run_result": run}
        if "wrong" in code and int(given) % 2:
            run["stdout"] = "no"
        if "hang" in code and int(given) == 1:
            run.update(status="TimeLimitExceeded", execution_time=float(asked["run_timeout"]))
            answer["status"] = "Failed"
        if "compile" in code and int(given) == 2:
            answer.update(status="Failed", compile_result={"status": "Error", "execution_time": 0.1})
        return json.dumps(answer)


def test_sandbox_fusion_scores_are_verls_with_limits_of_ours(web_server, prime):
    sandbox = Sandbox()
    url = f"{web_server(sandbox.answer)}/run_code"
    texts = [f"```python\n{code}\n```" for code in ("right", "hang", "compile")]
    texts += ["```\nwrong\n```", "no code at all"]
    truths = [STDIN, MANY, {"inputs": ["1"], "outputs": []}, {"nothing": 1}, {"assert_case": []}]
    for truth in truths:
        where = (url, None, 1024)
        theirs = [sandbox_fusion.compute_score(*where, text, json.dumps(truth), continuous=True)[0] for text in texts]
        sandbox.seen.clear()
        flags = {"maximum": 4.5, "minimum": 1.5, "min_correct": 1}
        ours, replica = prime(texts, truth, {"reward.sandbox_fusion.url": url}, **flags)
        assert ours == theirs
        if truth is STDIN:
            assert [asked["run_timeout"] for asked in sandbox.seen][:4] == [5] * 4, "the whole budget, in whole seconds"
            assert sandbox.seen[-1]["run_timeout"] == 2, "learned from what the sandbox says that correct ones took"
            assert {wall for wall, _, _ in replica.timeout.anchors().values()} == {0.25}
