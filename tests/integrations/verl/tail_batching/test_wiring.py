"""One flag turns a sync recipe into tail batching; without it verl's configuration stays as it was composed."""

import importlib.util

import pytest
from omegaconf import OmegaConf

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed", allow_module_level=True)

from rl_accel.config import resolve
from rl_accel.errors import ConfigError
from rl_accel.features import TAIL_BATCHING, TailBatchingFlags
from rl_accel.integrations.verl import agent_loop
from rl_accel.integrations.verl.tail_batching import WORKER_PART, check_data, run_of
from rl_accel.integrations.verl.tail_batching.wiring import wire


@pytest.fixture(scope="module")
def composed():
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            [
                "data.train_batch_size=8",
                "actor_rollout_ref.actor.ppo_mini_batch_size=4",
                "critic.ppo_mini_batch_size=8",
            ],
        )


def changed(composed, **keys):
    config = composed.copy()
    for key, value in keys.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


def plain(config):
    return OmegaConf.to_container(config)


def test_one_flag_sets_the_keys_of_the_official_seams_and_nothing_else(composed):
    config = changed(composed)
    wire(config, TailBatchingFlags(enable=True, prompt_ratio="auto", queue_threshold=3))
    assert config.trainer.v1.trainer_mode == "tail_batching"
    run = run_of(config)
    assert (run.prompts_per_step, run.flags.prompt_ratio, run.flags.queue_threshold) == (8, "auto", 3)

    before, after = plain(composed), plain(config)
    before["trainer"]["v1"]["trainer_mode"] = "tail_batching"
    before["trainer"]["v1"]["tail_batching"] = after["trainer"]["v1"]["tail_batching"]
    before["data"]["gen_batch_size"] = 1
    agent = before["actor_rollout_ref"]["rollout"]["agent"]
    agent["agent_loop_manager_class"] = agent_loop.MANAGER
    before["trainer"]["rl_accel_agent_loop_parts"] = [WORKER_PART]
    assert after == before

    wire(config, TailBatchingFlags(enable=True, prompt_ratio="auto", queue_threshold=3))
    assert plain(config) == after, "a second time changes nothing"


@pytest.mark.parametrize("flags", [None, {"tail_batching": {"enable": False}}, {"auto": True}])
def test_intake_without_the_flag_leaves_verls_configuration_alone(composed, flags):
    from rl_accel.patches.verl import config_intake
    from rl_accel.runtime import RUNTIME

    config = changed(composed) if flags is None else changed(composed, rl_accel=flags)
    before = plain(config)
    layers = RUNTIME.layers()
    try:
        config_intake.in_driver(config)
        config_intake.in_trainer(config)
    finally:
        RUNTIME.restore(layers)
    assert plain(config) == before


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"trainer__v1__trainer_mode": "colocate_async"}, "trainer.v1.trainer_mode = sync, found colocate_async"),
        ({"trainer__v1__trainer_mode": "bogus"}, "trainer.v1.trainer_mode = sync, found bogus"),
        ({"trainer__use_v1": False}, "trainer.use_v1 = True, found False"),
        ({"trainer__v1__sync__parameter_sync_step": 2}, "trainer.v1.sync.parameter_sync_step = 1, found 2"),
        ({"trainer__v1__sampler__custom_sampler__name": "Mine"}, "custom_sampler = None, found Mine"),
        (
            {"actor_rollout_ref__rollout__agent__agent_loop_manager_class": "my.Manager"},
            "agent_loop_manager_class = None, found my.Manager",
        ),
        (
            {"actor_rollout_ref__rollout__full_determinism": True},
            "full_determinism = False, found True (what is trained on depends on which responses finish first)",
        ),
        ({"skip__rollout_tq__enable": True}, "skip.rollout_tq.enable = False, found True"),
        (
            {"actor_rollout_ref__actor__ppo_mini_batch_size": 3},
            "ppo_mini_batch_size = a divisor of data.train_batch_size = 8, found 3",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_key_wanted_and_found(composed, keys, message):
    config = changed(composed, **keys)
    before = plain(config)
    with pytest.raises(ConfigError, match=r"rl_accel\.tail_batching wants") as caught:
        wire(config, TailBatchingFlags(enable=True))
    assert message in str(caught.value)
    assert plain(config) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"prompt_ratio": 0.9}, r"tail_batching.prompt_ratio wants at least 1.0, found 0.9"),
        ({"response_ratio": 0.99}, r"tail_batching.response_ratio wants at least 1.0, found 0.99"),
        ({"auto_limit": 0.5}, r"tail_batching.auto_limit wants at least 1.0, found 0.5"),
        ({"prompt_ratio": "most"}, r"tail_batching.prompt_ratio wants a number or auto, found 'most'"),
        ({"prompt_ratio": True}, r"tail_batching.prompt_ratio wants float or str, found True"),
        ({"queue_threshold": 0}, r"tail_batching.queue_threshold wants at least 1, found 0"),
        ({"max_deferrals": 0}, r"tail_batching.max_deferrals wants at least 1, found 0"),
        ({"max_retries": -1}, r"tail_batching.max_retries wants at least 0, found -1"),
        ({"mode": "long"}, r"unknown key rl_accel.tail_batching.mode"),
        ({"prompt_ration": 1.5}, r"unknown key .*prompt_ration \(did you mean rl_accel.tail_batching.prompt_ratio\?\)"),
        ({"domain_quotas": [3]}, r"tail_batching.domain_quotas wants .*, found \[3\]"),
        ({"domain_quotas": {"math": "many"}}, r"tail_batching.domain_quotas wants"),
        ({"domain_quotas": {"math": 8, "code": 0}}, r"domain_quotas\['code'\] must be at least 1, found 0"),
        ({"prompt_ratio": float("inf")}, r"prompt_ratio must be finite"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        resolve([("test", {"tail_batching": flags})])


def test_quotas_must_add_up_to_a_batch(composed):
    with pytest.raises(ConfigError, match=r"domain_quotas must add up to .* 8 prompts, found 7"):
        wire(changed(composed), TailBatchingFlags(enable=True, domain_quotas={"math": 6, "code": 1}))


def test_quotas_reach_the_core_and_the_data(composed):
    config = changed(
        composed, rl_accel={"tail_batching": {"domain_quotas": {"math": 6, "code": 2}, "domain_key": "kind"}}
    )
    wire(config, resolve([("test", config.rl_accel)])[TAIL_BATCHING])
    flags = run_of(config).flags
    assert (flags.domain_quotas, flags.domain_key) == ({"math": 6, "code": 2}, "kind")


def test_data_that_cannot_fill_a_batch_is_refused(composed):
    config = changed(composed)

    def run(domain_key="kind"):
        flags = TailBatchingFlags(enable=True, domain_quotas={"math": 6, "code": 2}, domain_key=domain_key)
        wire(config, flags)
        return run_of(config)

    with pytest.raises(ConfigError, match=r"rows of the data set = at least data.train_batch_size, 8, found 7"):
        check_data(run(), 7, None)

    import datasets

    def rows(*kinds):
        return datasets.Dataset.from_dict({"kind": list(kinds), "prompt": ["?"] * len(kinds)})

    check_data(run(), 8, None)
    check_data(run(), 8, rows("math", "code", "math"))
    for frame in (rows("math", "math"), rows("math", "code", "poems")):
        with pytest.raises(
            ConfigError, match=r"a quota for each kind of the data set, .*, found quotas for math, code"
        ):
            check_data(run(), 8, frame)
    with pytest.raises(ConfigError, match=r"domain_key = a column of the data set \(kind, prompt\), found 'source'"):
        check_data(run("source"), 8, rows("math", "code"))


@pytest.mark.slow
def test_the_trainer_refuses_a_data_set_smaller_than_a_round(python, repo):
    done = python(
        f"""
        import sys
        sys.path.insert(0, {str(repo / "examples" / "verl_ppo_cpu")!r})
        import random
        from hydra import compose, initialize_config_module
        from prepare import dataset, model, tokenizer
        from verl.trainer.ppo.v1 import get_trainer_cls
        from rl_accel.patches.verl import config_intake
        tok = tokenizer("geometric")
        tok.save_pretrained("model")
        model(tok, 1024).save_pretrained("model")
        dataset("val", 7, "geometric", random.Random(0)).to_parquet("seven.parquet")
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer", [
                "hydra.searchpath=[pkg://rl_accel.lab.verl_cpu]", "+run_on=cpu", "data.train_batch_size=8",
                "actor_rollout_ref.model.path=model", "data.train_files=seven.parquet", "data.val_files=seven.parquet",
                "actor_rollout_ref.actor.ppo_mini_batch_size=8", "critic.ppo_mini_batch_size=8",
                "data.max_prompt_length=16", "+rl_accel.tail_batching.enable=True",
            ])
        config_intake.in_driver(config)
        trainer = get_trainer_cls("tail_batching")(config)
        trainer._init_tokenizer()
        trainer._init_dataloader()
    """,
        VERL_PLATFORM="cpu",
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "rl_accel.tail_batching wants rows of the data set = at least data.train_batch_size, 8, found 7" in last


def test_a_verl_without_the_v1_trainer_is_refused():
    with pytest.raises(ConfigError, match=r"wants verl = 0\.9\.1 or later with its V1 trainer, found"):
        wire(OmegaConf.create({"trainer": {}}), TailBatchingFlags(enable=True))


def test_a_trainer_that_nobody_wired_is_stopped(composed):
    from rl_accel.patches.verl import config_intake
    from rl_accel.runtime import FRAMEWORK, RUNTIME

    layers = RUNTIME.layers()
    try:
        RUNTIME.set_layer(FRAMEWORK, {"tail_batching": {"enable": True}})
        with pytest.raises(ConfigError, match=r"trainer_mode = tail_batching, found sync"):
            config_intake.in_trainer(composed)
    finally:
        RUNTIME.restore(layers)


@pytest.mark.slow
def test_the_mode_is_registered_while_the_feature_is_on(python):
    done = python("""
        import rl_accel
        rl_accel.enable(tail_batching=True)
        print(rl_accel.status()["tail_batching"].patches[0].state)
        from verl.trainer.ppo.v1 import get_trainer_cls
        assert get_trainer_cls("tail_batching").__name__ == "TailBatchingTrainer"
        assert rl_accel.status()["tail_batching"].applied
        rl_accel.disable()
        try:
            get_trainer_cls("tail_batching")
        except ValueError as error:
            assert "sync" in str(error)
        else:
            raise AssertionError("still registered")
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "waiting"
