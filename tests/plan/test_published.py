"""One set of constants of a cluster against what was published: fitted to some rows, the others predicted."""

import pytest

from rl_accel.errors import RlAccelError
from rl_accel.plan.published import FITTED, engine, rows

OFF = {
    "step 7B_8k verl": "no training takes 150 s beside the 51 s that RollPacker's own long round leaves for it",
    "TP 2 long preemptions": "",
    "TP 2 long seconds": "the one table in which two GPUs are slower than one: something of it is not modelled",
}
"""Rows that are further off than a tenth, and why."""


@pytest.fixture(scope="module")
def found():
    return {row.name: row for row in rows(rounds=40)}


def test_published_rows_come_out_within_a_tenth(found):
    assert {name: round(row.off, 2) for name, row in found.items() if abs(row.off) > 0.12 and name not in OFF} == {}


def test_features_are_ranked_as_published(found):
    for limit in ("8k", "16k"):
        its = [row for name, row in found.items() if name.startswith(f"ablation {limit}")]
        best, worst = (min(its, key=lambda row: row.published), max(its, key=lambda row: row.published))
        assert best is min(its, key=lambda row: row.simulated)
        assert worst is max(its, key=lambda row: row.simulated)


def test_what_was_fitted_is_said(found):
    assert found.keys() >= FITTED
    assert len(FITTED) < len(found) / 2


def test_an_unknown_model_is_refused():
    with pytest.raises(RlAccelError, match=r"wanted one of qwen2\.5-7b, .*, found 'gpt'"):
        engine("gpt")
