"""``bench advantages``: records of one small shape, and no numbers for a replacement that is wrong."""

import dataclasses
import json

import pytest
import torch
from verl.trainer.ppo import core_algos

from rl_accel.lab.bench import advantages as bench

SMALL = ("-B", "16", "-T", "8")


@pytest.mark.slow
def test_every_estimator_is_compared_on_a_ragged_batch_and_left_as_it_was(tmp_path, invoke):
    one, two = bench.batch(16, 8), bench.batch(16, 8)
    assert all(torch.equal(one[name], two[name]) for name in one if name != "config")
    assert len(set(one["response_mask"].sum(-1).tolist())) > 1
    before = dict(core_algos.ADV_ESTIMATOR_REGISTRY)
    path = tmp_path / "deep" / "outcome.json"
    shape = ["-B", "32", "-T", "16", "--repeats", "1"]
    invoke(bench.bench_advantages, *shape, "--json", path)
    records = json.loads(path.read_text())["records"]
    assert {record["estimator"] for record in records} == {"reinforce_plus_plus", "masked_whiten"}
    assert all(record["same_bits"] and record["stock_s"] > 0 and record["fast_s"] > 0 for record in records)
    assert before == core_algos.ADV_ESTIMATOR_REGISTRY


def test_no_number_stands_beside_a_red_check(monkeypatch, invoke):
    (scan,) = (patch for patch in bench.patches() if patch.name == "verl.reinforce_plus_plus")

    def one_too_much(original, settings):
        return lambda *args, **kwargs: tuple(tensor + 1 for tensor in original(*args, **kwargs))

    monkeypatch.setattr(bench, "patches", lambda: [dataclasses.replace(scan, make=one_too_much, probe=None)])
    assert "DIFFER" in invoke(bench.bench_advantages, *SMALL, code=1)
    (record,) = bench.measure(16, 8, 1)
    assert record["same_bits"] is False
    assert record["stock_s"] is record["fast_s"] is None


def test_an_unknown_estimator_is_named_and_a_shape_that_does_not_fit_is_left_out(monkeypatch, invoke):
    output = invoke(bench.bench_advantages, "--estimator", "whiten", code=2)
    assert "whiten: wanted one of reinforce_plus_plus," in output.replace("\n", " ").replace("│", "")
    monkeypatch.setattr(bench, "available_bytes", lambda: 1000)
    assert "left out 16 x 8" in invoke(bench.bench_advantages, *SMALL, "--estimator", "masked_whiten")
