"""A small framework that is written to disk and imported, so that patches are applied to real modules, classes and source files."""

import importlib
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

_numbers = itertools.count()

SOURCE = '''
REGISTRY = {}

def register(fn):
    REGISTRY["double"] = fn
    return fn

@register
def double(x, times=2):
    """Twice x."""
    return x * times

class Pool:
    def size(self, extra):
        return 1 + extra

    @staticmethod
    def kind(name):
        return name.upper()

    @classmethod
    def make(cls, name):
        return cls.__name__ + name

class Child(Pool):
    pass
'''


@pytest.fixture
def framework(tmp_path, monkeypatch) -> Iterator[Callable[..., str]]:
    """``framework(source, version)`` writes a package with a module ``core`` and returns its (fresh) name."""
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def write(source: str = SOURCE, version: str = "1.4.0", load: bool = True) -> str:
        name = f"fakeframe{next(_numbers)}"
        made.append(name)
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"__version__ = {version!r}\n")
        (tmp_path / name / "core.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        if load:
            importlib.import_module(f"{name}.core")
        return name

    yield write
    for module in [m for m in sys.modules if m.partition(".")[0] in made]:
        del sys.modules[module]
