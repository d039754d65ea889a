"""Fixtures that run code of slime itself, from the checkout SLIME_ROOT, with arguments from slime's own parser."""

import asyncio
import functools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

MODEL = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory) -> Path:
    """File with 120 prompts."""
    file = tmp_path_factory.mktemp("slime-data") / "prompts.jsonl"
    rows = [{"input": f"{i}x{i * 7}", "label": str(i), "metadata": {"row": i}} for i in range(120)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="session")
def router(slime_root) -> Iterator[Callable[..., str]]:
    """``router(url, ...)`` returns the address of a real sglang-router in front of these servers. Equal servers share a router."""
    from verl_on_cpu.sglang_servers import sglang_router

    with ExitStack() as routers:
        yield functools.cache(lambda *urls: routers.enter_context(sglang_router(urls)))


@pytest.fixture(scope="session")
def requests_on(slime_root) -> Callable[[str], int]:
    """``requests_on(url)`` returns the number of running and waiting requests on a server, as slime itself counts them."""
    from slime.backends.sglang_utils.server_control import num_requests_from_load

    return lambda url: num_requests_from_load(httpx.get(f"{url}/v1/loads", timeout=None).json())


@pytest.fixture
def start(router, model_folder, prompts_file, tmp_path) -> Callable[..., Any]:
    """``start(url, ..., **changes)`` returns the arguments, the data source and a function that makes rollouts, as in slime's
    RolloutManager, with a router before the servers. ``args.server`` is the first of them."""
    pytest.importorskip("sglang", reason="sglang, which slime's parser imports, is absent")

    def make(*urls: str, **changes: Any) -> Any:
        from slime.rollout.sglang_rollout import GenerateState
        from slime.utils.http_utils import init_http_client
        from slime.utils.misc import load_function
        from slime_parser import parsed

        GenerateState.clear_instances()  # it keeps the arguments of the run before
        args = parsed(router(*urls), model_folder, prompts_file, save=tmp_path / "checkpoints")
        usual = {"over_sampling_batch_size": 8, "num_rollout": 12, "rollout_num_engines": 1, "server": urls[0]}
        args.__dict__.update({**usual, **changes})
        init_http_client(args)
        data_source = load_function(args.data_source_path)(args)

        def rollout(rollout_id: int, evaluation: bool = False) -> Any:
            path = args.eval_function_path if evaluation and args.eval_function_path else args.rollout_function_path
            return load_function(path)(args, rollout_id, data_source, evaluation=evaluation)

        return args, data_source, rollout

    return make


@pytest.fixture
def end_grading(slime_root) -> Iterator[Callable[[], None]]:
    """``end_grading()`` ends all grader processes. It is also called after the test."""
    from rl_accel.integrations.slime.reward_timeout.rm_hook import OPEN

    def end() -> None:
        for loop, grading in list(OPEN.items()):
            asyncio.run_coroutine_threadsafe(grading.close(), loop).result(30)
        OPEN.clear()

    yield end
    end()


@pytest.fixture
def evaluation_of(slime_root) -> Callable[..., dict[str, Any]]:
    """``evaluation_of(file, **changes)`` returns slime's arguments for an evaluation on the prompts in ``file``."""

    def make(file: object, **changes: Any) -> dict[str, Any]:
        from slime.utils.eval_config import EvalDatasetConfig

        dataset = EvalDatasetConfig(name="few", path=str(file), n_samples_per_eval_prompt=1, input_key="input")
        usual = {"label_key": "label", "metadata_key": "metadata", "temperature": 1.0, "top_p": 1.0, "top_k": -1}
        dataset.__dict__.update({**usual, "max_response_len": 16, **changes})
        return {"eval_datasets": [dataset], "eval_max_prompt_len": None}

    return make


@pytest.fixture
def arguments_of(tmp_path):
    """``arguments_of(**changes)`` returns slime's arguments for a node with 4 GPUs, an engine on each, and a model with 4 heads."""
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "num_attention_heads": 4, "num_key_value_heads": 4}))

    def make(**changes):
        usual = {"rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 1, "num_gpus_per_node": 4}
        fixed = {"hf_checkpoint": str(tmp_path), "save": None, "sglang_config": None, "prefill_num_servers": None}
        return SimpleNamespace(**{**usual, **fixed, "sglang_pp_size": 1, "sglang_dp_size": 1, **changes})

    return make
