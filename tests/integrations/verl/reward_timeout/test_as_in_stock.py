"""Tests that each kind of grader gives the same score or error as in verl without rl-accel."""

import pytest

pytestmark = pytest.mark.slow

HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"

KINDS = """
import asyncio, decimal, enum, fractions, json, multiprocessing, os, random, signal, subprocess, sys, threading, typing
from concurrent.futures import ThreadPoolExecutor
import numpy as np, torch

class Own(dict): pass
class Verdict(enum.IntEnum): RIGHT = 1
class Named(typing.NamedTuple): score: float
class OwnError(Exception):
    def __init__(self, code, why): super().__init__(why)
class Mute(Exception):
    def __str__(self): raise ValueError
class Lock(Exception):
    def __init__(self): self.lock = threading.Lock()
WORK = "def work(queue): queue.put(1.0)"

def raises(error): raise error
def recursion(n=0): return recursion(n + 1)
def in_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(0.5)); thread.start(); thread.join()
    return found[0]
def alarm():
    signal.signal(signal.SIGALRM, lambda *_: raises(TimeoutError())); signal.alarm(60); signal.alarm(0)
    return 0.75
def forked():
    context = multiprocessing.get_context("fork"); queue = context.Queue()
    process = context.Process(target=lambda: queue.put(1.0)); process.start(); found = queue.get(); process.join()
    return found
def spawned(): return multiprocessing.get_context("spawn").Pool(1).map(float, ["0.5"])[0]
def pooled():
    with ThreadPoolExecutor(4) as pool: return sum(pool.map(float, [0.25] * 4))
async def coroutine(): await asyncio.sleep(0); return 0.5
def mutate(extra_info): extra_info["x"] = 1; return len(extra_info)
def draws(): return float(len({random.random(), np.random.rand(), torch.rand(1).item()}))
def command(): return float(subprocess.run([sys.executable, "-c", "print(0.5)"], capture_output=True, text=True).stdout)

KINDS = {
    "int": lambda: 1, "bool": lambda: True, "float32": lambda: np.float32(0.5), "array": lambda: np.array(0.5),
    "vector": lambda: np.array([0.5]), "tensor": lambda: torch.tensor(0.5), "None": lambda: None, "list": lambda: [1.0],
    "tuple": lambda: (1.0, {"x": 1}), "text": lambda: "1.0", "nan": lambda: float("nan"), "inf": lambda: float("inf"),
    "decimal": lambda: decimal.Decimal("0.5"), "fraction": lambda: fractions.Fraction(1, 2),
    "dict": lambda: {"score": 1.0, "acc": True, "pred": "x"},
    "dict of numpy": lambda: {"score": np.float64(0.25), "acc": np.bool_(True), "none": None, "parts": np.arange(3)},
    "no score": lambda: {"reward": 1.0}, "score None": lambda: {"score": None, "acc": 1},
    "own dict": lambda: Own(score=1.0), "own enum": lambda: Verdict.RIGHT, "own tuple": lambda: Named(1.0),
    "enum in dict": lambda: {"score": 1.0, "verdict": Verdict.RIGHT}, "big": lambda: {"score": 1.0, "log": "x" * 5_000_000},
    "prints": lambda: print("y" * 10_000) or 1.0, "recursion": recursion, "raises": lambda: raises(RuntimeError("no")),
    "own error": lambda: raises(OwnError(3, "why")), "mute error": lambda: raises(Mute()), "unpicklable": lambda: raises(Lock()),
    "no module": lambda: __import__("a_package_that_is_not_there"), "alarm": alarm, "thread": in_thread, "pool": pooled,
    "fork": forked, "spawn": spawned, "command": command, "asyncio": lambda: asyncio.run(coroutine()),
    "folder": lambda: os.getcwd(), "draws": draws, "json": lambda: json.loads("{"),
}

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return mutate(extra_info) if ground_truth == "mutate" else KINDS[ground_truth]()
"""

TRUTHS = [{1: "a", "b": 2}, {(1, 2): 3}, b"\xff", "\ud800", {1, 2}, None, float("nan"), {"check": len}]

MODULES = {
    "torch computes at import": "import torch\nw = torch.randn(800, 800) @ torch.randn(800, 800)\n"
    + HEAD + "    return float(torch.isfinite(torch.randn(800, 800) @ w).all())\n",
    "a counter": "seen = []\n" + HEAD + "    seen.append(1)\n    return len(seen)\n",
    "no two torch draws are equal": "import torch\nseen = []\n"
    + HEAD + "    seen.append(torch.rand(1).item())\n    return float(len(set(seen)) == len(seen))\n",
    "a seed": "import random\nown = random.Random(7)\nfirst = [own.random() for _ in range(4)]\nrandom.seed(7)\n"
    + HEAD + "    return float(random.random() in first)\n",
    "the first answers raise": "seen = []\n"
    + HEAD + "    seen.append(1)\n    if len(seen) < 3: raise TimeoutError('it is still starting')\n    return 0.5\n",
    "a truth of any kind": HEAD + "    return float(len(repr(ground_truth)))\n",
}  # fmt: skip


def outcome(found):
    if isinstance(found, Exception):
        return f"{type(found).__name__}({getattr(found, 'args', '')})"
    return [repr(found["reward_score"]), repr(dict(found["reward_extra_info"]))]


@pytest.fixture
def both(configure, configured, score, tmp_path):
    """``both(source, data)``: outcomes in verl without us, and with reward_timeout."""

    def run(source, data):
        config = configure(source, {"probe_share": 0.0})
        stock = configured({"reward.custom_reward_function.path": str(tmp_path / "graded.py")})
        return [list(map(outcome, score(of, data()))) for of in (stock, config)]

    return run


def test_each_kind_of_grader_is_as_in_stock(both, responses, subtests):
    namespace: dict = {}
    exec(KINDS, namespace)
    kinds = [*namespace["KINDS"], "mutate"]
    result = both(KINDS, lambda: [responses("7", ground_truth=kind)[0] for kind in kinds])
    for kind, stock, pack in zip(kinds, *result, strict=True):
        with subtests.test(kind):
            assert pack == stock


@pytest.mark.parametrize("name", MODULES)
def test_each_kind_of_module_is_as_in_stock(name, both, responses):
    truths = TRUTHS if "truth" in name else ["7"] * 4
    stock, pack = both(MODULES[name], lambda: [responses("7", ground_truth=truth)[0] for truth in truths])
    assert pack == stock
