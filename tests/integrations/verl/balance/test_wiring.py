"""One flag chooses router and workers; what cannot go together is refused with its key."""

import importlib.util
import json

import pytest
from omegaconf import OmegaConf

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed", allow_module_level=True)

from rl_accel.errors import ConfigError
from rl_accel.features import BalanceFlags, DraftsFlags
from rl_accel.integrations.verl import agent_loop, balance, drafts

ROLLOUT = {"name": "vllm", "max_num_seqs": 16, "router_config_path": None, "full_determinism": False, "agent": {}}


def config(mode="sync", use_v1=True, **rollout):
    made = OmegaConf.create(
        {
            "trainer": {"use_v1": use_v1, "v1": {"trainer_mode": mode}},
            "actor_rollout_ref": {"rollout": {**ROLLOUT, **rollout}},
        }
    )
    OmegaConf.set_struct(made, True)
    return made


def test_router_and_workers_are_put_into_the_configuration_once():
    made = config()
    with pytest.raises(ConfigError, match="validate_config sets it"):
        balance.refuse_unwired(made)
    balance.wire(made, BalanceFlags(enable=True))
    rollout = made.actor_rollout_ref.rollout
    assert OmegaConf.load(rollout.router_config_path).router_class.endswith("balance.router.BalancedRouter")
    assert rollout.agent.agent_loop_manager_class == agent_loop.MANAGER
    assert made.trainer.rl_accel_agent_loop_parts == [balance.WORKER_PART]
    before = OmegaConf.to_container(made)
    balance.wire(made, BalanceFlags(enable=True))
    assert OmegaConf.to_container(made) == before
    balance.refuse_unwired(made)


def test_with_drafts_there_is_one_router_and_it_is_this_one(monkeypatch):
    monkeypatch.setattr(drafts, "_vllm_version", lambda: "0.29.0")
    made = config(engine_kwargs={"vllm": {}}, mtp={})
    for _ in range(2):
        balance.wire(made, BalanceFlags(enable=True))
        drafts.wire(made, DraftsFlags(enable=True))
    assert made.actor_rollout_ref.rollout.router_config_path == str(balance.ROUTER)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"router_config_path": "own.yaml"}, r"router_config_path = None, found own\.yaml"),
        ({"mode": "colocate_async"}, r"trainer_mode = sync, found colocate_async"),
        ({"use_v1": False}, r"trainer\.use_v1 = True, found False"),
        ({"full_determinism": True}, r"full_determinism = False, found True"),
        ({"disaggregation": {"enabled": True}}, r"disaggregation\.enabled = False, found True"),
        ({"max_num_seqs": 0}, r"max_num_seqs = at least 1, found 0"),
        ({"agent": {"agent_loop_manager_class": "my.Manager"}}, r"agent_loop_manager_class = None, found my\.Manager"),
    ],
)
def test_what_cannot_go_together_is_refused_with_its_key(changes, said):
    with pytest.raises(ConfigError, match=said):
        balance.wire(config(**changes), BalanceFlags(enable=True))


def test_places_of_its_own_do_for_any_max_num_seqs():
    balance.wire(config(max_num_seqs=0), BalanceFlags(enable=True, places=3))


RUNS = """
import json, os
from pathlib import Path
from types import SimpleNamespace

import ray
from omegaconf import OmegaConf

from rl_accel.integrations.verl import balance
from rl_accel.integrations.verl.balance.router import BalancedRouter
from rl_accel.patches.verl import config_intake
from rl_accel.telemetry import metrics

ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, _temp_dir=os.environ["RAY_TEMP"])
ROOT = Path(os.environ["CHECKPOINTS"])


@ray.remote(num_cpus=0)
class Server:
    pass


def run(step=0, **trainer):
    '''What a run that begins after ``step`` knows, and its router.'''
    rollout = {"name": "vllm", "max_num_seqs": 4}
    trainer = {"default_local_dir": str(ROOT), "resume_mode": "auto", **trainer}
    config = OmegaConf.create({"trainer": trainer, "actor_rollout_ref": {"rollout": rollout}})
    config_intake._trainer = lambda: SimpleNamespace(config=config, global_steps=step)
    router = BalancedRouter.options(num_cpus=0).remote({"r0": Server.remote()})
    balance.BalancingWorker.attach(SimpleNamespace(config=config, llm_client=SimpleNamespace(_load_balancer=router)))
    return ray.get(router.lengths.remote()), router


def generate(router, ticket, prompt, tokens):
    name, _ = ray.get(router.acquire_server.remote(ticket, prompt=prompt, prompt_tokens=3))
    ray.get(router.release_server.remote(name, ticket, tokens))


said = {}
said["new"], router = run()
generate(router, "a", "one", 7)
metrics.observed(1, {"timing_s/gen": 1.0})
(ROOT / "global_step_2").mkdir()
generate(router, "b", "one", 9)
generate(router, "c", "two", 5)
said["numbers"] = metrics.observed(2, {"timing_s/gen": 1.0})["rl_accel/balance/places_in_use"]
said["files"] = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.json"))
said["resumed"], _ = run(step=2)
said["before"], _ = run(step=1)
said["by path"], _ = run(step=2, resume_mode="resume_path", resume_from_path=str(ROOT / "global_step_2"), default_local_dir="x")
print(json.dumps(said))
"""


@pytest.mark.slow
def test_a_resumed_run_knows_the_lengths_of_its_checkpoint(python, short_tmp, tmp_path):
    pytest.importorskip("ray")
    done = python(RUNS, RAY_TEMP=str(short_tmp), CHECKPOINTS=str(tmp_path))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["resumed"] == said["by path"] == {"one": [7, 9], "two": [5]}
    assert said["new"] == said["before"] == {}, (
        "a checkpoint without lengths is one that was saved without this feature"
    )
    assert said["files"] == ["global_step_2/balance.json"]
    assert 0 < said["numbers"] <= 1
