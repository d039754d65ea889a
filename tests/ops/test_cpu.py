"""Tests the threads of CPU kernels, and the cache of machine code, which is never used after the kernel's file has changed."""

import os
import threading

import pytest

from rl_accel.ops.cpu import run


def test_runs_every_task_beside_others_or_in_the_calling_thread():
    seen = []
    run([lambda i=i: seen.append((i, threading.get_ident())) for i in range(50)], 1)
    assert sorted(seen) == [(i, threading.get_ident()) for i in range(50)]
    run([], 4)
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


@pytest.mark.slow
def test_compiled_code_is_kept_and_not_loaded_for_another_source(python, tmp_path):
    """A small kernel in three processes, which changes before the third."""
    script = """
        from kernel import add
        from rl_accel.ops import cpu
        from rl_accel.ops.scan import numba
        assert type(numba.gae_rows._cache) is cpu._Cache
        kernel = cpu.compiled(add)
        print(kernel(1), sum(kernel.stats.cache_hits.values()))
    """
    results = []
    for constant in (2, 2, 30):
        (tmp_path / "kernel.py").write_text(f"def add(a):\n    return a + {constant}\n")
        if constant == 2:
            os.utime(tmp_path / "kernel.py", (1, 1))
        results.append(python(script, NUMBA_CACHE_DIR=f"{tmp_path}/kept", PYTHONDONTWRITEBYTECODE="1").stdout.split())
    assert results == [["3", "0"], ["3", "1"], ["31", "0"]]


@pytest.mark.slow
def test_a_full_disk_or_a_damaged_file_costs_a_compilation_and_no_call(python, tmp_path):
    (tmp_path / "kernel.py").write_text("def add(a):\n    return a + 2\n")
    script = """
        import resource, sys
        from kernel import add
        from rl_accel.ops import cpu
        kernel = cpu.compiled(add)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
        print(kernel(1), sum(kernel.stats.cache_hits.values()))
    """
    kept = tmp_path / "kept"
    for space, damage, found in (("0", "", "3 0"), ("-1", "", "3 0"), ("-1", "*.nbi", "3 0"), ("-1", "", "3 1")):
        for file in kept.rglob(damage or "nothing"):
            file.write_bytes(b"")
        done = python(script, space, NUMBA_CACHE_DIR=str(kept), PYTHONDONTWRITEBYTECODE="1")
        assert done.stdout.strip() == found, (space, damage)
