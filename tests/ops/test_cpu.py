"""Threads of CPU kernels, and machine code that is kept on disk and never used once any file of the kernels has changed."""

import threading

import pytest

from rl_accel.ops.cpu import run


def test_runs_every_task_and_the_caller_helps():
    seen = []
    run([lambda i=i: seen.append((i, threading.get_ident())) for i in range(50)], 1)
    assert sorted(i for i, _ in seen) == list(range(50))
    assert {thread for _, thread in seen} == {threading.get_ident()}


def test_tasks_run_beside_each_other():
    together = threading.Barrier(2)
    run([lambda: together.wait(20), lambda: together.wait(20)], 2)


def test_an_error_is_raised_after_all_threads_have_stopped():
    started, stopped = threading.Event(), threading.Event()

    def slow():
        started.set()
        threading.Event().wait(0.2)
        stopped.set()

    def bad():
        started.wait(20)
        raise ArithmeticError("broken")

    with pytest.raises(ArithmeticError, match="broken"):
        run([bad, slow], 2)
    assert stopped.is_set()
    with pytest.raises(ArithmeticError, match="broken"):
        run([slow, bad], 2)


def test_no_tasks_is_no_error():
    run([], 4)


CALL = """
import sys, torch
from rl_accel.ops import cpu
cpu._DIGEST = {digest}
from rl_accel.ops import gae
from rl_accel.ops.scan import numba
gae(torch.ones(2, 3), torch.ones(2, 3), backend="numba")
stats = numba.scan_lanes.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


@pytest.mark.slow
def test_code_compiled_for_other_sources_is_not_loaded(python, tmp_path):
    kept = {"NUMBA_CACHE_DIR": str(tmp_path / "kept")}
    found = [python(CALL.format(digest=digest), **kept) for digest in ("cpu._DIGEST",) * 2 + ("'another release'",)]
    assert [done.stdout.split() for done in found] == [["0", "1"], ["1", "0"], ["0", "1"]], found[-1].stderr
