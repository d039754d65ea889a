"""The threads behind the CPU kernels."""

import threading

import pytest

from rl_accel.ops.workers import Workers, default_threads, usable_cores


def test_runs_every_task_and_the_caller_helps():
    seen = []
    Workers().run([lambda i=i: seen.append((i, threading.get_ident())) for i in range(50)], 1)
    assert sorted(i for i, _ in seen) == list(range(50))
    assert {thread for _, thread in seen} == {threading.get_ident()}


def test_tasks_run_beside_each_other():
    together = threading.Barrier(2)
    Workers().run([lambda: together.wait(20), lambda: together.wait(20)], 2)


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
        Workers().run([bad, slow], 2)
    assert stopped.is_set()
    with pytest.raises(ArithmeticError, match="broken"):
        Workers().run([slow, bad], 2)


def test_no_tasks_is_no_error():
    Workers().run([], 4)


def test_thread_counts_fit_the_machine():
    assert 1 <= default_threads() <= min(16, usable_cores())
