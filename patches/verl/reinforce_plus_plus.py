"""REINFORCE++ returns as one scan over time instead of a Python loop over tokens."""

import importlib
from typing import Any

import torch

from rl_accel import ops
from rl_accel.ops import whiten
from rl_accel.ops.workers import default_threads
from rl_accel.patches.verl._advantage import advantage_patch, ragged_batch


def _fast(token_level_rewards: Any, response_mask: Any, config: Any = None, **kwargs: Any) -> Any:
    gamma = getattr(config, "gamma", None)
    if not isinstance(gamma, float) or not 0 <= gamma <= 1:
        return ValueError(f"gamma: wanted a float in [0, 1], found {gamma!r}")
    error = whiten.unsupported(token_level_rewards, response_mask)
    if error is None and (token_level_rewards.dtype != torch.float32 or token_level_rewards.ndim != 2):
        error = TypeError("token_level_rewards: wanted float32 [B, T]")
    if error is not None:
        return error
    # a row that is cut in time among threads is rounded elsewhere: never more threads than rows
    threads = min(len(token_level_rewards), default_threads())
    returns = ops.discounted_returns(token_level_rewards, response_mask, gamma, backend="numba", num_threads=threads)
    masked_whiten = importlib.import_module("verl.utils.torch_functional").masked_whiten
    return masked_whiten(returns, response_mask) * response_mask, returns


def _batch() -> dict[str, Any]:
    from omegaconf import OmegaConf

    batch = ragged_batch()
    del batch["index"]
    return {**batch, "config": OmegaConf.create({"gamma": 0.97})}


SWITCHES = (
    advantage_patch(
        "reinforce_plus_plus",
        "compute_reinforce_plus_plus_outcome_advantage",
        params=("token_level_rewards", "response_mask", "config", "kwargs"),
        fast=_fast,
        fingerprints=("627e73b6f89bdcdbfafd35290a4ef3299368694855765bd8592870ef4ffb2c26",),
        probe_arguments=_batch,
    ),
)
