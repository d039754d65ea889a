"""Tests interfaces against changed frameworks: every relevant difference is named, and others are ignored."""

import re
from typing import Any, Protocol

import pytest

from rl_accel.errors import PatchRefused
from rl_accel.patches.seams import interface_of, remote, require_members

SOURCE = """
def helper(path):
    pass

class Base:
    def __init__(self, config):
        pass

class Worker(Base):
    def step(self, batch, seed=0):
        pass
    async def run(self, params, *, name, **more):
        pass
    def ask(self, key):
        pass
"""


@pytest.fixture
def check(framework):
    """``check(old, new)`` compares interfaces with SOURCE in which ``old`` has become ``new``."""

    def run(old: str = "", new: str = "") -> None:
        assert old in SOURCE
        name = framework(SOURCE.replace(old, new))

        @interface_of(f"{name}.core")
        class Core(Protocol):
            def helper(self, path: str) -> Any: ...

        @interface_of(f"{name}.core:Base")
        class Base(Protocol):
            config: Any

            def __init__(self, config: Any) -> None: ...

            @remote
            def ask(self, key: str) -> str: ...

        @interface_of(f"{name}.core:Worker")
        class Worker(Base, Protocol):
            def step(self, batch: Any) -> None: ...

            async def run(self, params: Any, **more: Any) -> None: ...

        require_members("pack", (Core, Worker))

    return run


SAME = [
    ("", ""),
    ("def step(self, batch, seed=0)", "def step(self, batch)"),
    ("*, name, **more", "*, name, other=1, **more"),
    ("def ask", "async def ask"),
    ("def helper(path)", "def helper(path, **options)"),
]
CHANGED = [
    ("class Worker", "class Helper", r"core:Worker, which is not there"),
    ("def ask", "def answer", r"Worker\.ask, which is not there"),
    ("def ask(self, key)", "def ask(self, name)", r"Worker\.ask\(key\), found \(name\)"),
    ("batch, seed=0", "seed, batch", r"Worker\.step\(batch\), found \(seed, batch\)"),
    ("seed=0", "seed", r"Worker\.step\(batch\), found \(batch, seed\)"),
    ("async def run", "def run", r"Worker\.run to be async, which it is not"),
    ("def step", "async def step", r"Worker\.step to be a plain function, which it is not"),
    (", **more", "", r"Worker\.run\(params, \*\*more\), found \(params, \*, name\)"),
    ("def helper(path)", "def helper(file)", r"core:helper\(path\), found \(file\)"),
]


@pytest.mark.parametrize(("old", "new"), SAME)
def test_what_makes_no_difference_is_let_through(check, old, new):
    check(old, new)


@pytest.mark.parametrize(("old", "new", "message"), CHANGED)
def test_each_difference_is_named(check, old, new, message):
    with pytest.raises(PatchRefused) as refused:
        check(old, new)
    assert re.search(message, str(refused.value)), refused.value
