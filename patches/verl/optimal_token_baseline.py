"""Optimal token baseline, single-turn and multi-turn (TIR), in two compiled passes instead of a dozen torch ones."""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from rl_accel.patches.verl._advantage import advantage_patch, ragged_batch


def _fast(multi_turn: bool) -> Callable[..., Any]:
    def fast(
        token_level_rewards: Any,
        response_mask: Any,
        index: Any,
        old_log_probs: Any,
        sum_pi_squared: Any,
        rollout_is_weights: Any = None,
        handle_zero_tail: Any = True,
        epsilon: Any = 1e-8,
        **kwargs: Any,
    ) -> Any:
        # imported here: it loads the compiler, and runs that use another estimator never need it
        ops = importlib.import_module("rl_accel.ops.optimal_token_baseline")
        tensors = (token_level_rewards, response_mask, index, old_log_probs, sum_pi_squared, rollout_is_weights)
        error = ops.unsupported(*tensors)
        if error is None and not isinstance(epsilon, float):
            error = TypeError(f"epsilon: wanted a float, found {type(epsilon).__name__}")
        return error or ops.optimal_token_baseline(*tensors, bool(handle_zero_tail), epsilon, multi_turn=multi_turn)

    return fast


def _batch() -> dict[str, Any]:
    batch = ragged_batch()
    shape = batch["response_mask"].shape
    generator = torch.Generator().manual_seed(0)
    names = ("old_log_probs", "sum_pi_squared", "rollout_is_weights")
    random = {name: torch.rand(shape, generator=generator) for name in names}
    return {**batch, **random, "old_log_probs": -random["old_log_probs"]}


_PARAMS = (
    "token_level_rewards",
    "response_mask",
    "index",
    "old_log_probs",
    "sum_pi_squared",
    "rollout_is_weights",
    "handle_zero_tail",
    "epsilon",
    "kwargs",
)

SWITCHES = (
    advantage_patch(
        "optimal_token_baseline",
        "compute_optimal_token_baseline_advantage",
        params=_PARAMS,
        fast=_fast(multi_turn=False),
        fingerprints=("e430df5dbd434464d1a1c85f885d3da0ee0c6a9ae09530ac0c1bb5d8ac8868e1",),
        probe_arguments=_batch,
    ),
    advantage_patch(
        "tir_optimal_token_baseline",
        "compute_multi_turn_optimal_token_baseline_advantage",
        params=_PARAMS,
        fast=_fast(multi_turn=True),
        fingerprints=("ded98e6666f7310a78b2d4b9d7e69c6f84174126b5d83b416eadc579e5677073",),
        probe_arguments=_batch,
    ),
)
