"""With the flag off verl is what it is without rl-accel: its configuration, registries, trainers, buffers, workers and clients."""

import importlib.util
import json

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed"),
]

_LOOK = '''
import inspect, json, sys
if {blocked}:
    sys.modules["rl_accel"] = None  # verl's plug-in loader finds nothing it could import
else:
    import rl_accel
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.utils import config as verl_config
from verl.utils.config import validate_config
from verl.trainer.ppo.utils import need_critic, need_reference_policy
import verl.trainer.ppo.v1 as v1
from verl.trainer.ppo.v1 import agent_loop_tq, replay_buffer, trainer_base
from verl.checkpoint_engine import base as checkpoint
from verl.experimental.agent_loop import agent_loop
from verl.workers.rollout import llm_server, replica, router

def look(overrides):
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides)
    validate_config(config, need_reference_policy(config), need_critic(config))
    plain = OmegaConf.to_container(config)
    plain.pop("rl_accel", None)
    return plain

def code(function):
    """Where the function and everything it wraps is written, and its byte code."""
    found = []
    while function is not None:
        found.append([function.__code__.co_filename, function.__code__.co_firstlineno, function.__code__.co_code.hex()])
        function = getattr(function, "__wrapped__", None)
    return found

def members(cls):
    return {{
        f"{{cls.__qualname__}}.{{name}}": code(value)
        for name, value in ((n, getattr(v, "__func__", v)) for n, v in vars(cls).items())
        if inspect.isfunction(value)
    }}

functions = {{}}
for module in (verl_config, trainer_base, replay_buffer, agent_loop_tq, agent_loop, llm_server, router, replica, checkpoint):
    for name, item in vars(module).items():
        item = getattr(getattr(item, "__ray_metadata__", None), "modified_class", item)
        if inspect.isclass(item) and item.__module__.startswith("verl."):
            functions |= members(item)
        elif inspect.isfunction(item) and item.__module__.startswith("verl."):
            functions[item.__qualname__] = code(item)
batch = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "data.train_batch_size=8",
         "actor_rollout_ref.actor.use_dynamic_bsz=True",
         "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True", "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True"]
print(json.dumps({{
    "configurations": {{mode: look([*batch, f"trainer.v1.trainer_mode={{mode}}", *{flags}])
                       for mode in ("sync", "colocate_async", "separate_async")}},
    "trainers": {{name: [f"{{c.__module__}}.{{c.__qualname__}}" for c in cls.__mro__]
                 for name, cls in trainer_base.TRAINER_REGISTRY.items()}},
    "rollouts": sorted(replica.RolloutReplicaRegistry._registry),
    "functions": functions,
    "loaded": sorted(name for name in sys.modules if name.startswith("rl_accel.integrations.verl.tail_batching")),
}}))
'''


@pytest.fixture
def look(python):
    def look(blocked, flags):
        done = python(_LOOK.format(blocked=blocked, flags=flags))
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return look


def test_with_the_flag_off_verl_is_untouched(look):
    stock = look(True, [])
    assert len(stock["functions"]) > 150
    assert {"sync", "colocate_async", "separate_async"} <= stock["trainers"].keys()
    ours = look(False, ["+rl_accel.tail_batching.enable=False"])
    assert ours["loaded"] == []
    for what in ("configurations", "trainers", "rollouts"):
        assert ours[what] == stock[what]
    assert ours["functions"].keys() == stock["functions"].keys()
    changed = {name for name, code in ours["functions"].items() if code != stock["functions"][name]}
    # Two read the flags, one adds the numbers of features that are on.
    assert changed == {"validate_config", "PPOTrainer.__init__", "Tracking.log"}
