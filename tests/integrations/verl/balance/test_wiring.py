"""One flag chooses router and workers; what cannot go together is refused with its key."""

import importlib.util

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
