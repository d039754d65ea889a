"""``rl-accel doctor`` on a checkout of slime: it tries our patches there, and says so if SLIME_ROOT names none."""

import json

import pytest

DOCTOR = """
import subprocess, sys
done = subprocess.run([sys.executable, "-m", "rl_accel", "doctor", "--json"], capture_output=True, text=True)
print(done.returncode)
print(done.stderr if done.returncode else done.stdout)
"""


def test_a_folder_that_is_no_checkout_is_named(python, tmp_path):
    status, _, message = python(DOCTOR, SLIME_ROOT=str(tmp_path)).stdout.partition("\n")
    assert status == "2"
    assert f"SLIME_ROOT wants a checkout of slime, found '{tmp_path}'" in message


@pytest.mark.slow
def test_every_patch_is_tried_in_the_checkout(slime_root, python):
    status, _, output = python(DOCTOR, SLIME_ROOT=str(slime_root)).stdout.partition("\n")
    assert status == "0"
    found = json.loads(output[output.index("{") :])
    assert found["sandbox"].startswith(("bubblewrap", "process ("))
    assert found["versions"]["slime"] == str(slime_root / "slime")
    verdicts = {check["patch"]: (check["verdict"], check["reason"]) for check in found["checks"]}
    assert verdicts["slime.requests"] == ("works", "")
    for name in ("slime.gae", "slime.reinforce_plus_plus"):
        assert verdicts[name] in [("works", ""), ("cannot", "No module named 'megatron'")]
