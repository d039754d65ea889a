"""Tests what each feature adds to verl's configuration and refuses in it, and verl's modules while the feature is on."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace

import datasets
import pytest
from omegaconf import OmegaConf

import rl_accel
from rl_accel import features
from rl_accel.config import resolve
from rl_accel.errors import ConfigError
from rl_accel.integrations.verl import agent_loop, drafts, engines, reward_timeout, tail_batching, telemetry
from rl_accel.integrations.verl.tp_replan import TP_KEY
from rl_accel.patches.verl import config_intake
from rl_accel.patches.verl.verl_run import MAINS, VerlRun
from rl_accel.relaunch import NOTE, NOTE_VAR, OVERRIDES_VAR

ROLLOUT = "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
BACKEND = f"{VLLM}.distributed_executor_backend"
ROUTER = f"{ROLLOUT}.router_config_path"
MODE = "trainer.v1.trainer_mode"
MANAGER = "reward.reward_manager"
TAIL = features.TailBatchingFlags(enable=True, prompt_ratio=1.5, queue_threshold=3)
REWARD = features.RewardTimeoutFlags(enable=True, scale=2.0, workers=3)
TELEMETRY = features.ByNameFlags(enable=True)
DRAFTS = features.DraftsFlags(enable=True, max_tokens=5)
REPLAN = features.TpReplanFlags(enable=True)
plain = OmegaConf.to_container


def loops(part):
    return {agent_loop.KEY: agent_loop.MANAGER, agent_loop.PARTS: [part]}


def managed(source, name, path):
    """The keys of a reward manager of ours over this one."""
    section = {"manager": {"source": source, "name": name, "path": path}}
    return {
        f"{MANAGER}.source": "importlib",
        f"{MANAGER}.name": reward_timeout.MANAGER,
        f"{MANAGER}.module.path": reward_timeout.MANAGER_MODULE,
        "reward.reward_timeout": {**section, "anchors": "/somewhere/run/rl_accel_reward_anchors.json"},
        **loops(reward_timeout.WORKER_PART),
    }


MINE = {f"{MANAGER}.source": "importlib", f"{MANAGER}.name": "Mine", f"{MANAGER}.module.path": "/x/mine.py"}
NOTES = "/somewhere/run/rl_accel_telemetry.jsonl"
STEPS = {MODE: "tail_batching", "data.gen_batch_size": 1}
STEPS |= {tail_batching.GEN_BATCH_KEPT: 8}
DRAFTING = {
    f"{VLLM}.speculative_config.method": "custom_class",
    f"{VLLM}.speculative_config.model": "rl_accel.drafts.drafter.Drafter",
    f"{VLLM}.speculative_config.num_speculative_tokens": 5,
    f"{VLLM}.worker_extension_cls": "rl_accel.integrations.verl.drafts.worker.DraftsWorkerExtension",
    f"{VLLM}.additional_config.rl_accel_drafts": asdict(DRAFTS),
    ROUTER: str(drafts.ROUTER),
}
ALONE = {**DRAFTING, BACKEND: drafts.ONE_PROCESS}
WIRED = [
    (TAIL, {}, {**STEPS, **loops(tail_batching.WORKER_PART)}),
    (REWARD, {}, managed("register", "naive", None)),
    (REWARD, MINE, managed("importlib", "Mine", "/x/mine.py")),
    (TELEMETRY, {}, {"trainer.rl_accel_telemetry": NOTES, **loops(telemetry.WORKER_PART)}),
    (DRAFTS, {f"{VLLM}.kv_cache_memory_bytes": 100}, ALONE),
    (DRAFTS, {BACKEND: "mp"}, DRAFTING),
    (DRAFTS, {f"{ROLLOUT}.tensor_model_parallel_size": 2}, DRAFTING),
    (DRAFTS, {f"{ROLLOUT}.data_parallel_size": 2}, DRAFTING),
    (REPLAN, {}, {f"{ROLLOUT}.disable_log_stats": False}),
    (REPLAN, {f"{ROLLOUT}.name": "sglang"}, {f"{ROLLOUT}.engine_kwargs.sglang.enable_metrics": True}),
    (REPLAN, {f"{ROLLOUT}.name": "counts anyway"}, {}),
]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """A vLLM that drafts take, and an engine that always counts preemptions."""
    monkeypatch.setattr(drafts, "_vllm_version", lambda: "0.29.0")
    if importlib.util.find_spec("vllm") is None:
        extension = type("vLLMColocateWorkerExtension", (), {"update_weights_from_ipc": lambda self: None})
        utils = SimpleNamespace(vLLMColocateWorkerExtension=extension)
        monkeypatch.setitem(sys.modules, "verl.workers.rollout.vllm_rollout.utils", utils)
    monkeypatch.setitem(engines._ENGINES, "counts anyway", engines.EngineSupport(read_counters=dict.fromkeys))


@pytest.mark.parametrize(("flags", "given", "changes"), WIRED)
def test_one_flag_sets_the_keys_of_the_official_seams_and_nothing_else(configured, flags, given, changes):
    (name,) = (feature.name for feature in features.FEATURES if feature.flags is type(flags))
    given = {**given, f"rl_accel.{name}": asdict(flags)}
    config = configured(given)
    for take_in in (config_intake.in_driver, config_intake.in_driver, config_intake.in_trainer):
        take_in(config)
        assert plain(config) == plain(configured({**given, **changes}))


OWN = {"telemetry": {"enable": True, "endpoint": "http://mine"}, "accel": {"level": 3}, "sampler.enable": True}
OWN |= {"sampler.class_path": "/x/mine.py"}


def test_a_section_of_the_users_own_that_resembles_ours_is_left_to_them(configured):
    config = configured(OWN)
    config_intake.in_driver(config)
    assert plain(config) == plain(configured(OWN))
    for ours in (
        {"telemetry.enable": True},
        {"gae": {"enable": True, "backnd": "numba"}},
        {"rl_acel.gea.enable": True},
    ):
        with pytest.raises(ConfigError, match="flags of rl-accel belong in rl_accel, found"):
            config_intake.in_driver(configured(ours))


def test_flags_of_a_run_end_with_it_in_a_process_of_several_runs(configured, monkeypatch):
    monkeypatch.setenv("RL_ACCEL", "advantages")
    requested = []
    for given in ({"rl_accel.gae.enable": True}, {}, {"rl_accel.gae.backend": "chunk"}, {"rl_accel": None}):
        config_intake.in_driver(configured(given))
        flags = config_intake.RUNTIME.flags()
        requested.append((flags.requested(features.GAE), flags[features.GAE].backend))
        assert flags.requested(features.ADVANTAGES) == "by name"
    assert requested == [("by name", "auto"), ("off", "auto"), ("off", "chunk"), ("off", "auto")]


def test_a_configuration_of_another_type_is_left_to_the_users_own_trainer():
    for config in ({"trainer": {}}, SimpleNamespace(trainer=None), OmegaConf.create([1]), None):
        for take_in in (config_intake.in_driver, config_intake.in_trainer):
            take_in(config)
            with rl_accel.enabled("gae"):
                take_in(config)
            with rl_accel.enabled("skip_zero"), pytest.raises(ConfigError, match="configuration = DictConfig, found"):
                take_in(config)
    config = OmegaConf.create({"rl_accel": "${nowhere}"})
    with pytest.raises(ConfigError, match=r"^framework config: rl_accel: Interpolation key 'nowhere' not found$"):
        config_intake.in_trainer(config)


TOO_LATE = [
    ("tail_batching", {}, r"trainer_mode = tail_batching, found sync \(verl's validate_config sets it"),
    ("tp_replan", {"rl_accel.tp_replan.action": "restart"}, r"disable_log_stats = False, found True"),
]


@pytest.mark.parametrize("name", [feature.name for feature in features.FEATURES if feature.verl])
def test_a_driver_that_calls_no_function_of_verls_is_in_time_for_most(configured, name):
    late, in_time = (configured({f"rl_accel.{name}.enable": True}) for _ in range(2))
    for too_late, keys, message in TOO_LATE:
        if name == too_late:
            with pytest.raises(ConfigError, match=message):
                config_intake.in_trainer(configured({f"rl_accel.{name}.enable": True, **keys}))
    if name != "tail_batching":
        config_intake.in_trainer(late)
        config_intake.in_driver(in_time)
        assert plain(late) == plain(in_time)


@pytest.mark.parametrize("flags", [{}, {"rl_accel.tail_batching.enable": False}, {"rl_accel.auto": True}])
def test_without_such_a_flag_verls_configuration_stays_as_it_is(configured, flags):
    config = configured(flags)
    config_intake.in_driver(config)
    config_intake.in_trainer(config)
    assert plain(config) == plain(configured(flags))


OF_THE_USERS = ({agent_loop.KEY: "my.Manager"}, r"agent_loop_manager_class = None, found my\.Manager")
DETERMINISTIC = {f"{ROLLOUT}.full_determinism": True}
ASYNC = {MODE: "colocate_async"}
DISAGGREGATED = ({f"{ROLLOUT}.disaggregation.enabled": True}, r"disaggregation\.enabled = False, found True")
OWN_ROUTER = ({ROUTER: "own.yaml"}, r"router_config_path = None, found own\.yaml")
REWARD_MODEL, FUNCTION = {"reward.reward_model.enable": True}, "reward.custom_reward_function.path"
ACTOR = "actor_rollout_ref.actor"
MINI = f"{ACTOR}.ppo_mini_batch_size"
WHOLE_CHECKPOINTS = [
    ({"actor_rollout_ref.actor.checkpoint.async_save": True}, r"actor\.checkpoint\.async_save = False"),
    ({"critic.checkpoint.save_contents": ["model"]}, r"= model, optimizer and extra, found \['model'\]"),
    ({"trainer.default_local_dir": None}, r"default_local_dir = a folder"),
]
REFUSED = {
    "tail_batching": [
        (ASYNC, r"trainer\.v1\.trainer_mode = sync, found colocate_async"),
        ({MODE: "bogus"}, r"trainer\.v1\.trainer_mode = sync, found bogus"),
        ({"trainer.v1.sync.parameter_sync_step": 2}, r"trainer\.v1\.sync\.parameter_sync_step = 1, found 2"),
        ({"trainer.v1.sampler.custom_sampler.name": "Mine"}, r"custom_sampler = None, found Mine"),
        OF_THE_USERS,
        (DETERMINISTIC, r"full_determinism = False, found True \(what .* depends on which responses finish first\)"),
        ({"skip.rollout_tq.enable": True}, r"skip\.rollout_tq\.enable = False, found True"),
        ({"algorithm.adv_estimator": "remax"}, r"adv_estimator = another, found remax"),
        ({MINI: 3}, r"ppo_mini_batch_size = a divisor of data\.train_batch_size = 8, found 3"),
    ],
    "reward_timeout": [
        (REWARD_MODEL, r"custom_reward_function\.path = a function, found None"),
        ({**REWARD_MODEL, FUNCTION: "x.py"}, r"reward\.reward_model\.enable_resource_pool = True, found False"),
        OF_THE_USERS,
        ({f"{MANAGER}.name": "prime"}, r"reward_manager\.name = one of .*naive.*, found prime"),
    ],
    "telemetry": [OF_THE_USERS],
    "drafts": [
        ({f"{ROLLOUT}.name": "sglang"}, r"rollout\.name = vllm, found sglang"),
        ({f"{ROLLOUT}.mtp": {"enable": True, "enable_rollout": True}}, r"mtp\.enable_rollout = False, found True"),
        OWN_ROUTER,
        ({f"{VLLM}.speculative_config": {"method": "ngram"}}, r"_config = None, found \{'method': 'ngram'\}"),
    ],
    "skip_zero": [
        ({f"{ACTOR}.strategy": "megatron"}, r"= fsdp or fsdp2, found megatron \(others were not tried\)"),
        ({f"{ACTOR}.entropy_coeff": 0.01}, r"actor\.entropy_coeff = 0, found 0\.01"),
        ({f"{ACTOR}.use_kl_loss": True}, r"actor\.use_kl_loss = False, found True"),
        ({f"{ACTOR}.calculate_entropy": True}, r"actor\.calculate_entropy = False, found True"),
        ({"distillation.enabled": True}, r"distillation\.enabled = False, found True"),
    ],
    "overlap_validation": [
        (ASYNC, r"trainer_mode = sync, found colocate_async"),
        (REWARD_MODEL, r"reward_model\.enable_resource_pool = True, found False \(a colocated reward model stops"),
        ({"trainer.v1.sampler.custom_sampler.path": "x.py"}, r"custom_sampler = None, found x\.py"),
        ({"algorithm.filter_groups.enable": True}, r"filter_groups\.enable = False, found True \(which prompts"),
        ({"skip.rollout_tq.enable": True}, r"skip\.rollout_tq\.enable = False, found True"),
    ],
    "reuse_log_probs": [
        ({f"{ACTOR}.strategy": "veomni"}, r"= fsdp, fsdp2 or megatron, found veomni \(others were not tried\)"),
        ({"algorithm.use_kl_in_reward": True}, r"algorithm\.use_kl_in_reward = False, found True"),
        ({"algorithm.rollout_correction.rollout_is": "token"}, r"rollout_correction\.rollout_is = None, found token"),
        ({"algorithm.rollout_correction.rollout_rs": "seq_max_k2"}, r"rollout_rs = None, found seq_max_k2"),
        (
            {"algorithm.adv_estimator": "optimal_token_baseline"},
            r"without old log-probabilities, found optimal_token_baseline",
        ),
        ({"distillation.enabled": True}, r"distillation\.enabled = False, found True"),
        ({f"{ROLLOUT}.enable_rollout_routing_replay": True}, r"enable_rollout_routing_replay = False, found True"),
        (
            {f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron.router_replay.mode": "R2"},
            r"megatron\.router_replay\.mode = disabled, found R2",
        ),
        ({MODE: "separate_async"}, r"trainer_mode = sync, found separate_async"),
    ],
    "tp_replan": [
        (ASYNC, r"trainer_mode = sync, found colocate_async"),
        ({f"{ROLLOUT}.name": "trtllm"}, r"rollout\.name = one of .*sglang, vllm, found trtllm"),
        DISAGGREGATED,
        ({f"{ROLLOUT}.data_parallel_size": 3}, r"a divisor of 4 GPUs, found 3"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 3}, r"one of 1, 2, 4, found 3 \(does not divide 4 GPUs"),
        *[({**keys, "rl_accel.tp_replan.action": "restart"}, message) for keys, message in WHOLE_CHECKPOINTS],
    ],
}


AUTOMATIC = [(name, *row) for name in ("skip_zero", "reuse_log_probs") for row in REFUSED[name]]


@pytest.mark.parametrize(("feature", "keys", "message"), AUTOMATIC)
def test_an_automatic_feature_is_checked_as_one_by_name_and_stays_off_with_the_same_sentence(
    configured, caplog, feature, keys, message
):
    def requested():
        return rl_accel.status()[feature].requested

    for _ in range(2):
        config_intake.in_driver(configured({"rl_accel.auto": True, **keys}))
        config_intake.in_trainer(configured({"rl_accel.auto": True, **keys}))
    assert requested() == "off"
    (line,) = [line for line in caplog.messages if feature in line]
    assert re.match(rf"rl-accel: {feature} stays off: rl_accel\.{feature} wants .*{message}", line)
    config_intake.in_driver(configured({"rl_accel.auto": True}))
    assert requested() == "automatically"


def test_a_group_filter_that_verls_legacy_trainer_lacks_is_said_and_skip_zero_is_not_called_idle(configured, caplog):
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    class WithFilter(RayPPOTrainer):
        """As recipes have one."""

    keys = {"trainer.use_v1": False, "algorithm.adv_estimator": "grpo", "algorithm.filter_groups.enable": True}
    for cls, said in (
        (
            RayPPOTrainer,
            "verl's legacy trainer does not read algorithm.filter_groups.enable: skip_zero leaves",
        ),
        (WithFilter, "skip_zero is on and has nothing to do in this run: algorithm.filter_groups.enable = True"),
    ):
        caplog.clear()
        trainer = object.__new__(cls)
        config_intake.in_trainer(configured({"rl_accel.skip_zero.enable": True, **keys}), trainer)
        (line,) = [line for line in caplog.messages if "filter_groups" in line]
        assert line.startswith(f"rl-accel: {said}")


def test_a_size_that_tail_batching_replaces_is_said_once(configured, caplog):
    config = configured({"rl_accel.tail_batching.enable": True, "data.gen_batch_size": 16})
    for _ in range(2):
        config_intake.in_driver(config)
    assert tail_batching.filter_limit(config) is None
    OmegaConf.update(config, "algorithm.filter_groups.max_num_gen_batches", 3)
    assert tail_batching.filter_limit(config).prompts == 48
    assert caplog.text.count("tail_batching replaces data.gen_batch_size = 16 by 1") == 1
    assert OmegaConf.select(config, "data.gen_batch_size") == 1


@pytest.mark.parametrize(("feature", "keys", "message"), [(name, *row) for name in REFUSED for row in REFUSED[name]])
def test_what_cannot_work_is_refused_with_key_wanted_and_found(configured, feature, keys, message):
    config = configured({f"rl_accel.{feature}.enable": True, **keys})
    before = plain(config)
    with pytest.raises(ConfigError, match=rf"rl_accel\.{feature} wants .*{message}"):
        config_intake.in_driver(config)
    if feature != "drafts":  # it sets keys until one is taken
        assert plain(config) == before


def test_a_policy_loss_is_tried_before_workers_start_if_the_trainer_knows_it(configured):
    def begin(mode):
        mini = {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1, f"{ACTOR}.policy_loss.loss_mode": mode}
        config_intake.in_trainer(configured({"rl_accel.skip_zero.enable": True, **mini}))

    with pytest.raises(ConfigError, match=r"\.loss_mode = a loss .*, found kl_cov with loss_agg_mode token-mean"):
        begin("kl_cov")
    begin("gspo")
    begin("registered_in_workers_alone")


@pytest.mark.parametrize("by", ["auto", "resume_path"])
def test_a_run_goes_on_from_the_checkpoint_of_another_trainer_only_where_it_can(configured, caplog, tmp_path, by):
    checkpoint = tmp_path / "global_step_7"
    checkpoint.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    keys = {"resume_mode": by, "default_local_dir": str(tmp_path), "resume_from_path": str(checkpoint)}
    resumed = {f"trainer.{key}": value for key, value in keys.items()}

    def begin(feature, **changed):
        config_intake.in_driver(configured({f"rl_accel.{feature}.enable": True, **resumed, **changed}))

    with pytest.raises(ConfigError, match=r"global_step_7 was saved without tail batching: .*Resume it without"):
        begin("tail_batching")
    begin("tail_batching", **{"trainer.resume_mode": "disable"})
    begin("telemetry", **{"rl_accel.tail_batching.enable": False})
    assert caplog.text == ""
    (checkpoint / "tail_batching").mkdir()
    (checkpoint / "tail_batching" / "state.pt").touch()
    begin("tail_batching", **{"rl_accel.telemetry.enable": False})
    assert caplog.text == ""
    begin("telemetry", **{"rl_accel.tail_batching.enable": False})
    assert caplog.text.count("prompts that it had deferred in") == 1


def test_only_a_restart_wants_whole_checkpoints_and_says_where_its_note_will_be(configured, monkeypatch, tmp_path):
    monkeypatch.setenv(NOTE_VAR, str(tmp_path / "pointer"))
    old = tmp_path / NOTE
    old.touch()
    for keys, _ in WHOLE_CHECKPOINTS:
        config_intake.in_driver(configured({"rl_accel.tp_replan.enable": True, **keys}))
    assert [*tmp_path.iterdir()] == [old]
    folder = {"trainer.default_local_dir": str(tmp_path)}
    config_intake.in_driver(configured({"rl_accel.tp_replan": {"enable": True, "action": "restart"}, **folder}))
    assert (tmp_path / "pointer").read_text() == str(old)
    assert not old.exists(), "an earlier launch left it"


def test_a_restart_whose_script_ignores_the_new_size_is_refused(configured, monkeypatch):
    given = {"rl_accel.tp_replan": {"enable": True, "action": "restart"}}
    monkeypatch.setenv(OVERRIDES_VAR, json.dumps([f"{TP_KEY}=2", "trainer.resume_mode=auto"]))
    config_intake.in_driver(configured({**given, TP_KEY: 2}))
    with pytest.raises(ConfigError, match=r'= 2, found 1 \(the command ignores .* by "\$@", as its last words\)$'):
        config_intake.in_driver(configured(given))


@pytest.mark.parametrize("version", [None, "0.23.1", "0.34.0"])
def test_a_vllm_outside_of_what_was_tried_is_refused(configured, monkeypatch, version):
    monkeypatch.setattr(drafts, "_vllm_version", lambda: version)
    with pytest.raises(ConfigError, match=rf"vLLM = 0\.24\.0 to 0\.33\.0, found {version}"):
        drafts.wire(VerlRun(configured({}), in_driver=True), DRAFTS)


@pytest.mark.parametrize("version", ["0.27.1", "0.33.0"])
def test_a_vllm_with_the_same_interface_serves_with_one_warning(configured, monkeypatch, caplog, version):
    monkeypatch.setattr(drafts, "_vllm_version", lambda: version)
    for _ in range(2):
        drafts.wire(VerlRun(configured({}), in_driver=True), DRAFTS)
    assert caplog.messages == [f"rl-accel: vLLM {version} was not tried; 0.24.0 and 0.29.0 were"]
    assert drafts.check_engine()[0] == ("works", f"vllm {version}", "has the interface; not run here")


def test_the_doctor_refuses_a_vllm_that_drafts_do_not_know(monkeypatch):
    monkeypatch.setattr(drafts, "_vllm_version", lambda: "0.34.0")
    ((verdict, what, reason),) = drafts.check_engine()
    assert (verdict, what) == ("cannot", "vllm 0.34.0")
    assert "0.34.0 is newer than the versions that were tried" in reason


def test_an_older_verl_is_refused():
    run = VerlRun(OmegaConf.create({"trainer": {}}), in_driver=True)
    with pytest.raises(ConfigError, match="wants the trainer = V1 sync, found legacy"):
        run.require("tail_batching")
    with pytest.raises(ConfigError, match=r"wants verl 0\.8\.0 or later with its reward loop"):
        reward_timeout.wire(run, REWARD)


# -- launch lines, in shapes that users have, and what each feature says to them ---------------------------------------------

SEPARATE = ["actor_rollout_ref.hybrid_engine=False", "trainer.n_gpus_per_node=4", "rollout.n_gpus_per_node=4"]
DAPO = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc", "data.gen_batch_size=24"]
GRPO, SGLANG = ["algorithm.adv_estimator=grpo"], [f"{ROLLOUT}.name=sglang"]
PPO, FULLY, ONE_STEP = MAINS
ALL = {feature.name for feature in features.FEATURES}
ON_POLICY_ONLY = {"overlap_validation", "tail_batching", "tp_replan"}
V1_ONLY = {"sampler", "drafts", *ON_POLICY_ONLY}
NOT_ONE_STEP = {"reward_timeout", "reuse_log_probs", *V1_ONLY}
NOT_FULLY = {"telemetry", *NOT_ONE_STEP}
NO_GROUPS, NO_SCAN = {"skip_zero"}, {"gae", "advantages"}
IN_TRAINING = {
    "gae",
    "advantages",
    "skip_zero",
    "reuse_log_probs",
    "overlap_validation",
    "tail_batching",
    "telemetry",
    "tp_replan",
}
LINES = {  # by line: the features that are refused, and those without effect
    "ppo": (PPO, [], set(), NO_GROUPS),
    "grpo": (PPO, GRPO, set(), NO_SCAN),
    "reinforce++": (PPO, ["algorithm.adv_estimator=reinforce_plus_plus"], set(), {"gae", *NO_GROUPS}),
    "two updates": (PPO, [*GRPO, f"{MINI}=128"], set(), {"reuse_log_probs", *NO_SCAN}),
    "two epochs": (PPO, [*GRPO, f"{ACTOR}.ppo_epochs=2"], set(), {"reuse_log_probs", *NO_SCAN}),
    "bypass": (
        PPO,
        [*GRPO, "algorithm.rollout_correction.bypass_mode=True"],
        set(),
        {"reuse_log_probs", *NO_SCAN},
    ),
    "rloo": (PPO, ["algorithm.adv_estimator=rloo"], set(), NO_SCAN),
    "gdpo": (PPO, ["algorithm.adv_estimator=gdpo"], set(), {"gae", *NO_GROUPS}),
    "kl in the reward": (PPO, [*GRPO, "algorithm.use_kl_in_reward=True"], {"reuse_log_probs"}, {*NO_SCAN, *NO_GROUPS}),
    "validation alone": (PPO, [*GRPO, "trainer.val_only=True"], set(), IN_TRAINING),
    "disaggregated": (
        PPO,
        [*GRPO, f"{ROLLOUT}.disaggregation.enabled=True"],
        {"tp_replan"},
        {"final_output", *NO_SCAN},
    ),
    "legacy, whose own trainer filters no groups": (
        PPO,
        [*GRPO, *DAPO, "trainer.use_v1=False"],
        V1_ONLY,
        NO_SCAN,
    ),
    "remax": (PPO, ["algorithm.adv_estimator=remax"], {"tail_batching"}, NO_SCAN),
    "dapo": (PPO, [*GRPO, *DAPO], {"overlap_validation"}, {"sampler", *NO_SCAN, *NO_GROUPS}),
    "sglang": (PPO, SGLANG, {"final_output", "drafts"}, NO_GROUPS),
    "legacy": (PPO, ["trainer.use_v1=False"], V1_ONLY, NO_GROUPS),
    "colocate_async": (PPO, [f"{MODE}=colocate_async"], ON_POLICY_ONLY, NO_GROUPS),
    "separate_async": (PPO, [f"{MODE}=separate_async", *SEPARATE[:2]], {"reuse_log_probs", *ON_POLICY_ONLY}, NO_GROUPS),
    "one_step_off": (ONE_STEP, SEPARATE, NOT_ONE_STEP, NO_GROUPS),
    "one_step_off, sglang": (ONE_STEP, [*SEPARATE, *GRPO, *SGLANG], {"final_output", *NOT_ONE_STEP}, NO_SCAN),
    "fully_async": (FULLY, SEPARATE, NOT_FULLY, NO_GROUPS),
    "fully_async, grpo": (FULLY, [*SEPARATE, *GRPO], NOT_FULLY, NO_SCAN),
}
REST = [f"{ROLLOUT}.name=vllm", "data.train_batch_size=256", f"{MINI}=256", "critic.ppo_mini_batch_size=256"]
REST += ["trainer.test_freq=5", "trainer.n_gpus_per_node=8", f"{ROLLOUT}.tensor_model_parallel_size=2"]


@pytest.mark.parametrize("line", LINES)
def test_a_launch_line_is_right_or_refused_in_one_line(line, caplog):
    main, overrides, refused, idle = LINES[line]
    composed = VerlRun.compose(main, [*REST, *overrides])
    found, told = {"refused": set(), "idle": set()}, {}
    for name in ALL:
        run = VerlRun(composed.config.copy(), in_driver=True)
        try:
            without_effect, _ = config_intake.wire(run, resolve([("a test", {name: True})]))
            found["idle"] |= without_effect.keys()
        except ConfigError as error:
            found["refused"].add(name)
            told[name] = str(error)
    assert found == {"refused": refused, "idle": idle}
    for name in refused:
        assert re.fullmatch(rf"rl_accel\.{name} wants .+ found .+", told[name])  # . is no end of line
    caplog.clear()
    automatic = VerlRun(composed.config.copy(), in_driver=True)
    without_effect, _ = config_intake.wire(automatic, resolve([("a test", {"auto": True})]))
    assert without_effect == {}
    assert caplog.text == ""


def test_the_page_says_which_feature_works_with_which_trainer(repo):
    columns = ("V1 sync", "V1 colocate_async", "legacy", "one_step_off", "fully_async")
    said, row = {}, r"^\| (`.+?) " + r"\| (yes|no|if named) " * 5 + r"\|$"
    for names, *cells in re.findall(row, (repo / "docs/verl.md").read_text(), re.M):
        said |= {name: [cell != "no" for cell in cells] for name in re.findall(r"\w+", names)}
    run = VerlRun(OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm"}}}))

    def works(name, trainer):
        run.trainer_kind = trainer
        try:
            run.require(name)
        except ConfigError:
            return False
        return True

    assert said == {name: [works(name, trainer) for trainer in columns] for name in ALL}


def test_the_corpus_takes_launch_lines_from_scripts_that_do_nothing_else(repo, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(repo / "docs")
    import corpus

    scripts = tmp_path / "checkout" / "examples"
    scripts.mkdir(parents=True)
    (scripts / "run.sh").write_text(
        """
        set -euxo pipefail
        rm -rf "$(dirname "$0")"; pip install nothing; cd /no/such/folder; source /no/such/file
        GPUS=$(nvidia-smi -L | wc -l); NAME=$(basename /a/qwen)
        ARGS=(algorithm.adv_estimator=grpo +x="['a b']")
        X=1 python3 -m verl.trainer.main_ppo --config-name=other.yaml "${ARGS[@]}" n=$GPUS name=$NAME "$@" 2>&1 | tee log
        ray job submit --address=a -- python3 recipe/mine/main_mine.py trainer.nnodes=2 ~key
        """
    )
    results = [corpus.main_and_overrides(words) for words in corpus.launch_lines(tmp_path / "checkout", corpus.GIVEN)]
    grpo = ["algorithm.adv_estimator=grpo", "+x=['a b']", "n=8", "name=qwen"]
    assert results == [
        ("verl.trainer.main_ppo", grpo, "", "other"),
        ("recipe.mine.main_mine", ["trainer.nnodes=2", "~key"], "", ""),
    ]
    assert [*(tmp_path / "checkout").rglob("*")] == [scripts, scripts / "run.sh"]


@pytest.mark.full
def test_no_launch_script_of_verl_makes_the_pack_crash(repo):
    roots = {f"--{name}-root": os.environ.get(f"{name.upper()}_ROOT") for name in ("verl", "recipe")}
    words = [word for option, root in roots.items() if root for word in (option, root)]
    if not words:
        pytest.skip("VERL_ROOT and RECIPE_ROOT name no checkouts")
    done = subprocess.run([sys.executable, "docs/corpus.py", *words], cwd=repo, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_data_set_smaller_than_a_batch_is_refused(configured):
    config = configured({"rl_accel.tail_batching.enable": True})
    config_intake.in_driver(config)
    run = tail_batching.run_of(config, TAIL)
    with pytest.raises(ConfigError, match=r"rows of the data set = at least data.train_batch_size, 8, found 7"):
        tail_batching.check_data(run, 7, None)
    tail_batching.check_data(run, 8, None)


def test_a_row_that_asks_for_another_number_of_responses_is_refused(configured):
    config = configured({"rl_accel.tail_batching.enable": True, f"{ROLLOUT}.n": 4})
    config_intake.in_driver(config)
    run = tail_batching.run_of(config, TAIL)
    tail_batching.check_data(run, 8, datasets.Dataset.from_dict({"__rollout_n__": [4, 4]}))
    for frame in ([4, 2], [4, None]):
        with pytest.raises(ConfigError, match=r"__rollout_n__ of a row of the data = rollout\.n, 4, found (2|None)"):
            tail_batching.check_data(run, 8, datasets.Dataset.from_dict({"__rollout_n__": frame}))


PARTS = [tail_batching.WORKER_PART, reward_timeout.WORKER_PART, telemetry.WORKER_PART]


@pytest.mark.slow
def test_features_are_registered_from_the_import_of_their_modules_until_they_are_off(python, repo):
    """A process with three features on, and children of it for what is another interpreter's to show.

    While it imports, another thread asks for their states all the time, which waits for no import.
    """
    python(
        f"""
        import importlib, os, random, sys, threading
        import pytest, rl_accel
        from rl_accel.errors import ConfigError
        from rl_accel.telemetry import metrics

        names = ("tail_batching", "reward_timeout", "telemetry")
        rl_accel.enable(**dict.fromkeys(names, True))
        status = lambda name: rl_accel.status()[name]
        assert [status(name).switches[0].state for name in names] == ["waiting"] * 3, rl_accel.status()

        import verl
        children = {{}}  # verl's modules register ours while they are imported, whichever part of ours is the first to ask
        for part in {[part.rpartition(".")[0] for part in PARTS]!r}:
            children[part] = os.fork()
            if not children[part]:
                importlib.import_module(part)
                os._exit(0)
        for part, child in children.items():
            assert os.waitpid(child, 0)[1] == 0, f"{{part}} cannot be imported first"

        over = threading.Event()

        def ask():
            while not over.wait(0.002):  # without a pause the import would hardly ever get the interpreter
                rl_accel.status()

        threading.Thread(target=ask, daemon=True).start()
        import verl.utils.tracking
        assert status("telemetry").applied
        found = metrics.run_observers(1, {{"timing_s/step": 4.0, "timing_s/gen": 3.0}})
        assert found["rl_accel/telemetry/share/gen"] == 0.75 and found["rl_accel/telemetry/share/other"] == 0.25
        assert metrics.run_observers(1, {{"val/acc": 1.0}}) == {{}}

        import verl.experimental.reward_loop
        assert status("reward_timeout").applied
        assert metrics.observer_of("reward_timeout").__module__ == "rl_accel.integrations.verl.reward_timeout"

        from verl.trainer.ppo.v1 import get_trainer_cls
        assert get_trainer_cls("tail_batching").__name__ == "TailBatchingTrainer"
        assert status("tail_batching").applied
        over.set()

        sys.path.insert(0, {str(repo / "examples" / "verl_ppo_cpu")!r})
        from hydra import compose, initialize_config_module
        from prepare import dataset, model, tokenizer
        from rl_accel.patches.verl import config_intake
        tok = tokenizer("geometric")
        tok.save_pretrained("model")
        model(tok, 1024).save_pretrained("model")
        dataset("val", 7, "geometric", random.Random(0)).to_parquet("seven.parquet")
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer", [
                "hydra.searchpath=[pkg://verl_on_cpu]", "+run_on=cpu", "data.train_batch_size=8",
                "actor_rollout_ref.model.path=model", "data.train_files=seven.parquet", "data.val_files=seven.parquet",
                "actor_rollout_ref.actor.ppo_mini_batch_size=8", "critic.ppo_mini_batch_size=8",
                "data.max_prompt_length=16",
            ])
        config_intake.in_driver(config)
        trainer = get_trainer_cls("tail_batching")(config)
        trainer._init_tokenizer()
        with pytest.raises(ConfigError, match="tail_batching wants rows of the data set = .*train_batch_size, 8, found 7"):
            trainer._init_dataloader()

        rl_accel.disable()
        assert metrics.observer_of("reward_timeout") is None
        assert metrics.run_observers(1, {{"timing_s/step": 4.0}}) == {{}}
        with pytest.raises(ValueError, match="sync"):
            get_trainer_cls("tail_batching")
    """,
        fork=True,
        VERL_PLATFORM="cpu",
        VERL_USE_EXTERNAL_MODULES="verl_on_cpu.plugin",
    )
