"""``rl-accel slime-config``: what it writes turns features on, and what is wrong in a file is named."""

import pytest
from omegaconf import OmegaConf

from rl_accel.errors import ConfigError
from rl_accel.integrations.slime import custom_config

FLAGS = 'add("--rollout-function-path")\nadd("--rollout-batch-size", type=int)\n'


def write(path, content):
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(content)))
    return path


def test_the_file_holds_the_paths_that_its_features_need(tmp_path):
    content = custom_config.make(["gae", "tail_batching"], {"tail_batching": {"prompt_ratio": 1.5}})
    assert content["custom_megatron_init_path"] == "rl_accel.integrations.slime.hooks.megatron_init"
    assert content["data_source_path"].endswith(".TailDataSource")
    assert content["eval_function_path"] == "slime.rollout.sglang_rollout.generate_rollout"
    assert content["rl_accel"] == {"gae": {"enable": True}, "tail_batching": {"enable": True, "prompt_ratio": 1.5}}
    assert custom_config.check(write(tmp_path / "x.yaml", content)) == []
    assert "rollout_function_path" not in custom_config.make(["advantages"], {})


def test_every_path_can_be_imported_as_slime_does(slime_root):
    from slime.utils.misc import load_function

    for hooks in custom_config.HOOKS.values():
        for paths in hooks.values():
            for path in paths if isinstance(paths, list) else [paths]:
                assert callable(load_function(path))


def test_drafts_are_sglangs_own(tmp_path):
    content = custom_config.make(["drafts"], {"drafts": {"max_tokens": 5}})
    assert content["sglang_speculative_algorithm"] == "NGRAM"
    assert content["sglang_speculative_num_draft_tokens"] == 6
    file = write(tmp_path / "x.yaml", content)
    assert custom_config.check(file) == []
    write(file, {**content, "sglang_speculative_num_draft_tokens": 9})
    with pytest.raises(ConfigError, match="drafts wants sglang_speculative_num_draft_tokens: 6, found 9"):
        custom_config.check(file)
    with pytest.raises(ConfigError, match=r"rl_accel\.drafts\.batch_limit wants 32 on slime, found 4"):
        custom_config.make(["drafts"], {"drafts": {"batch_limit": 4}})


def test_arguments_of_sglang_are_looked_up_in_the_one_that_is_installed(slime_root, tmp_path):
    pytest.importorskip("sglang")
    content = custom_config.make(["drafts"], {})
    assert custom_config.check(write(tmp_path / "x.yaml", content), slime_root) == []
    wrong = write(tmp_path / "y.yaml", {**content, "sglang_speculative_ngram_min_bfs_bredth": 1})
    (warning,) = custom_config.check(wrong, slime_root)
    assert "did you mean sglang_speculative_ngram_min_bfs_breadth?" in warning


@pytest.mark.parametrize(
    ("features", "settings", "message"),
    [
        (["gea"], {}, r"unknown feature 'gea' \(did you mean gae\?\)"),
        (["sampler"], {}, "sampler has no part for slime; there are gae, advantages, tail_batching, reward_timeout"),
        (["gae"], {"gae": {"backend": "nunba"}}, "found 'nunba'"),
        (["gae"], {"gae": {"chunks": 3}}, r"unknown key rl_accel\.gae\.chunks"),
        (["sampler"], {}, "advantages, tail_batching, reward_timeout, tp_replan, drafts"),
    ],
)
def test_a_wrong_feature_or_flag_is_named(features, settings, message):
    with pytest.raises(ConfigError, match=message):
        custom_config.make(features, settings)


@pytest.mark.parametrize(
    ("feature", "settings", "message"),
    [
        ("reward_timeout", {"minimum": 40}, r"maximum must be at least minimum = 40, found 30"),
        ("tp_replan", {"min_tp": 4, "max_tp": 2}, "max_tp must be at least min_tp = 4, found 2"),
        ("tail_batching", {"domain_quotas": {"math": 0}}, r"domain_quotas\['math'\] must be at least 1, found 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_in_the_words_of_their_feature(
    tmp_path, feature, settings, message
):
    with pytest.raises(ConfigError, match=rf"rl_accel\.{feature}: {message}"):
        custom_config.make([feature], {feature: settings})
    content = custom_config.make([feature], {})
    content["rl_accel"][feature].update(settings)
    with pytest.raises(ConfigError, match=rf"rl_accel\.{feature}: {message}"):
        custom_config.check(write(tmp_path / "x.yaml", content))


def test_quotas_are_right_for_some_batch(tmp_path):
    content = custom_config.make(["tail_batching"], {"tail_batching": {"domain_quotas": {"math": 6, "code": 2}}})
    assert custom_config.check(write(tmp_path / "x.yaml", content)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data_source_path": None}, r"tail_batching wants data_source_path: rl_accel.*, found None"),
        (
            {"rl_accel": {"tail_batching": {"prompt_ration": 1.5}}},
            r"unknown key rl_accel\.tail_batching\.prompt_ration",
        ),
        ({"rl_accel": None, "rl_acel": {}}, "has no rl_accel section; is rl_acel meant for it"),
    ],
)
def test_what_slime_would_take_without_a_word_is_found(tmp_path, change, message):
    content = {**custom_config.make(["tail_batching"], {}), **change}
    content = {key: value for key, value in content.items() if value is not None}
    with pytest.raises(ConfigError, match=message):
        custom_config.check(write(tmp_path / "x.yaml", content))


def test_other_keys_are_looked_up_in_the_checkout(tmp_path):
    arguments = tmp_path / "slime" / "utils" / "arguments.py"
    arguments.parent.mkdir(parents=True)
    arguments.write_text(FLAGS)
    content = {"rollout_batch_sise": 3, "rollout_batch_size": 3, **custom_config.make(["gae"], {})}
    content.pop("custom_megatron_init_path")
    content["rl_accel"] = {}
    warnings = custom_config.check(write(tmp_path / "x.yaml", content), tmp_path)
    assert warnings == [
        "rollout_batch_sise is no flag of slime's own (did you mean rollout_batch_size?); slime sets it all the same"
    ]
    with pytest.raises(ConfigError, match="SLIME_ROOT wants a checkout of slime, found '/nowhere'"):
        custom_config.check(tmp_path / "x.yaml", custom_config.Path("/nowhere"))


def test_a_list_of_hooks_may_hold_others_beside_ours(tmp_path):
    content = custom_config.make(["reward_timeout"], {"reward_timeout": {"grader": "my.grader"}})
    (ours,) = content["rollout_sample_hook_path"]
    for hooks in ([ours], ["my.hook", ours]):
        assert custom_config.check(write(tmp_path / "x.yaml", {**content, "rollout_sample_hook_path": hooks})) == []
    for hooks in (["my.hook"], ours, None):
        with pytest.raises(
            ConfigError, match=r"reward_timeout wants rollout_sample_hook_path: \['rl_accel\..*, found "
        ):
            custom_config.check(write(tmp_path / "x.yaml", {**content, "rollout_sample_hook_path": hooks}))


def test_a_file_that_is_no_mapping_or_not_there_is_named(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="wants a mapping of slime's arguments, found list"):
        custom_config.check(tmp_path / "list.yaml")
    with pytest.raises(ConfigError, match="is not a readable YAML file"):
        custom_config.check(tmp_path / "none.yaml")
