"""slime's own tests, with our patches in place; and slime's contract for rollout functions, on ours."""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

NEEDS_MEGATRON = {"test_cp_utils.py", "test_loss_cp_invariance.py"}


@pytest.mark.parametrize(
    "name",
    [
        "test_chunked_gae.py",
        "test_discounted_returns.py",
        "test_cp_utils.py",
        "test_loss_cp_invariance.py",
        "plugin_contracts",
    ],
)
def test_slimes_own_tests_pass_with_our_patches(slime_root, clean_environment, name):
    if name in NEEDS_MEGATRON and importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    plugins = Path(__file__).with_name("plugins")
    environment = {**clean_environment, "PYTHONPATH": os.pathsep.join([str(slime_root), str(plugins)])}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "slime_with_rl_accel",
        "-p",
        "no:cacheprovider",
        f"tests/{name}",
    ]
    done = subprocess.run(command, cwd=slime_root, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    print(f"slime's {name}: {done.stdout.strip().splitlines()[-1]}")
    assert passed is not None
    assert int(passed[1]) >= 5


def test_our_rollout_function_has_the_signature_of_slimes(slime_root):
    """The rest of slime's contract calls it without arguments of a run, which ours refuses by name."""
    from slime.rollout.sglang_rollout import generate_rollout as stock

    from rl_accel.integrations.slime.tail_batching.rollout import generate_rollout

    ours, theirs = (inspect.signature(function).parameters for function in (generate_rollout, stock))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]
