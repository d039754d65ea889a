"""Fixtures that make responses with real tokens, and a RewardTimeoutManager with a reward function of the test."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transformers import AutoTokenizer
from verl.experimental.reward_loop.reward_manager.limited import RateLimitedRewardManager
from verl.protocol import DataProto
from verl.trainer.ppo.reward import load_reward_manager

import rl_accel
from rl_accel.features import REWARD_TIMEOUT
from rl_accel.integrations.verl.reward_timeout import wire
from rl_accel.integrations.verl.reward_worker_proxy import VALIDATION
from rl_accel.patches.verl.verl_run import VerlRun
from rl_accel.runtime import RUNTIME


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture
def configure(configured: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """``configure(source, flags, keys)`` returns verl's configuration with ``source`` as reward function."""

    def make(source: str | None = None, flags: Any = (), keys: Any = ()) -> Any:
        given = {"trainer.default_local_dir": str(tmp_path / "checkpoints")}
        if source is not None:
            module = tmp_path / "graded.py"
            module.write_text(source)
            given["reward.custom_reward_function.path"] = str(module)
        config = configured({**given, **dict(keys)})
        rl_accel.enable(reward_timeout=dict(flags))  # the manager reads its flags from there
        wire(VerlRun(config, in_driver=True), RUNTIME.flags_of(REWARD_TIMEOUT))
        return config

    return make


@pytest.fixture
def manager_of(tokenizer: Any) -> Callable[[Any], Any]:
    """``manager_of(config)`` returns the reward manager that verl itself loads for ``config``."""
    return lambda config: load_reward_manager(config, tokenizer)


@pytest.fixture
def responses(tokenizer: Any) -> Callable[..., list[Any]]:
    """``responses("a", "b", ground_truth=..., **columns)`` returns one DataProto per text, as agent loops send them."""

    def make(*texts: str, ground_truth: Any = "7", validation: bool = False, **columns: Any) -> list[Any]:
        results = []
        for text in texts:
            prompt = torch.tensor([tokenizer.encode("q1", add_special_tokens=False)])
            answer = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
            whole = torch.cat([prompt, answer], dim=1)
            tensors = {"prompts": prompt, "responses": answer, "input_ids": whole}
            batch = TensorDict({**tensors, "attention_mask": torch.ones_like(whole)}, batch_size=1)
            row = {"data_source": "test", "extra_info": {"index": 0}, "uid": "u", "__num_turns__": 2}
            row |= {"reward_model": {"style": "rule", "ground_truth": ground_truth}, "tool_extra_fields": {}}
            row |= {"raw_prompt": [{"role": "user", "content": "q1"}], **columns}
            row |= {VALIDATION: True} if validation else {}
            arrays = {name: np.empty(1, dtype=object) for name in row}
            for name, value in row.items():
                arrays[name][0] = value
            results.append(DataProto(batch=batch, non_tensor_batch=arrays))
        return results

    return make


@pytest.fixture
def score(manager_of: Callable[[Any], Any]) -> Callable[..., list[Any]]:
    """``score(manager or config, data)`` scores all ``data`` at once. Returns the manager's result or exception for each."""

    def run(manager: Any, data: list[Any]) -> list[Any]:
        if not hasattr(manager, "run_single"):
            manager = manager_of(manager)

        async def all_of_them() -> list[dict[str, Any]]:
            RateLimitedRewardManager._semaphore = asyncio.Semaphore(1)  # the class's own belongs to the first loop
            manager.loop = asyncio.get_running_loop()  # verl's managers are made in the loop of their actor
            if hasattr(manager, "held"):
                manager.held.loop = manager.loop
            try:
                asked = (manager.run_single(item) for item in data)
                return list(await asyncio.gather(*asked, return_exceptions=True))
            finally:
                if hasattr(manager, "held"):
                    await manager.close()

        return asyncio.run(all_of_them())

    return run
