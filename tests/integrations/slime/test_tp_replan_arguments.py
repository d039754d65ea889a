"""What slime's arguments, its engine config file and our flags say about the tensor-parallel size. Needs no slime."""

import pytest
import yaml

from rl_accel.errors import ConfigError
from rl_accel.features.tp_replan import TpReplanFlags
from rl_accel.integrations.slime import custom_config, hooks, rollout_log
from rl_accel.integrations.slime.tp_replan import arguments
from rl_accel.integrations.slime.tp_replan.layout import layout_of
from rl_accel.runtime import RUNTIME

ON = TpReplanFlags(enable=True)


@pytest.fixture(autouse=True)
def anew():
    """Flags of a test end with it."""
    yield
    RUNTIME.clear()


def regular(gpus, **more):
    return {"worker_type": "regular", "num_gpus": gpus, **more}


# What slime's arguments say


def test_without_a_file_engines_stand_as_slimes_flags_say_and_the_document_is_slimes_own(arguments_of):
    layout = layout_of(arguments_of(rollout_num_gpus_per_engine=2, sglang_pp_size=2))
    assert (layout.gpus, layout.gpus_per_engine, layout.pipeline, layout.tp) == (4, 2, 2, 1)
    group = {"worker_type": "regular", "num_gpus": 4, "num_gpus_per_engine": 4}
    assert layout.at(2, default=2) == {"sglang": [{"name": "default", "server_groups": [group]}]}


def test_a_file_is_kept_but_for_the_size_and_other_models_stay_as_they_stand(arguments_of, config_file):
    hidden = {"worker_type": "placeholder", "num_gpus": 2}
    ours = regular(4, overrides={"chunked-prefill-size": 512})
    judge = {"name": "judge", "model_path": "/j", "server_groups": [regular(2)]}
    path = config_file(hidden, ours, model={"num_gpus_per_engine": 2}, others=[judge])
    layout = layout_of(arguments_of(sglang_config=path, rollout_num_gpus=8))
    assert (layout.gpus, layout.tp) == (4, 2)
    actor, other = layout.at(4, default=1)["sglang"]
    assert actor["server_groups"] == [hidden, {**ours, "num_gpus_per_engine": 4}]
    assert other == {**judge, "num_gpus_per_engine": 1}
    assert layout.document["sglang"][1] == judge, "what was read is not changed"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_external": True}, "--rollout-external-engine-addrs to be unset"),
        ({"prefill_num_servers": 1}, "--prefill-num-servers to be unset.*found 1"),
        ({"rollout_num_gpus": 0}, "--rollout-num-gpus of at least 1, found 0"),
        ({"sglang_dp_size": 2}, "--sglang-dp-size 1.*found 2"),
        ({"rollout_num_gpus_per_engine": 3}, "whole engines, found 3 of 4"),
        ({"sglang_config": "/no/such.yaml"}, r"cannot read --sglang-config /no/such\.yaml"),
        (
            {"rollout_num_gpus_per_engine": 4, "num_gpus_per_node": 2},
            "TP 1 or 2, found 4 .*more than the 2 GPUs of a node",
        ),
        ({"sglang_ep_size": 2}, r"TP 2 or 4, found 1 .*no multiple of 2"),
    ],
)
def test_what_it_cannot_work_with_is_refused_by_name(arguments_of, changes, message):
    with pytest.raises(ConfigError, match=message):
        arguments.check(arguments_of(**changes), ON)
    arguments.check(arguments_of(**changes, debug_train_only=True), ON)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [{"worker_type": "prefill", "num_gpus": 2}, {"worker_type": "decode", "num_gpus": 2}],
            "found prefill, decode",
        ),
        ([regular(2), regular(2)], "one regular server group .*found regular, regular"),
        ([regular(4, overrides={"tp-size": 2})], "no tp_size among the overrides"),
    ],
)
def test_groups_that_have_no_one_size_are_refused_by_name(arguments_of, config_file, groups, message):
    with pytest.raises(ConfigError, match=message):
        arguments.check(arguments_of(sglang_config=config_file(*groups)), ON)


def test_bounds_come_from_the_cluster_the_model_and_the_flags(arguments_of):
    def sizes(flags=ON, **changes):
        args = arguments_of(**changes)
        return arguments.bounds_of(args, flags, layout_of(args)).sizes

    assert sizes() == (1, 2, 4)
    assert sizes(rollout_num_gpus=16, num_gpus_per_node=8) == (1, 2, 4), "the model has 4 heads"
    assert sizes(TpReplanFlags(enable=True, max_tp=2)) == (1, 2)
    assert sizes(sglang_pp_size=2, rollout_num_gpus_per_engine=2) == (1, 2)
    with pytest.raises(
        ConfigError, match=r"no tensor-parallel size is possible on 4 GPUs: .*TP 4: is below min_tp = 8"
    ):
        sizes(TpReplanFlags(enable=True, min_tp=8))


# The file for --custom-config-path


@pytest.mark.parametrize("action", ["restart", "live"])
def test_an_action_that_slime_has_no_seam_for_is_refused_when_the_file_is_made_checked_and_used(
    arguments_of, tmp_path, action
):
    line = f"rl_accel.tp_replan.action={action} is not available on slime"
    with pytest.raises(ConfigError, match=line):
        custom_config.make(["tp_replan"], {"tp_replan": {"action": action}})
    content = custom_config.make(["tp_replan"], {})
    content["rl_accel"]["tp_replan"]["action"] = action
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=line):
        custom_config.check(tmp_path / "x.yaml")
    with pytest.raises(ConfigError, match=line):
        hooks.megatron_init(arguments_of(**content))


def test_a_run_whose_engines_have_an_impossible_size_ends_before_its_first_rollout(arguments_of):
    content = custom_config.make(["tp_replan"], {"tp_replan": {"min_tp": 2}})
    with pytest.raises(ConfigError, match="TP 2 or 4, found 1"):
        hooks.megatron_init(arguments_of(**content))
    hooks.megatron_init(arguments_of(**content, rollout_num_gpus_per_engine=2))


def test_features_share_the_log_function(tmp_path):
    content = custom_config.make(["tp_replan", "reward_timeout", "gae"], {})
    assert content["custom_rollout_log_function_path"] == rollout_log.LOG
    assert content["custom_eval_rollout_log_function_path"] == rollout_log.LOG_EVALUATION
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(content))
    assert custom_config.check(tmp_path / "x.yaml") == []
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({**content, "custom_rollout_log_function_path": "my.log"}))
    with pytest.raises(ConfigError, match=r"wants custom_rollout_log_function_path: rl_accel\..*found my\.log"):
        custom_config.check(tmp_path / "x.yaml")
