"""Callbacks on import: they run once the module is there, and never bring it in themselves."""

import importlib
import sys
import threading

import pytest

from rl_accel.errors import PatchRefused
from rl_accel.post_import import when_imported


def test_waits_for_the_import_without_importing(framework):
    name = f"{framework(load=False)}.core"
    seen = []
    when_imported(name, seen.append)
    assert name not in sys.modules
    module = importlib.import_module(name)
    assert seen == [module]
    assert module.double(2) == 4


def test_runs_at_once_when_already_imported(framework):
    name = f"{framework()}.core"
    seen = []
    when_imported(name, seen.append)
    assert seen == [sys.modules[name]]


def test_several_callbacks_run_in_order(framework):
    name = f"{framework(load=False)}.core"
    seen = []
    for n in range(4):
        when_imported(name, lambda _m, n=n: seen.append(n))
    importlib.import_module(name)
    assert seen == [0, 1, 2, 3]


def test_error_comes_out_of_the_import_each_time(framework):
    name = f"{framework(load=False)}.core"
    before, after = [], []
    when_imported(name, before.append)

    problems = [PatchRefused("not this one"), PatchRefused("not this one")]

    def refuse(_module):
        if problems:
            raise problems.pop()

    when_imported(name, refuse)
    when_imported(name, after.append)
    for attempt in (1, 2):
        with pytest.raises(PatchRefused, match="not this one"):
            importlib.import_module(name)
        assert name not in sys.modules
        assert (len(before), len(after)) == (attempt, 0)
    module = importlib.import_module(name)
    assert (before[-1], after) == (module, [module])


def test_error_of_an_immediate_callback_leaves_the_module_alone(framework):
    name = f"{framework()}.core"
    module = sys.modules[name]

    def refuse(_module):
        raise PatchRefused("no")

    with pytest.raises(PatchRefused):
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
    importing = threading.Thread(target=importlib.import_module, args=(core,))
    importing.start()
    while core not in sys.modules or not hasattr(sys.modules[core], "go_on"):
        importing.join(0.01)
    waiting = threading.Thread(target=when_imported, args=(core, lambda m: seen.append(m.finished)))
    waiting.start()
    waiting.join(0.1)
    assert seen == []
    sys.modules[core].go_on.set()
    importing.join(30)
    waiting.join(30)
    assert seen == [True]
