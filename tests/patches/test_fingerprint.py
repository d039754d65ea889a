"""Tests fingerprints: functions that do the same have equal hashes however they are formatted, others have other hashes."""

import sys

import pytest

from rl_accel.patches.upstream import fingerprint

PLAIN = "def f(a, b=1):\n    c = a + b\n    return c\n"
WRAPPER = "import functools\ndef g(fn):\n    @functools.wraps(fn)\n    def w(*a):\n        return fn(*a)\n    return w\n\n@g\n"
SAME = {
    "wrapper": WRAPPER + PLAIN,
    "formatting": "def f( a,b = 1 ):\n\n    # adds\n    c = (a\n         + b)\n    return c\n",
    "docstring": 'def f(a, b=1):\n    """Adds."""\n    c = a + b\n    return c\n',
    "annotations": "def f(a: int, b: int = 1) -> int:\n    c: int = a + b\n    return c\n",
    "decorator": "def deco(fn):\n    return fn\n\n@deco\ndef f(a, b=1):\n    c = a + b\n    return c\n",
    "indented": "if True:\n        def f(a, b=1):\n            c = a + b\n            return c\n",
}
OTHER = {
    "operator": "def f(a, b=1):\n    c = a - b\n    return c\n",
    "default": "def f(a, b=2):\n    c = a + b\n    return c\n",
    "order": "def f(a, b=1):\n    c = b + a\n    return c\n",
    "constant type": "def f(a, b=1.0):\n    c = a + b\n    return c\n",
    "none": "def f(a, b=None):\n    c = a + b\n    return c\n",
    "missing return": "def f(a, b=1):\n    c = a + b\n    return\n",
}


def hash_of(framework, source):
    return fingerprint(sys.modules[f"{framework(source)}.core"].f)


@pytest.mark.parametrize(("sources", "same"), [(SAME, True), (OTHER, False)], ids=["same work", "other work"])
def test_the_same_work_has_the_same_hash_in_any_python_and_other_work_another(framework, sources, same):
    plain = "bf41ac316586cbcc960eedfc67209944cf468cb66d361d615d01bad77daf6e72"
    assert hash_of(framework, PLAIN) == plain
    assert {how: hash_of(framework, source) == plain for how, source in sources.items()} == dict.fromkeys(sources, same)


@pytest.mark.parametrize("function", [len, eval("lambda x: x")])
def test_no_source_no_hash(function):
    assert fingerprint(function) is None
