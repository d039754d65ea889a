"""verl's configuration as a run composes it, with the recipe's kind of model."""

import importlib.util
import json

import pytest
from omegaconf import OmegaConf

if importlib.util.find_spec("verl") is None:
    collect_ignore_glob = ["test_*.py"]

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
}


@pytest.fixture(scope="session")
def composed():
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer")


@pytest.fixture
def configure(composed, tmp_path):
    """``configure(**keys)``: 4 GPUs in a node, TP 1, a model of 4 heads on disk. ``__`` in a key stands for a dot."""

    def make(model=MODEL, **keys):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(model))
        config = composed.copy()
        given = {
            "trainer__n_gpus_per_node": 4,
            "trainer__default_local_dir": str(tmp_path / "checkpoints"),
            "actor_rollout_ref__model__path": str(folder),
            "actor_rollout_ref__rollout__name": "hf_cpu",
            "actor_rollout_ref__rollout__tensor_model_parallel_size": 1,
            **keys,
        }
        for key, value in given.items():
            OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
        return config

    return make
