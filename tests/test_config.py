"""Tests the flags: one schema for all sources, and an error with key, wanted value and closest known key for a wrong flag."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_accel.__main__ import cli
from rl_accel.config import Flags, read_environment, read_names, resolve
from rl_accel.errors import ConfigError
from rl_accel.features import FEATURES, GAE, SAMPLER

HERE = Path(__file__).parent


def test_defaults_turn_nothing_on():
    config = resolve([])
    assert config.auto is False
    assert all(config[feature] == feature.flags() for feature in FEATURES)
    assert {config.requested(feature) for feature in FEATURES} == {"off"}


def test_later_layers_win_key_by_key_and_a_bare_bool_switches_a_feature():
    environment = {"gae": {"enable": True, "backend": "chunk", "chunk_size": 64}, "sampler": True}
    framework = {"gae": {"backend": "numba"}}
    config = resolve([("environment", environment), ("framework", framework), ("keywords", {"gae": False})])
    assert config[GAE] == GAE.flags(enable=False, backend="numba", chunk_size=64)
    assert config[SAMPLER].enable is True


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"gea": {"enable": True}}, r"unknown key rl_accel\.gea \(did you mean rl_accel\.gae\?\)"),
        ({"gae": {"enabel": True}}, r"unknown key rl_accel\.gae\.enabel \(did you mean rl_accel\.gae\.enable\?\)"),
        ({"gae": {"backend": "nunba"}}, r"rl_accel\.gae\.backend wants one of .*'nunba' \(did you mean numba\?\)"),
        ({"sampler": {"cpu_share": 0.1}}, r"did you mean rl_accel\.sampler\.max_cpu_share\?"),
        ({"tp_replan": {"interval": 5}}, r"rl_accel\.tp_replan\.interval; rl_accel\.tp_replan takes enable, action,"),
        ({"gae": {"backend": 3}}, r"rl_accel\.gae\.backend wants str, found 3 \(int\)"),
        ({"gae": {"threads": 0}}, r"rl_accel\.gae\.threads wants at least 1, found 0"),
        ({"gae": {"threads": 2.5}}, r"rl_accel\.gae\.threads wants int or null, found 2\.5"),
        ({"gae": {"threads": True}}, r"rl_accel\.gae\.threads wants int or null, found True \(bool\)"),
        ({"gae": {"enable": "perhaps"}}, r"rl_accel\.gae\.enable wants bool or null, found 'perhaps'"),
        ({"gae": {"enable": 1}}, r"rl_accel\.gae\.enable wants bool or null, found 1 \(int\)"),
        ({"gae": "numba"}, r"rl_accel\.gae wants true, false or a mapping, found 'numba'"),
        ({"sampler": {"max_cpu_share": 1.5}}, r"max_cpu_share wants a value between 0\.001 and 1\.0, found 1\.5"),
        ({"reward_timeout": {"timeout_score": float("nan")}}, r"timeout_score wants a finite number, found nan"),
        ({"sampler": {"max_delay_s": None}}, r"max_delay_s wants float, found None"),
        ({"tail_batching": {"prompt_ratio": "auto"}}, r"prompt_ratio wants float, found 'auto'"),
        ({"tail_batching": {"prompt_ratio": 0.9}}, r"prompt_ratio wants at least 1\.0, found 0\.9"),
        ({"tail_batching": {"response_ratio": 0}}, r"response_ratio wants at least 1\.0, found 0\.0"),
        ({"tail_batching": {"prompt_ratio": True}}, r"tail_batching\.prompt_ratio wants float, found True"),
        ({"tail_batching": {"prompt_ratio": float("inf")}}, r"prompt_ratio wants a finite number, found inf"),
        ({"tail_batching": {"max_deferrals": 0}}, r"tail_batching\.max_deferrals wants at least 1, found 0"),
        ({"tail_batching": {"max_retries": -1}}, r"tail_batching\.max_retries wants at least 0, found -1"),
        ({"tail_batching": {"queue_threshold": 0}}, r"queue_threshold wants at least 1, found 0"),
        ({"gae.enable": "True"}, r"rl_accel\.gae\.enable wants bool or null, found 'True'"),
        ({"gae": True, "gae.bakend": "loop"}, r"rl_accel\.gae\.bakend \(did you mean rl_accel\.gae\.backend"),
        ({"gae.": True}, r"unknown key rl_accel\.gae\.;"),
        ({"auto": 1}, r"rl_accel\.auto wants bool, found 1 \(int\)"),
        (["gae"], r"rl_accel wants a mapping of flags, found \['gae'\] \(list\)"),
    ],
)
def test_a_wrong_flag_is_named(flags, message):
    with pytest.raises(ConfigError, match=message) as caught:
        resolve([("the source", flags)])
    assert str(caught.value).startswith("the source: ")


def test_the_environment_takes_inline_yaml_and_json_or_a_path_and_may_be_empty(tmp_path, monkeypatch):
    for text in ("gae: true", '{"gae": {"enable": true}}', "gae:\n  enable: true\n"):
        monkeypatch.setenv("RL_ACCEL_CONFIG", text)
        assert resolve([("test", read_environment())])[GAE].enable is True
    monkeypatch.setenv("RL_ACCEL_CONFIG", "{gae: true, gae.backend: numba}")
    flags = resolve([("test", read_environment())])[GAE]
    assert (flags.enable, flags.backend) == (True, "numba")
    for text in ("", "   "):
        monkeypatch.setenv("RL_ACCEL_CONFIG", text)
        assert read_environment() == {}
    path = tmp_path / "run 12:30" / "rl_accel.yaml"
    path.parent.mkdir()
    path.write_text("sampler: {enable: true}\n")
    monkeypatch.setenv("RL_ACCEL_CONFIG", str(path))
    assert read_environment() == {"sampler": {"enable": True}}
    assert read_names() == {}
    monkeypatch.setenv("RL_ACCEL", "gae, tail_batching,")
    assert read_names() == {"gae": True, "tail_batching": True}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/nowhere/rl_accel.yaml", "neither inline YAML nor a readable file"),
        ("gae: [unclosed", "not valid YAML or JSON"),
        ("{'a', 'b'", "not valid YAML or JSON"),
        ("gae: {enable: true}\ngae: {enable: false}", "not valid YAML or JSON: .* found duplicate key gae"),
        ("gae: ${oc.env:NOT_SET}", "rl_accel: .*Environment variable 'NOT_SET' not found"),
    ],
)
def test_an_unreadable_environment_is_an_error(text, message, monkeypatch):
    monkeypatch.setenv("RL_ACCEL_CONFIG", text)
    with pytest.raises(ConfigError, match=message) as error:
        read_environment()
    assert "\n" not in str(error.value)


@given(
    st.dictionaries(
        st.text(max_size=8) | st.sampled_from(["gae", "auto", "sampler"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=8), inner, max_size=2),
            max_leaves=4,
        ),
        max_size=3,
    )
)
def test_any_mapping_either_resolves_or_is_a_config_error(flags):
    try:
        config = resolve([("test", flags)])
    except ConfigError:
        return
    assert isinstance(config, Flags)


def test_a_flag_of_a_feature_that_nobody_turns_on_is_a_warning(clean_environment):
    line = "rl_accel.gae.backend has no effect without rl_accel.gae.enable"
    for section, others, warnings in (
        ({"backend": "numba"}, {}, (line,)),
        ({"backend": "numba"}, {"auto": True}, ()),
        ({"backend": "numba", "enable": True}, {}, ()),
        ({"backend": "numba", "enable": False}, {}, ()),
    ):
        assert resolve([("test", {"gae": section, **others})]).warnings == warnings
    env = {**clean_environment, "RL_ACCEL_CONFIG": "{gae: {backend: numba}}"}
    shown = subprocess.run([sys.executable, "-m", "rl_accel", "status"], env=env, capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (0, f"{line}\n")


def test_flags_that_contradict_each_other_are_told_with_their_sources():
    layers = [("a", {"reward_timeout": {"minimum": 50}}), ("b", {"gae": True})]
    with pytest.raises(ConfigError, match=r"^d: rl_accel.reward_timeout: maximum must be at least minimum = 50"):
        resolve([("d", {"reward_timeout": {"minimum": 50, "maximum": 40}}), ("b", {"gae": True})])
    with pytest.raises(ConfigError, match=r"^a and c: rl_accel.reward_timeout: "):
        resolve([*layers, ("c", {"reward_timeout": {"maximum": 40.0}})])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["profile", "x", "--no-picture", "--picture", "x"], "--picture has no effect with --no-picture"),
        (["plan", "x", "--other-seconds", 3], "--other-seconds has no effect with LOG"),
        (["doctor", "--platform", "cpu"], "--platform has no effect without --recipe"),
        (["slime-config", "--check", "x", "--enable", "gae"], "--enable has no effect with --check"),
        (["ab", "--report-only", HERE, "--steps", 3], "--steps has no effect with --report-only"),
        (["ab", "x", "--dry-run", "--resume"], "--resume has no effect with --dry-run"),
    ],
)
def test_an_option_without_effect_is_refused(invoke, words, said):
    assert said in invoke(cli, *words, code=2)
