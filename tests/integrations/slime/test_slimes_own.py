"""Tests a checkout of slime: ``rl-accel doctor`` tries our patches there, and slime's own tests pass with them."""

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rl_accel.__main__ import main
from rl_accel.rollout.workload import read_lengths

NEED_MEGATRON = ("test_cp_utils.py", "test_loss_cp_invariance.py")
THEIRS = ("test_chunked_gae.py", "test_discounted_returns.py", *NEED_MEGATRON, "plugin_contracts")


def test_doctor_names_a_folder_that_is_no_checkout(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("SLIME_ROOT", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["rl-accel", "doctor", "--json"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"SLIME_ROOT wants a checkout of slime, found '{tmp_path}'" in capsys.readouterr().err


@pytest.mark.slow
def test_doctor_tries_every_patch_in_the_checkout(slime_root, clean_environment):
    command = [sys.executable, "-m", "rl_accel", "doctor", "--json"]
    environment = {**clean_environment, "SLIME_ROOT": str(slime_root)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    document = json.loads(done.stdout[done.stdout.index("{") :])
    assert done.returncode == any(check["verdict"] == "cannot" for check in document["checks"]), done.stderr
    assert document["sandbox"].startswith(("bubblewrap", "process ("))
    assert document["versions"]["slime"] == str(slime_root / "slime")
    verdicts = {check["switch"]: (check["verdict"], check["reason"]) for check in document["checks"]}
    assert verdicts["slime.requests"] == verdicts["slime.abort"] == ("works", "")
    for name in ("slime.gae", "slime.reinforce_plus_plus"):
        assert verdicts[name] in [("works", ""), ("cannot", "No module named 'megatron'")]


@pytest.mark.slow
@pytest.mark.parametrize("name", THEIRS)
def test_slimes_own_tests_pass_with_our_patches(slime_root, clean_environment, name):
    if name in NEED_MEGATRON and importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    plugins = Path(__file__).with_name("plugins")
    environment = {**clean_environment, "PYTHONPATH": os.pathsep.join([str(slime_root), str(plugins)])}
    options = ["-q", "-p", "slime_with_rl_accel", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, f"tests/{name}"]
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

    ours, theirs = (inspect.signature(function).parameters.values() for function in (generate_rollout, stock))
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


def test_plan_reads_the_lengths_of_rollouts_that_slime_has_saved(slime_root, tmp_path):
    from slime.observability.rollout_data_utils import save_debug_rollout_data
    from slime.utils.types import Sample

    for step in range(2):
        lengths = [10 * step + n + 1 for n in range(4)]
        samples = [Sample(group_index=2 * step + n // 2, index=n, response_length=lengths[n]) for n in range(4)]
        save_debug_rollout_data(str(tmp_path / "{rollout_id}.pt"), samples, rollout_id=step, evaluation=False)
    validation = {"math": {"samples": samples}}
    save_debug_rollout_data(str(tmp_path / "{rollout_id}.pt"), validation, rollout_id=1, evaluation=True)
    assert read_lengths(tmp_path).seen.tolist() == [[1, 2], [3, 4], [11, 12], [13, 14]]
