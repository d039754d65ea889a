"""Tests a restart with another TP size: responses outgrow two servers of one rank each, and one server of two ranks continues.

tests/integrations/verl/test_tp_replan.py has the advice without a restart.
"""

import re

import pandas as pd
import pytest
import yaml

from rl_accel.parallel.tp_planner import EARLIER_STEPS, LATEST_STEPS

pytestmark = [
    pytest.mark.full,
    pytest.mark.vllm,
    pytest.mark.parametrize("engine", ["vllm"], indirect=True, scope="module"),
]

P0, R0, SHORT_STEPS = 8, 4, EARLIER_STEPS
SHORT, LONG = 30, 150
DECIDED_AT = SHORT_STEPS + LATEST_STEPS
STEPS = DECIDED_AT + 2
TIGHT = 1000
"""Tokens of a rank: 16 short responses fit, 16 long ones do not."""
KWARGS = "actor_rollout_ref.rollout.engine_kwargs"
BYTES_A_TOKEN = 2 * 2 * 2 * 32 * 4
"""Layers, keys and values, heads, their dimension, bytes of a float."""
OVERRIDES = (
    "data.shuffle=False",
    "data.max_response_length=160",
    "algorithm.adv_estimator=grpo",
    "trainer.n_gpus_per_node=2",
    f"{KWARGS}.vllm.kv_cache_memory_bytes={TIGHT * BYTES_A_TOKEN}",
    "actor_rollout_ref.rollout.max_model_len=176",
    "+rl_accel.sampler.enable=True",
    "+rl_accel.tp_replan.enable=True",
    "+rl_accel.tp_replan.action=restart",
)


@pytest.fixture(scope="module")
def run(repo, workspace, engine, launch, tmp_path_factory):
    """The log of the run, and the steps of its last launch."""
    out = tmp_path_factory.mktemp("tp")
    data = pd.read_parquet(workspace / "task" / "train.parquet").head(P0 * STEPS)
    data["agent_name"] = ["short" if row < P0 * SHORT_STEPS else "long" for row in range(len(data))]
    data.to_parquet(out / "train.parquet")
    loops = [
        {"name": name, "_target_": "tp_replan_loops.Exactly", "tokens": tokens}
        for name, tokens in (("short", SHORT), ("long", LONG))
    ]
    (out / "loops.yaml").write_text(yaml.safe_dump(loops))
    return launch(
        out,
        STEPS,
        (P0, R0),
        *OVERRIDES,
        f"data.train_files={out / 'train.parquet'}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={out / 'loops.yaml'}",
        before=(engine.python, "-m", "rl_accel", "run", "--"),
        env={"PYTHONPATH": str(repo / "tests" / "e2e" / "loops")},
    )


def test_a_restart_goes_on_at_the_exact_step(run):
    # Ray may lose the last lines of a trainer that ends; these are the launcher's own.
    restart = r"run: restart after step (\d+) \(raise TP 1 to 2: .* preemptions or more.*\), with: "
    assert re.findall(restart, run.log) == [str(DECIDED_AT)]
    tracebacks = [line for line in run.log.splitlines() if "Traceback" in line]
    # Ray may end an actor of TransferQueue while it closes its sockets.
    assert not [line for line in tracebacks if "SimpleStorageUnit" not in line], tracebacks
    assert "dtype mismatch" not in run.log
    steps = [int(step) for step in re.findall(r"step:(\d+) - .*training/global_step", run.log)]
    assert [step for step in steps if step < DECIDED_AT] == list(range(1, DECIDED_AT)), "none twice"


def test_the_run_goes_on_with_one_server_of_two_ranks(run):
    assert list(run.steps) == list(range(DECIDED_AT + 1, STEPS + 1)), "the second launch makes the others"
    for metrics in run.steps.values():
        assert (metrics["rl_accel/tp_replan/tp"], metrics["rl_accel/tp_replan/wanted_tp"]) == (2.0, 2.0)
        assert "rl_accel/tp_replan/preemptions" in metrics
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
        assert metrics["response_length/mean"] == LONG
        assert 0 < metrics["actor/grad_norm"] < 1e4
