"""Threads of CPU kernels, and machine code that is kept on disk and never used once any file of the kernels has changed."""

import threading

import pytest

from rl_accel.ops.cpu import run


def test_runs_every_task_beside_others_and_the_caller_helps():
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
def test_compiled_code_is_kept_and_not_loaded_for_other_sources(python, tmp_path):
    """A small kernel in two processes, for these sources and then for those of another release."""
    (tmp_path / "kernel.py").write_text("def add(a, b):\n    return a + b\n")
    script = """
        from kernel import add
        from rl_accel.ops import cpu
        from rl_accel.ops.scan import numba
        assert type(numba.scan_lanes._cache) is cpu._Cache
        for cpu._DIGEST in (cpu._DIGEST, "another release"):
            kernel = cpu.compiled(add)
            assert kernel(1, 2) == 3
            print(sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()))
    """
    first, second = (python(script, NUMBA_CACHE_DIR=str(tmp_path / "kept")) for _ in range(2))
    assert first.stdout.split() == ["0", "1", "0", "1"], first.stderr
    assert second.stdout.split() == ["1", "0", "1", "0"], second.stderr
