"""Responses outgrow the memory of two servers of a rank each: advice leaves them so, a restart goes on with one server of two."""

import json
import re
import sys
from dataclasses import dataclass

import pandas as pd
import pytest
import yaml

from rl_accel.lab.ab.runner import Stop, last_lines, ray_temp_dir, supervised

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1500),
    pytest.mark.vllm,
    pytest.mark.parametrize("engine", ["any"], indirect=True, scope="module"),
]

P0, R0, STEPS, SHORT_STEPS = 8, 4, 10, 6
SHORT, LONG = 30, 150
DECIDED_AT = SHORT_STEPS + 2
"""The second step with long responses: the reference is known by then, and two steps make a rise."""
TIGHT = 1000
"""Tokens of a rank: 16 short responses fit, 16 long ones do not."""
KWARGS = "actor_rollout_ref.rollout.engine_kwargs"
BYTES_A_TOKEN = 2 * 2 * 2 * 32 * 4
"""Layers, keys and values, heads, their dimension, bytes of a float."""
MEMORY = {
    "hf_cpu": (f"+{KWARGS}.hf_cpu.kv_tokens={TIGHT}", f"+{KWARGS}.hf_cpu.weight_tokens=4000"),
    "vllm": (
        f"{KWARGS}.vllm.kv_cache_memory_bytes={TIGHT * BYTES_A_TOKEN}",
        "actor_rollout_ref.rollout.max_model_len=176",
    ),
}
OVERRIDES = (
    "data.shuffle=False",
    "data.max_response_length=160",
    "algorithm.adv_estimator=grpo",
    f"actor_rollout_ref.rollout.n={R0}",
    f"data.train_batch_size={P0}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={P0}",
    "trainer.n_gpus_per_node=2",
    "+rl_accel.sampler.enable=True",
    "+rl_accel.tp_replan.enable=True",
)


@dataclass
class Left:
    """What a run left: exit code, log, metrics of the last launch by step, and the numbers of the steps of all launches."""

    code: int
    log: str
    metrics: dict[int, dict[str, float]]
    steps: list[int]

    def numbers(self, name):
        return [metrics[f"rl_accel/tp_replan/{name}"] for metrics in self.metrics.values()]


@pytest.fixture(scope="module")
def train(repo, workspace, engine, recipe_command, tmp_path_factory):
    """``train(before, *overrides)``: the recipe on two ranks, ``before`` before the trainer's command."""

    def run(before, *overrides):
        out = tmp_path_factory.mktemp("tp")
        data = pd.read_parquet(workspace / "task" / "train.parquet").head(P0 * STEPS)
        data["agent_name"] = ["short" if row < P0 * SHORT_STEPS else "long" for row in range(len(data))]
        data.to_parquet(out / "train.parquet")
        loops = [
            {"name": name, "_target_": "tp_replan_loops.Exactly", "tokens": tokens}
            for name, tokens in (("short", SHORT), ("long", LONG))
        ]
        (out / "loops.yaml").write_text(yaml.safe_dump(loops))
        planned, environment = recipe_command(STEPS)
        command = [
            *before,
            *planned,
            *OVERRIDES,
            *MEMORY[engine.name],
            f"data.train_files={out / 'train.parquet'}",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={out / 'loops.yaml'}",
            f"trainer.default_local_dir={out / 'checkpoints'}",
            *overrides,
        ]
        metrics, log = out / "metrics.jsonl", out / "train.log"
        with ray_temp_dir() as ray_dir:
            environment |= {
                "VERL_FILE_LOGGER_PATH": str(metrics),
                "PYTHONPATH": str(repo / "tests" / "e2e" / "loops"),
                "RAY_TMPDIR": str(ray_dir),
            }
            outcome = supervised(command, environment, out, log, Stop(), lambda: False, ray_dir)
        text = log.read_text(errors="replace")
        assert metrics.exists(), last_lines(log, 80)
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert "dtype mismatch" not in text
        return Left(
            outcome.exit_code,
            text,
            {row["step"]: row["data"] for row in rows if "training/global_step" in row["data"]},
            [int(step) for step in re.findall(r"step:(\d+) - .*training/global_step", text)],
        )

    return run


def saved(log):
    return [int(step) for step in re.findall(r"tp_replan: step (\d+) is saved", log)]


def test_advice_is_logged_and_the_run_goes_on_as_it_is(train, engine):
    left = train([], "trainer.save_freq=-1")
    assert left.code == 0, left.log[-4000:]
    assert left.steps == list(left.metrics) == list(range(1, STEPS + 1))
    preemptions = left.numbers("preemptions")
    assert preemptions[:SHORT_STEPS] == [0.0] * SHORT_STEPS
    assert min(preemptions[SHORT_STEPS:]) > (15 if engine.name == "hf_cpu" else 0)  # in vLLM: by how requests come in
    assert left.numbers("tp") == [1.0] * STEPS
    assert left.numbers("wanted_tp") == [1.0] * (DECIDED_AT - 1) + [2.0] + [1.0] * (STEPS - DECIDED_AT)
    assert left.numbers("changes") == [0.0] * STEPS
    advice = re.findall(r"tp_replan: advice after step (\d+): raise TP 1 to 2: preemptions are .* expected: ", left.log)
    assert advice == [str(DECIDED_AT)]
    assert saved(left.log) == []


def test_a_restart_goes_on_with_one_server_of_two_ranks_at_the_exact_step(train, engine):
    left = train([sys.executable, "-m", "rl_accel", "run", "--pause", "0", "--"], "+rl_accel.tp_replan.action=restart")
    assert left.code == 0, left.log[-4000:]
    assert saved(left.log) == [DECIDED_AT]
    assert left.log.count("rl-accel run: restart 1 of at most 6") == 1
    assert "restart 2" not in left.log
    assert "Traceback" not in left.log
    assert left.steps == list(range(1, STEPS + 1)), "no step is made twice, none is left out"
    assert list(left.metrics) == list(range(DECIDED_AT + 1, STEPS + 1))
    assert left.numbers("tp") == left.numbers("wanted_tp") == [2.0] * (STEPS - DECIDED_AT)
    if (
        engine.name == "hf_cpu"
    ):  # vLLM's memory is given in bytes here, so that weights that two ranks share save none of it
        assert left.numbers("preemptions") == [0.0] * (STEPS - DECIDED_AT)
    assert left.numbers("changes") == [1.0] * (STEPS - DECIDED_AT), "the planner's state came along"
    for metrics in left.metrics.values():
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
        assert metrics["response_length/mean"] == LONG
        assert 0 < metrics["actor/grad_norm"] < 1e4
