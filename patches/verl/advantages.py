"""Bit-identical replacements of verl's advantage estimators, without loops over responses or tokens.

Covers GRPO (which GDPO also uses), RLOO, OPO, GPG, Pass@k, both variants of REINFORCE++, both optimal token baselines, and the
function ``masked_whiten`` that GAE, GDPO and REINFORCE++ call. Each replaced function has a separate patch. If a patch does not
fit the installed verl, the other patches stay on.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from rl_accel import ops
from rl_accel.ops import group_advantages, whiten
from rl_accel.patches.parity import require_agreement, with_fallback
from rl_accel.patches.patch import Patch

FEATURE = "advantages"
_CORE_ALGOS = "verl.trainer.ppo.core_algos"
_TORCH_FUNCTIONAL = "verl.utils.torch_functional"
_OUTCOME = ("token_level_rewards", "response_mask", "index")
_TOKEN_BASELINE = (
    *_OUTCOME,
    *("old_log_probs", "sum_pi_squared", "rollout_is_weights", "handle_zero_tail", "epsilon"),
)

Arguments = Mapping[str, Any]
"""Mapping from parameter name to argument for one call of verl's estimator function, including default values."""


# -- Our estimators return advantages, or advantages and returns. After TypeError or ValueError, verl's function is called.


def _of_groups(rule: Callable[..., torch.Tensor], given: Arguments, **options: Any) -> torch.Tensor:
    for name, value in options.items():
        if not isinstance(value, int | float):
            raise TypeError(f"{name} wants a number, found {type(value).__name__}")
    return rule(*(given[name] for name in _OUTCOME), **options)


def _grpo(given: Arguments) -> torch.Tensor:
    normalise = bool(given["norm_adv_by_std_in_grpo"])
    return _of_groups(group_advantages.grpo, given, epsilon=given["epsilon"], normalise=normalise)


def _gpg(given: Arguments) -> torch.Tensor:
    return _of_groups(group_advantages.gpg, given, f_norm=given["f_norm"])


def _passk(given: Arguments) -> torch.Tensor:
    if given["config"] is None:
        raise TypeError("config wants the configuration of the algorithm, found None")
    normalise = bool(given["config"].get("norm_adv_by_std_in_grpo", True))
    return _of_groups(group_advantages.passk, given, epsilon=given["epsilon"], normalise=normalise)


def _reinforce_plus_plus_baseline(given: Arguments) -> torch.Tensor:
    centred = _of_groups(group_advantages.grpo, given, normalise=False)
    return _whiten(centred, given["response_mask"])


def _reinforce_plus_plus(given: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    rewards, mask, gamma = given["token_level_rewards"], given["response_mask"], getattr(given["config"], "gamma", None)
    if not isinstance(gamma, float):
        raise TypeError(f"config.gamma wants a float, found {gamma!r}")
    whiten.check(rewards, mask)
    if rewards.dtype != torch.float32 or rewards.ndim != 2:
        raise TypeError("token_level_rewards wants float32 [B, T]")
    returns = ops.discounted_returns(rewards, mask, gamma, backend="numba")
    return _whiten(returns, mask), returns


def _whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    whitened: torch.Tensor = importlib.import_module(_TORCH_FUNCTIONAL).masked_whiten(values, mask)
    return whitened * mask


def _optimal_token_baseline(given: Arguments, *, multi_turn: bool) -> tuple[torch.Tensor, torch.Tensor]:
    # imported here because the import loads a compiler, which runs with other estimators do not need
    from rl_accel.ops.optimal_token_baseline import optimal_token_baseline

    return optimal_token_baseline(*(given[name] for name in _TOKEN_BASELINE), multi_turn=multi_turn)


# -- the patches -------------------------------------------------------------------------------------------------------


def _batch(*names: str) -> dict[str, Any]:
    """Returns random arguments of a small batch for those parameters in ``names`` that are part of a batch.

    Prompt groups differ in size. Response masks differ in length and have zeros between ones.
    """
    random = np.random.RandomState(0)
    index = np.array([f"prompt-{n}" for n in np.repeat(np.arange(6), (2, 3, 4, 5, 8, 9))], dtype=object)
    random.shuffle(index)
    shape = rows, tokens = len(index), 11
    mask = (np.arange(tokens) < random.randint(1, tokens + 1, (rows, 1))) & (random.rand(*shape) < 0.8)
    batch: dict[str, Any] = {
        "token_level_rewards": torch.from_numpy(random.randn(*shape)).float(),
        "response_mask": torch.from_numpy(mask).long(),
        "index": index,
        "old_log_probs": torch.from_numpy(-random.rand(*shape)).float(),
        "sum_pi_squared": torch.from_numpy(random.rand(*shape)).float(),
        "rollout_is_weights": torch.from_numpy(random.rand(*shape)).float(),
    }
    if "config" in names:
        from omegaconf import OmegaConf

        batch["config"] = OmegaConf.create({"gamma": 0.97})
    return {name: batch[name] for name in names if name in batch}


def _estimator(
    name: str,
    ours: Callable[[Arguments], torch.Tensor | tuple[torch.Tensor, torch.Tensor]],
    params: tuple[str, ...],
    fingerprint: str,
    function: str = "compute_{name}_outcome_advantage",
    supports: str = "verl>=0.6.1",
) -> Patch:
    """Returns the patch that replaces verl's ``function`` of the advantage estimator ``name``, in verl's module and registry.

    ``ours`` maps the arguments of a call to advantages, or to advantages and returns. For the rest see :class:`Patch`.
    """

    def make(original: Any, _settings: Any) -> Any:
        signature = inspect.signature(original)

        def estimator(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            advantages = ours(bound.arguments)
            return advantages if isinstance(advantages, tuple) else (advantages, advantages)

        return with_fallback(estimator, original, FEATURE)

    def probe(original: Any, replacement: Any, _settings: Any) -> None:
        require_agreement(original, replacement, _batch(*params))

    return Patch(
        name=f"verl.{name}",
        target=f"{_CORE_ALGOS}:{function.format(name=name)}",
        bindings=(f"{_CORE_ALGOS}:ADV_ESTIMATOR_REGISTRY[{name}]",),
        supports=supports,
        params=params,
        make=make,
        fingerprints=(fingerprint,),
        probe=probe,
        no_seam="register_adv_est refuses a second function under the name of a stock estimator",
        upstream="https://github.com/verl-project/verl/pull/4677",
        remove_when="verl's own estimators have no loop over responses",
        independent=True,
    )


def _probe_whiten(original: Any, replacement: Any, _settings: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(13, 37, generator=generator)
    mask = (torch.rand(13, 37, generator=generator) < 0.6).long()
    values[mask == 0] *= 1e6
    for shift_mean in (True, False):
        require_agreement(original, replacement, {"values": values, "mask": mask, "shift_mean": shift_mean})


SWITCHES = (
    _estimator(
        "grpo",
        _grpo,
        (*_OUTCOME, "epsilon", "norm_adv_by_std_in_grpo", "config"),
        "0d59272e72f0d3755cf57f03e942f125265e12be71df5a72d8ec52086756e5ed",
    ),
    _estimator(
        "rloo",
        partial(_of_groups, group_advantages.rloo),
        (*_OUTCOME, "epsilon", "config", "kwargs"),
        "d07c650d96e7f8e8d325c012d143c0c23322575a0ff8bacf0403ff38f01a0e65",
    ),
    _estimator(
        "opo",
        partial(_of_groups, group_advantages.opo),
        (*_OUTCOME, "epsilon", "config", "kwargs"),
        "59329d41d9f0ce8f6af0bde44fe6eac419cb679abf45a337a2a1a7b1dcf4cae0",
    ),
    _estimator(
        "gpg",
        _gpg,
        (*_OUTCOME, "epsilon", "f_norm", "alpha", "config", "kwargs"),
        "5dbb2121684cc1ef1b46f240f701e801788eca9d452318c6546d8c308a38e579",
    ),
    _estimator(
        "grpo_passk",
        _passk,
        (*_OUTCOME, "epsilon", "norm_adv_by_std_in_grpo", "config", "kwargs"),
        "d72fb9c45521e9393a9cc1bd689b99f76e1fddb6461a06d225e2d84d446ee981",
    ),
    _estimator(
        "reinforce_plus_plus_baseline",
        _reinforce_plus_plus_baseline,
        (*_OUTCOME, "epsilon", "config", "kwargs"),
        "b2a6a1a6af4e0f7cc0e6d7e251ae4bd22997f9dee982b1f90a794b2d9443a4f4",
    ),
    _estimator(
        "reinforce_plus_plus",
        _reinforce_plus_plus,
        ("token_level_rewards", "response_mask", "config", "kwargs"),
        "627e73b6f89bdcdbfafd35290a4ef3299368694855765bd8592870ef4ffb2c26",
        supports="verl>=0.9",  # before 0.9, a masked token ended the running return instead of being skipped
    ),
    _estimator(
        "optimal_token_baseline",
        partial(_optimal_token_baseline, multi_turn=False),
        (*_TOKEN_BASELINE, "kwargs"),
        "e430df5dbd434464d1a1c85f885d3da0ee0c6a9ae09530ac0c1bb5d8ac8868e1",
        function="compute_optimal_token_baseline_advantage",
        supports="verl>=0.8",
    ),
    _estimator(
        "tir_optimal_token_baseline",
        partial(_optimal_token_baseline, multi_turn=True),
        (*_TOKEN_BASELINE, "kwargs"),
        "ded98e6666f7310a78b2d4b9d7e69c6f84174126b5d83b416eadc579e5677073",
        function="compute_multi_turn_optimal_token_baseline_advantage",
        supports="verl>=0.8",
    ),
    Patch(
        name="verl.masked_whiten",
        target=f"{_TORCH_FUNCTIONAL}:masked_whiten",
        supports="verl>=0.6.1",
        params=("values", "mask", "shift_mean"),
        make=lambda original, _settings: with_fallback(whiten.masked_whiten, original, FEATURE),
        fingerprints=("ed90007825688c5bed7cbf25d02293eeedd7bc7785da816e2f4fa3b75c6ed6e0",),
        probe=_probe_whiten,
        no_seam="a utility function: verl has no switch or registry for it",
        upstream="https://github.com/verl-project/verl/pull/4677",
        remove_when="verl computes the mean once",
        independent=True,
    ),
)
