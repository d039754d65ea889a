"""Tests the patch engine: it refuses before it writes, writes everywhere or nowhere, reports its state, and restores exactly."""

import functools
import inspect
import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rl_accel.errors import BackendMissing, PatchRefused
from rl_accel.patches.patch import Patch
from rl_accel.patches.upstream import fingerprint
from rl_accel.switch import SwitchState


def tripled(original, settings):
    def replacement(x, times=2):
        return original(x, times) * (settings or 3)

    return replacement


def around(original, _settings):
    def replacement(*args):
        return "ours:" + str(original(*args))

    return replacement


@pytest.fixture
def patch_of(framework):
    """``patch_of(*source, version=..., **fields)``: the module and a patch of ``core.double``; reverted at the end."""
    made = []

    def make(*source, version="1.4.0", **fields):
        name = framework(*source, version=version)
        core = f"{name}.core"
        standard = {"name": f"{name}.double", "supports": f"{name}>=1.4", "params": ("x", "times"), "make": tripled}
        standard |= {"target": f"{core}:double", "bindings": (f"{core}:REGISTRY[double]",)}
        given = {k: v.format(core=core) if isinstance(v, str) else v for k, v in fields.items()}
        patch = Patch(**{**standard, **given})
        made.append(patch)
        return sys.modules[core], patch

    yield make
    for patch in made:
        if patch.state() is SwitchState.APPLIED:
            patch.revert()


def test_apply_and_revert_at_every_binding(patch_of):
    core, patch = patch_of()
    original = core.double
    assert patch.state() is SwitchState.WAITING
    patch.apply(10)
    assert (core.double(1), core.REGISTRY["double"](1), patch.state()) == (20, 20, SwitchState.APPLIED)
    first = core.double
    patch.apply(7)
    assert core.double is first
    for _ in range(2):
        patch.revert()
        assert core.double is original
        assert core.REGISTRY["double"] is original
        assert patch.state() is SwitchState.WAITING


def test_replacement_looks_like_the_original_and_no_other_patch_of_ours_may_replace_it(patch_of):
    core, patch = patch_of()
    original = core.double
    patch.apply()
    assert (core.double.__name__, core.double.__doc__) == ("double", "Twice x.")
    assert core.double.__wrapped__ is original
    assert core.double.__rl_accel_patch__ == patch.name
    assert inspect.signature(core.double) == inspect.signature(original)
    with pytest.raises(PatchRefused, match=f"already wrapped by rl-accel's patch {patch.name}"):
        replace(patch, name="second").apply()


@pytest.mark.parametrize(
    ("attribute", "params", "call", "expected"),
    [
        ("size", ("self", "extra"), lambda c: c.Pool().size(2), "ours:3"),
        ("kind", ("name",), lambda c: c.Pool.kind("a"), "ours:A"),
        ("kind", ("name",), lambda c: c.Pool().kind("a"), "ours:A"),
        ("make", ("cls", "name"), lambda c: c.Child.make("a"), "ours:Childa"),
    ],
)
def test_methods_keep_their_kind(patch_of, attribute, params, call, expected):
    core, patch = patch_of(target="{core}:Pool." + attribute, bindings=(), params=params, make=around)
    raw = vars(core.Pool)[attribute]
    patch.apply()
    assert call(core) == expected
    assert type(vars(core.Pool)[attribute]) is type(raw)
    patch.revert()
    assert vars(core.Pool)[attribute] is raw


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target": "{core}:triple"}, "does not exist"),
        ({"target": "{core}:Gone.method"}, "does not exist"),
        ({"target": "{core}:Child.size"}, "is inherited"),
        ({"target": "{core}:REGISTRY[triple]"}, "does not exist"),
        ({"target": "{core}:double[x]"}, "wanted a dict, found function"),
        ({"target": "{core}.later:double"}, "is not imported"),
        ({"target": "{core}:Pool", "params": ()}, "already replaced by builtins.type"),
        ({"params": ("x", "factor")}, r"takes \(x, times\), wanted \(x, factor\)"),
        ({"supports": "fake>=1.5,<2"}, "supports fake>=1.5,<2, running 1.4.0"),
    ],
)
def test_refuses_what_it_was_not_written_for(patch_of, fields, message):
    core, patch = patch_of(**fields)
    before = dict(vars(core)), dict(core.REGISTRY)
    with pytest.raises(PatchRefused, match=message):
        patch.apply()
    assert (dict(vars(core)), dict(core.REGISTRY)) == before
    assert patch.state() is SwitchState.WAITING


def test_prereleases_and_later_versions_count_and_unknown_ones_are_refused_as_is_a_malformed_target(patch_of):
    for version in ("1.5.0.dev3", "1.5rc1", "2.0"):
        patch_of(version=version)[1].apply()
    for version in ("not-a-version", None):
        with pytest.raises(PatchRefused, match=r"version of .* is unknown"):
            patch_of(version=version)[1].apply()
    with pytest.raises(ValueError, match=r"pkg\.mod:attr"):
        patch_of(target="no colon here")[1].apply()


def test_bindings_must_hold_the_same_object(patch_of):
    core, patch = patch_of()
    original, other = core.double, core.register
    core.REGISTRY["double"] = other
    with pytest.raises(PatchRefused, match=r"REGISTRY\[double\] holds .*core\.register"):
        patch.apply()
    assert core.double is original
    assert core.REGISTRY["double"] is other


@pytest.mark.parametrize("disguised", [True, False])
def test_foreign_wrapper_before_us_is_named(patch_of, disguised):
    core, patch = patch_of(bindings=())
    original = core.double

    def theirs(x, times=2):
        return original(x, times)

    core.double = functools.wraps(original)(theirs) if disguised else theirs
    with pytest.raises(PatchRefused, match=r"already (wrapped|replaced) by .*test_patch.*theirs"):
        patch.apply()
    assert patch.state() is SwitchState.WAITING


def test_upstreams_own_decorators_are_no_foreign_wrappers(patch_of):
    core, patch = patch_of(
        """
        import contextlib, functools
        import torch
        def logged(fn):
            @functools.wraps(fn)
            def inner(*args):
                return fn(*args)
            return inner
        @logged
        @torch.no_grad()
        @functools.lru_cache
        def double(x):
            return 2 * x
        """,
        params=("x",),
        bindings=(),
        make=around,
    )
    patch.apply()
    assert core.double(2) == "ours:4"


def theirs(x, times=2):
    return x * times


@pytest.mark.parametrize(
    "overlay",
    [
        lambda core: setattr(core, "double", theirs),
        lambda core: core.REGISTRY.update(double=theirs),
        lambda core: core.REGISTRY.clear(),
    ],
    ids=["attribute", "dict", "gone"],
)
def test_overlaid_later_is_foreign_and_cannot_be_reverted(patch_of, overlay):
    core, patch = patch_of()
    patch.apply()
    ours = core.double
    overlay(core)
    assert patch.state() is SwitchState.FOREIGN
    with pytest.raises(PatchRefused, match=r"now holds (.*test_patch.*theirs|nothing); undo that first"):
        patch.revert()
    with pytest.raises(PatchRefused, match="now holds"):
        patch.apply()
    core.double = core.REGISTRY["double"] = ours
    assert patch.state() is SwitchState.APPLIED


def test_failed_write_rolls_back(patch_of):
    core, patch = patch_of(
        """
        class Locked(dict):
            closed = False
            def __setitem__(self, key, value):
                if self.closed:
                    raise RuntimeError("closed")
                super().__setitem__(key, value)
        def double(x, times=2):
            return x * times
        REGISTRY = Locked(double=double)
        REGISTRY.closed = True
        """
    )
    original = core.double
    with pytest.raises(PatchRefused, match=r"REGISTRY\[double\] cannot be written, nothing stays patched"):
        patch.apply()
    assert core.double is original
    assert core.REGISTRY["double"] is original
    assert patch.state() is SwitchState.WAITING


def test_probe_that_disagrees_and_factory_that_cannot_deliver_refuse(patch_of):
    def probe(original, replacement, settings):
        if original(5) != replacement(5):
            raise ValueError("10 is not 30")

    def no_kernel(original, settings):
        raise BackendMissing("no such kernel here")

    for fields, message in (
        ({"probe": probe}, r"parity probe against .*:double failed: 10 is not 30"),
        ({"make": no_kernel}, "no such kernel here"),
        ({"make": lambda original, settings: original}, "returned the original"),
    ):
        core, patch = patch_of(**fields)
        original = core.double
        with pytest.raises(PatchRefused, match=message):
            patch.apply(3)
        assert core.double is original
        assert patch.state() is SwitchState.WAITING
    _, patch = patch_of(probe=probe)
    patch.apply(1)
    assert patch.state() is SwitchState.APPLIED


def test_unknown_body_warns_once_and_known_body_never(patch_of, caplog):
    core, patch = patch_of(fingerprints=("0" * 64,))
    with caplog.at_level(logging.WARNING, logger="rl_accel"):
        for _ in range(2):
            patch.apply()
            patch.revert()
        untested = f"rl-accel: {patch.name} was not tested with this body of {patch.target}"
        assert [r.message for r in caplog.records] == [untested]
        caplog.clear()
        known = replace(patch, name="known", fingerprints=("0" * 64, fingerprint(core.double)))
        known.apply()
        known.revert()
    assert not caplog.records


def test_module_imported_anew_is_patched_anew(patch_of):
    core, patch = patch_of()
    patch.apply()
    name = core.__name__
    del sys.modules[name]
    assert patch.state() is SwitchState.WAITING
    fresh = __import__(name, fromlist=["double"])
    assert fresh is not core
    patch.apply()
    assert fresh.double(1) == 6
    patch.revert()
    assert fresh.double(1) == 2


def test_threads_see_one_replacement(patch_of):
    made = []

    def slow(original, settings):
        made.append(original)
        time.sleep(0.01)  # long enough for the others to come in, if they may
        return tripled(original, settings)

    core, patch = patch_of(make=slow)
    original = core.double
    start = threading.Barrier(8)

    def work(_):
        start.wait()
        for _ in range(50):
            patch.apply()
            assert core.double.__rl_accel_patch__ == patch.name

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert made == [original]
    patch.revert()
    assert core.double is original
