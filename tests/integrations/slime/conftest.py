"""slime itself, where SLIME_ROOT names a checkout, and arguments as its parser would leave them."""

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SLIME_ROOT = os.environ.get("SLIME_ROOT", "")


@pytest.fixture(scope="session")
def slime_root() -> Path:
    """The checkout of slime; tests that need it are skipped without. It is importable from then on."""
    if not SLIME_ROOT:
        pytest.skip("slime itself is absent: SLIME_ROOT names no checkout of it")
    for folder in (SLIME_ROOT, str(Path(__file__).with_name("plugins"))):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return Path(SLIME_ROOT)


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory) -> Path:
    """120 prompts; every third is of domain "code"."""
    file = tmp_path_factory.mktemp("slime-data") / "prompts.jsonl"
    rows = [
        {
            "input": f"{i}x{i * 7}",
            "label": str(i),
            "metadata": {"row": i, "kind": "code" if i % 3 == 0 else "math"},
        }
        for i in range(120)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="session")
def router(slime_root) -> Iterator[Callable[..., str]]:
    """``router(url, ...)`` returns the address of a real sglang-router before those servers; the same servers have one."""
    from rl_accel.lab.cpu_engine.router import sglang_router

    with ExitStack() as routers:
        yield functools.cache(lambda *urls: routers.enter_context(sglang_router(urls)))


@pytest.fixture
def slime_args(router, model_folder, prompts_file, tmp_path) -> Callable[..., Any]:
    """``slime_args(url, ..., **changes)``: everything slime's rollout code reads, as its own argument parser would leave it, with a
    router before the servers.
    """
    from rl_accel.features import TAIL_BATCHING

    def make(*urls: str, **changes: Any) -> Any:
        host, port = router(*urls).removeprefix("http://").split(":")
        defaults: dict[str, Any] = {
            "server": urls[0],  # for the tests; slime knows the router only
            "hf_checkpoint": str(model_folder),
            "sglang_router_ip": host,
            "sglang_router_port": int(port),
            "sglang_server_concurrency": 512,
            "rollout_num_engines": 1,
            "sglang_dp_size": 1,
            "use_distributed_post": False,
            "rollout_temperature": 1.0,
            "rollout_top_p": 1.0,
            "rollout_top_k": -1,
            "rollout_max_response_len": 128,
            "rollout_stop": None,
            "rollout_stop_token_ids": None,
            "rollout_skip_special_tokens": True,
            "rollout_global_dataset": True,
            "prompt_data": str(prompts_file),
            "dump_details": None,
            "rollout_max_prompt_len": None,
            "input_key": "input",
            "label_key": "label",
            "multimodal_keys": None,
            "metadata_key": "metadata",
            "tool_key": None,
            "apply_chat_template": False,
            "apply_chat_template_kwargs": {},
            "rollout_seed": 42,
            "rollout_shuffle": True,
            "n_samples_per_prompt": 4,
            "rollout_batch_size": 8,
            "over_sampling_batch_size": 8,
            "buffer_filter_path": None,
            "dynamic_sampling_filter_path": None,
            "rollout_sample_filter_path": None,
            "rollout_all_samples_process_path": None,
            "rollout_sample_hook_path": [],
            "partial_rollout": False,
            "mask_offpolicy_in_partial_rollout": False,
            "custom_generate_function_path": None,
            "custom_rm_path": "slime_test_plugins.score",
            "rm_type": None,
            "log_reward_category": None,
            "group_rm": False,
            "reward_key": None,
            "eval_reward_key": None,
            "ci_test": False,
            "use_rollout_routing_replay": False,
            "router_policy": None,
            "load": None,
            "save": str(tmp_path / "checkpoints"),
            "num_rollout": 12,
            "num_epoch": None,
            **TAIL_BATCHING.slime.arguments,
            "rl_accel": {"tail_batching": True},
        }
        args = SimpleNamespace(**{**defaults, **changes})
        from slime.utils.http_utils import init_http_client

        init_http_client(args)
        return args

    return make


MODEL = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}


@pytest.fixture
def arguments_of(tmp_path):
    """``arguments_of(**changes)``: 4 GPUs in a node, an engine on each, a model of 4 heads on disk."""
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "num_attention_heads": 4, "num_key_value_heads": 4}))

    def make(**changes):
        usual = {"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 1, "num_gpus_per_node": 4}
        fixed = {"hf_checkpoint": str(tmp_path), "save": None, "sglang_config": None, "prefill_num_servers": None}
        return SimpleNamespace(**{**usual, **fixed, "sglang_pp_size": 1, "sglang_dp_size": 1, **changes})

    return make
