"""GRPO, RLOO, OPO, GPG, Pass@k and REINFORCE++-baseline without their loops over responses.

GDPO calls GRPO through the module and is served by the same patch.
"""

import importlib
from typing import Any

import torch

from rl_accel.ops import outcome
from rl_accel.patches.verl._advantage import advantage_patch, ragged_batch


def _outside(rewards: Any, mask: Any, index: Any, **numbers: Any) -> Exception | None:
    for name, value in numbers.items():
        if not isinstance(value, int | float):
            return TypeError(f"{name}: wanted a number, found {type(value).__name__}")
    return outcome.unsupported(rewards, mask, index)


def _twice(found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return found, found


def _grpo(
    token_level_rewards: Any,
    response_mask: Any,
    index: Any,
    epsilon: Any = 1e-6,
    norm_adv_by_std_in_grpo: Any = True,
    config: Any = None,
) -> Any:
    arguments = (token_level_rewards, response_mask, index)
    return _outside(*arguments, epsilon=epsilon) or _twice(
        outcome.grpo(*arguments, epsilon, bool(norm_adv_by_std_in_grpo))
    )


def _rloo(
    token_level_rewards: Any, response_mask: Any, index: Any, epsilon: Any = 1e-6, config: Any = None, **kwargs: Any
) -> Any:
    arguments = (token_level_rewards, response_mask, index)
    return _outside(*arguments) or _twice(outcome.rloo(*arguments))


def _opo(
    token_level_rewards: Any, response_mask: Any, index: Any, epsilon: Any = 1e-6, config: Any = None, **kwargs: Any
) -> Any:
    arguments = (token_level_rewards, response_mask, index)
    return _outside(*arguments) or _twice(outcome.opo(*arguments))


def _gpg(
    token_level_rewards: Any,
    response_mask: Any,
    index: Any,
    epsilon: Any = 1e-6,
    f_norm: Any = 1.0,
    alpha: Any = 1.0,
    config: Any = None,
    **kwargs: Any,
) -> Any:
    arguments = (token_level_rewards, response_mask, index)
    return _outside(*arguments, f_norm=f_norm) or _twice(outcome.gpg(*arguments, f_norm))


def _passk(
    token_level_rewards: Any,
    response_mask: Any,
    index: Any,
    epsilon: Any = 1e-6,
    norm_adv_by_std_in_grpo: Any = True,
    config: Any = None,
    **kwargs: Any,
) -> Any:
    arguments = (token_level_rewards, response_mask, index)
    error = _outside(*arguments, epsilon=epsilon)
    if error is None and config is None:
        error = TypeError("config: wanted one, found None")
    if error is not None:
        return error
    try:
        return _twice(outcome.passk(*arguments, epsilon, bool(config.get("norm_adv_by_std_in_grpo", True))))
    except ValueError as lone_response:
        return lone_response


def _reinforce_plus_plus_baseline(
    token_level_rewards: Any, response_mask: Any, index: Any, epsilon: Any = 1e-6, config: Any = None, **kwargs: Any
) -> Any:
    error = _outside(token_level_rewards, response_mask, index)
    if error is not None:
        return error
    whiten = importlib.import_module("verl.utils.torch_functional").masked_whiten
    return _twice(whiten(outcome.centred(token_level_rewards, response_mask, index), response_mask) * response_mask)


_COMMON = ("token_level_rewards", "response_mask", "index", "epsilon")

SWITCHES = (
    advantage_patch(
        "grpo",
        "compute_grpo_outcome_advantage",
        params=(*_COMMON, "norm_adv_by_std_in_grpo", "config"),
        fast=_grpo,
        fingerprints=("0d59272e72f0d3755cf57f03e942f125265e12be71df5a72d8ec52086756e5ed",),
        probe_arguments=ragged_batch,
    ),
    advantage_patch(
        "rloo",
        "compute_rloo_outcome_advantage",
        params=(*_COMMON, "config", "kwargs"),
        fast=_rloo,
        fingerprints=("d07c650d96e7f8e8d325c012d143c0c23322575a0ff8bacf0403ff38f01a0e65",),
        probe_arguments=ragged_batch,
    ),
    advantage_patch(
        "opo",
        "compute_opo_outcome_advantage",
        params=(*_COMMON, "config", "kwargs"),
        fast=_opo,
        fingerprints=("59329d41d9f0ce8f6af0bde44fe6eac419cb679abf45a337a2a1a7b1dcf4cae0",),
        probe_arguments=ragged_batch,
    ),
    advantage_patch(
        "gpg",
        "compute_gpg_outcome_advantage",
        params=(*_COMMON, "f_norm", "alpha", "config", "kwargs"),
        fast=_gpg,
        fingerprints=("5dbb2121684cc1ef1b46f240f701e801788eca9d452318c6546d8c308a38e579",),
        probe_arguments=ragged_batch,
    ),
    advantage_patch(
        "grpo_passk",
        "compute_grpo_passk_outcome_advantage",
        params=(*_COMMON, "norm_adv_by_std_in_grpo", "config", "kwargs"),
        fast=_passk,
        fingerprints=("d72fb9c45521e9393a9cc1bd689b99f76e1fddb6461a06d225e2d84d446ee981",),
        probe_arguments=lambda: {**ragged_batch(), "config": {}},
    ),
    advantage_patch(
        "reinforce_plus_plus_baseline",
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
        params=(*_COMMON, "config", "kwargs"),
        fast=_reinforce_plus_plus_baseline,
        fingerprints=("b2a6a1a6af4e0f7cc0e6d7e251ae4bd22997f9dee982b1f90a794b2d9443a4f4",),
        probe_arguments=ragged_batch,
    ),
)
