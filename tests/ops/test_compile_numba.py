"""Machine code kept on disk is used again, and never once any file of the kernels has changed."""

import pytest

CALL = """
import sys, torch
from rl_accel.ops import compile_numba
compile_numba._DIGEST = {digest}
from rl_accel.ops import gae
from rl_accel.ops.scan import numba_kernels
gae(torch.ones(2, 3), torch.ones(2, 3), backend="numba")
stats = numba_kernels.scan_lanes.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


@pytest.mark.slow
def test_code_compiled_for_other_sources_is_not_loaded(python, tmp_path):
    kept = {"NUMBA_CACHE_DIR": str(tmp_path / "kept")}
    found = [
        python(CALL.format(digest=digest), **kept) for digest in ("compile_numba._DIGEST",) * 2 + ("'another release'",)
    ]
    assert [done.stdout.split() for done in found] == [["0", "1"], ["1", "0"], ["0", "1"]], found[-1].stderr
