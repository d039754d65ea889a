"""Runs one test case with verl's own ``prime_code`` code. A grader's worker loads this file by its path.

It imports neither verl nor this package: a program under test is to have neither in its address space.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any


def load(path: str) -> Callable[..., list[bool]]:
    """Return ``run(case, code, timeout)`` over the module at ``path``, verl's ``prime_code/testing_util.py``."""
    spec = importlib.util.spec_from_file_location("prime_code_testing_util", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(case: dict[str, Any], code: str, timeout: int) -> list[bool]:
        """Whether each result that verl would have noted down is a pass; see ``_temp_run`` in verl's ``prime_code/utils.py``."""
        with open(os.devnull, "w") as nowhere:
            sys.stdout = sys.stderr = nowhere
            try:
                results, _ = module.run_test(in_outs=case, test=code, debug=False, timeout=timeout)
            except Exception:
                results = [-1] * len(case["inputs"])
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        return [result is True for result in results]

    return run
