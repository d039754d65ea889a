"""Tests callbacks on import: they run after the import of a module, and never import the module themselves."""

import importlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from rl_accel.errors import PatchRefused
from rl_accel.post_import import when_imported


def test_callbacks_wait_for_the_import_without_importing_and_run_in_order_or_else_at_once(framework):
    name, seen = f"{framework(load=False)}.core", []
    for n in range(4):
        when_imported(name, lambda module, n=n: seen.append((n, module)))
    assert name not in sys.modules
    module = importlib.import_module(name)
    assert seen == [(n, module) for n in range(4)]
    assert module.double(2) == 4
    when_imported(name, seen.append)
    assert seen[4:] == [module]


def test_error_comes_out_of_the_import_each_time_and_once_imported_leaves_the_module_alone(framework):
    name = f"{framework(load=False)}.core"
    before, after, problems = [], [], [PatchRefused("not this one")] * 2

    def refuse(_module):
        if problems:
            raise problems.pop()

    for callback in (before.append, refuse, after.append):
        when_imported(name, callback)
    for attempt in (1, 2):
        with pytest.raises(PatchRefused, match="not this one"):
            importlib.import_module(name)
        assert name not in sys.modules
        assert (len(before), len(after)) == (attempt, 0)
    module = importlib.import_module(name)
    assert (before[-1], after) == (module, [module])
    problems.append(PatchRefused("too late"))
    with pytest.raises(PatchRefused, match="too late"):
        when_imported(name, refuse)
    assert sys.modules[name] is module


def test_half_imported_module_is_refused_in_its_own_thread(framework):
    name = framework(
        """
        import rl_accel.post_import as p
        try:
            p.when_imported(__name__, print)
        except Exception as e:
            error = e
        """,
        load=False,
    )
    module = importlib.import_module(f"{name}.core")
    assert isinstance(module.error, PatchRefused)


def test_half_imported_module_is_awaited_from_another_thread(framework):
    name = framework(
        """
        import threading
        started, go_on = threading.Event(), threading.Event()
        started.set()
        assert go_on.wait(30)
        finished = True
        """,
        load=False,
    )
    core, seen = f"{name}.core", []
    with ThreadPoolExecutor(2) as pool:
        pool.submit(importlib.import_module, core)
        while core not in sys.modules or not hasattr(sys.modules[core], "go_on"):
            time.sleep(0.01)
        waiting = pool.submit(when_imported, core, lambda m: seen.append(m.finished))
        wait([waiting], 0.1)
        assert seen == []
        sys.modules[core].go_on.set()
    assert seen == [True]
