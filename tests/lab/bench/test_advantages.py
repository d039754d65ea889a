"""Tests ``bench advantages`` at one small shape: it writes records, and no numbers for a wrong replacement."""

import dataclasses

import pytest
import torch
from verl.trainer.ppo import core_algos

from rl_accel.lab.bench import advantages as bench

SMALL = ("-B", "16", "-T", "8")


@pytest.mark.slow
def test_every_estimator_is_compared_on_a_ragged_batch_and_left_as_it_was():
    one, two = bench.batch(16, 8), bench.batch(16, 8)
    assert all(torch.equal(one[name], two[name]) for name in one if name != "config")
    assert len(set(one["response_mask"].sum(-1).tolist())) > 1
    before = dict(core_algos.ADV_ESTIMATOR_REGISTRY)
    records = bench.time_functions(32, 16)
    assert {record["estimator"] for record in records} == {"reinforce_plus_plus", "masked_whiten"}
    assert all(record["same_bits"] and record["stock_s"] > 0 and record["fast_s"] > 0 for record in records)
    assert before == core_algos.ADV_ESTIMATOR_REGISTRY


@pytest.fixture
def whitening(monkeypatch):
    """The patch of ``masked_whiten``, the only one that is measured."""
    (whitening,) = (patch for patch in bench.patches() if patch.name == "verl.masked_whiten")
    monkeypatch.setattr(bench, "patches", lambda: [whitening])
    return whitening


def test_the_command_prints_a_ratio(whitening, invoke):
    output = invoke(bench.bench_advantages, *SMALL)
    assert "16 x 8" in output
    (row,) = (line.split() for line in output.splitlines() if "masked_whiten" in line)
    assert len(row) == 4
    assert row[-1].endswith("x")


def test_no_number_stands_beside_a_red_check(whitening, monkeypatch, invoke):
    def one_too_much(original, settings):
        return lambda *args, **kwargs: original(*args, **kwargs) + 1

    monkeypatch.setattr(bench, "patches", lambda: [dataclasses.replace(whitening, make=one_too_much, probe=None)])
    assert "DIFFER" in invoke(bench.bench_advantages, *SMALL, code=1)
    (record,) = bench.time_functions(16, 8)
    assert record["same_bits"] is False
    assert record["stock_s"] is record["fast_s"] is None


def test_a_shape_that_does_not_fit_is_refused(monkeypatch, invoke):
    monkeypatch.setattr(bench, "available_bytes", lambda: 1000)
    assert "16 x 8 wants 0.0 GiB of memory, 0.0 GiB are free" in invoke(bench.bench_advantages, *SMALL, code=1)
