"""``bench advantages``: records of one small shape, and no numbers for a replacement that is wrong."""

import dataclasses

import pytest
import torch
from verl.trainer.ppo import core_algos

from rl_accel.lab.bench import group_advantages as bench

SMALL = ("-B", "16", "-T", "8", "--group", "4")


@pytest.mark.slow
def test_every_estimator_is_compared_on_a_ragged_batch_and_left_as_it_was():
    one, two = bench.batch(16, 8, 4), bench.batch(16, 8, 4)
    assert all(torch.equal(one[name], two[name]) for name in one if name != "index")
    assert len(set(one["response_mask"].sum(-1).tolist())) > 1
    assert len(set(one["index"])) == 4
    before = dict(core_algos.ADV_ESTIMATOR_REGISTRY)
    records = bench.measure(32, 16, 8)
    assert {record["estimator"] for record in records} >= {"grpo", "rloo", "optimal_token_baseline", "masked_whiten"}
    assert all(record["same_bits"] and record["stock_s"] > 0 and record["fast_s"] > 0 for record in records)
    assert before == core_algos.ADV_ESTIMATOR_REGISTRY


@pytest.fixture
def rloo(monkeypatch):
    """The patch of RLOO, the only one that is measured."""
    (rloo,) = (patch for patch in bench.patches() if patch.name == "verl.rloo")
    monkeypatch.setattr(bench, "patches", lambda: [rloo])
    return rloo


def test_the_command_prints_a_ratio(rloo, invoke):
    output = invoke(bench.bench_advantages, *SMALL)
    assert "16 x 8, groups of 4" in output
    (row,) = (line.split() for line in output.splitlines() if "rloo" in line)
    assert len(row) == 4
    assert row[-1].endswith("x")


def test_no_number_stands_beside_a_red_check(rloo, monkeypatch, invoke):
    def one_too_much(original, settings):
        return lambda *args, **kwargs: tuple(tensor + 1 for tensor in original(*args, **kwargs))

    monkeypatch.setattr(bench, "patches", lambda: [dataclasses.replace(rloo, make=one_too_much, probe=None)])
    assert "DIFFER" in invoke(bench.bench_advantages, *SMALL, code=1)
    (record,) = bench.measure(16, 8, 4)
    assert record["same_bits"] is False
    assert record["stock_s"] is record["fast_s"] is None


def test_a_shape_that_does_not_fit_is_refused(monkeypatch, invoke):
    monkeypatch.setattr(bench, "available_bytes", lambda: 1000)
    assert "16 x 8 wants 0.0 GiB of memory, 0.0 GiB are free" in invoke(bench.bench_advantages, *SMALL, code=1)
