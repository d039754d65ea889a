"""The recipe of tail batching as a user runs it: its model has the long tail it promises, and its report holds what it should."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 5


@pytest.fixture(scope="module")
def out(repo, tmp_path_factory, clean_environment):
    """Run one arm of the recipe for a few steps."""
    out = tmp_path_factory.mktemp("recipe")
    words = [sys.executable, "-m", "rl_accel", "ab", "examples/verl_tail_batching", "--out", str(out)]
    words += ["--arms", "tail", "--seeds", "0", "--steps", str(STEPS)]
    done = subprocess.run(words, cwd=repo, env=clean_environment, capture_output=True, text=True)
    assert (out / "summary.json").exists(), done.stdout[-4000:] + done.stderr[-4000:]
    return out


@pytest.fixture(scope="module")
def summary(out):
    return json.loads((out / "summary.json").read_text())


def test_short_and_long_rounds_train_every_prompt_once(summary):
    checks = {check["name"]: check for check in summary["checks"]}
    assert checks["completed"]["status"] == checks["ledger"]["status"] == "green", checks
    (ledger,) = summary["rollout"]["ledgers"]
    assert sum(epoch["once"] for epoch in ledger["epochs"]) == 16 * STEPS
    kinds = summary["rollout"]["series"]["tail-seed0"]["kind"]
    assert kinds.count("short") >= 3
    assert set(kinds) - {"short"} <= {"long", "final"}
    assert kinds[-1] != "short", "what was deferred is trained before the run ends"


def test_lengths_have_the_published_tail(summary):
    (arm,) = summary["rollout"]["arms"]
    lengths = arm["lengths"]
    assert lengths["responses"] == 16 * 4 * STEPS
    assert 25 <= lengths["quantiles"][50] <= 65  # published: 0.04 of the limit of 1,024
    assert lengths["quantiles"][100] > 200, "several times the median"
    assert lengths["quantiles"][0] < 20, "and far below it"


def test_the_report_has_its_pictures(out):
    for name in ("rollout_seconds", "queue", "lengths", "reward"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
    assert "Every prompt of an epoch is trained once" in (out / "report.html").read_text()
