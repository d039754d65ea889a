"""Tests the GPU scan on the CPU with triton's interpreter: the same programs, block by block."""

from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["not full", pytest.param("full", marks=pytest.mark.full)])
def test_the_interpreted_programs_agree_with_the_loop(python, chosen):
    """The interpreter is chosen when triton is imported, so the tests of interpreted_triton.py have a process of their own."""
    words = ("-q", "-m", chosen, str(Path(__file__).with_name("interpreted_triton.py")))
    done = python("import pytest\nraise SystemExit(pytest.main())", *words, timeout=500, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout
