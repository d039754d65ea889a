"""What was published of RollPacker (NSDI'26) on an H800 cluster, against the simulation with one set of constants.

``python tests/plan/test_published.py`` prints the table of docs/plan.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import pytest

from rl_accel.errors import RlAccelError
from rl_accel.features import TailBatchingFlags
from rl_accel.plan.answers import hidden_seconds, rounds_of, steady
from rl_accel.plan.published import engine
from rl_accel.plan.setup import Setup
from rl_accel.plan.workload import load, published
from rl_accel.rollout.simulation import Round

PROMPTS, RESPONSES = 128, 8
RATIOS = {
    "none": (1.0, 1.0),
    "responses_x1.25": (1.0, 1.25),
    "prompts_x1.25": (1.25, 1.0),
    "prompts_x1.5": (1.5, 1.0),
    "both_x1.25": (1.25, 1.25),
}
"""Of prompts and responses, by row of the ablation."""
FITTED = {"ablation 8k none", "ablation 16k none", "ablation 16k responses_x1.25", "ablation 16k prompts_x1.25"}
FITTED |= {
    "ablation 8k both_x1.25",
    "step 7B_8k short",
    "step 14B_16k short",
    "TP 1 short seconds",
    "TP 1 long preemptions",
}
FITTED |= {"TP 2 short preemptions"}
"""Rows that a constant was moved for, by hand and with all rows in sight; the others are called predicted."""


@dataclass(frozen=True)
class Row:
    """A published number and the simulated one."""

    name: str
    published: float
    simulated: float

    @property
    def off(self) -> float:
        """Relative error."""
        return self.simulated / self.published - 1


def setup(model: str, tp: int = 1) -> Setup:
    """Return the published batch on ``model``, with mathematics of the published lengths."""
    its = load("h800.json")["models"][model]
    workload = published("math16k")
    if "exponent" in its:  # another model: as published for a 14B model, but for median and spread
        tokens = its["median_tokens"] * (workload.tokens / np.median(workload.tokens)) ** its["exponent"]
        workload = replace(workload, tokens=tokens.astype(np.int64), prompt_tokens=200)
    stages = {"update_actor": its.get("other_seconds", 0.0)}
    replicas = its["replicas"] // tp
    return Setup(PROMPTS, RESPONSES, replicas, engine(model, tp), workload.limited(its["limit"]), stages)


def rows(rounds: int = 20, seed: int = 0) -> Iterator[Row]:
    """Simulate each published row, in the order of the file."""
    data = load("rollpacker_published.json")
    for column, (model, limit) in enumerate((("7b", "8k"), ("14b", "16k"))):
        at = setup(f"qwen2.5-{model}")
        found: dict[str, list[Round]] = {}
        for name, (prompts, responses) in RATIOS.items():
            flags = TailBatchingFlags(prompt_ratio=prompts, response_ratio=responses)
            found[name] = rounds_of(at, flags, rounds, seed)
            seconds = steady(found[name], PROMPTS, lambda played: played.metrics.rollout_seconds)
            yield Row(f"ablation {limit} {name}", data["rollout_seconds_ablation"][name][column], seconds)
        means = data["step_seconds_mean_of_40"][f"{model.upper()}_{limit}"]
        plain, both = found["none"], found["both_x1.25"]
        verl = fmean(played.metrics.rollout_seconds for played in plain) + at.training_seconds
        yield Row(f"step {model.upper()}_{limit} verl", means["verl"], verl)
        yield Row(f"step {model.upper()}_{limit} rlhfuse", means["rlhfuse"], _overlapped(at, plain))
        kinds = {kind: _overlapped(at, [p for p in both if p.metrics.kind == kind]) for kind in ("short", "long")}
        kinds["mean"] = 0.8 * kinds["short"] + 0.2 * kinds["long"]
        for kind, seconds in kinds.items():
            yield Row(f"step {model.upper()}_{limit} {kind}", means[f"rollpacker_{kind}"], seconds)
    for tp in (1, 2):
        played = rounds_of(setup("qwen3-8b", tp), TailBatchingFlags(), rounds, seed)
        for kind in ("short", "long"):
            preemptions, seconds = data["tp_preemptions_qwen3_8b_32k_8xH800"][f"{kind}_round"][f"tp{tp}"]
            its = [p for p in played if p.metrics.kind == kind]
            yield Row(f"TP {tp} {kind} preemptions", preemptions, fmean(p.preemptions for p in its))
            yield Row(f"TP {tp} {kind} seconds", seconds, fmean(p.metrics.rollout_seconds for p in its))


def _overlapped(at: Setup, played: list[Round]) -> float:
    """Mean seconds of a step whose training begins during the rollout."""
    return fmean(p.metrics.rollout_seconds - hidden_seconds(at, p) for p in played) + at.training_seconds


OFF = {
    "step 7B_8k verl": 0.3,  # 150 s beside its rollout, where RollPacker's own long round has 51 s for all that training takes
    "step 7B_8k long": 0.13,
    "TP 2 short preemptions": 0.15,
    "TP 2 long preemptions": 0.17,
    "TP 2 long seconds": 0.29,  # the one row in which two GPUs a replica are slower than one; nothing in the model says so
}
"""Rows that are further off than a tenth, and the most that they may be."""


@pytest.fixture(scope="module")
def found():
    return {row.name: row for row in rows()}


def test_published_rows_come_out_within_a_tenth(found):
    assert {name: f"{row.off:+.1%}" for name, row in found.items() if abs(row.off) > OFF.get(name, 0.1)} == {}
    assert len(OFF) < len(found) / 5


def test_options_are_ranked_as_published(found):
    for limit in ("8k", "16k"):
        its = [row for name, row in found.items() if name.startswith(f"ablation {limit}")]
        for pick in (min, max):
            assert pick(its, key=lambda row: row.published) is pick(its, key=lambda row: row.simulated)


def test_fewer_rows_were_fitted_than_are_predicted(found):
    assert found.keys() >= FITTED
    assert len(FITTED) < len(found) / 2


def test_an_unknown_model_is_refused():
    with pytest.raises(RlAccelError, match=r"wanted one of qwen2\.5-7b, .*, found 'gpt'"):
        engine("gpt")


if __name__ == "__main__":
    for row in rows():
        how = "fitted" if row.name in FITTED else "predicted"
        print(f"| {row.name} | {row.published:g} | {row.simulated:.4g} | {row.off:+.1%} | {how} |")
