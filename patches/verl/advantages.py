"""Bit-identical replacements of verl's REINFORCE++ estimator, whose loop over tokens is serial, and of ``masked_whiten``.

GAE, GDPO and both variants of REINFORCE++ end with ``masked_whiten``. Each replaced function has a separate patch. If a patch does
not fit the installed verl, the other patch stays on.
"""

import importlib
from typing import Any

import torch
from omegaconf import OmegaConf

from rl_accel import ops
from rl_accel.ops import whiten
from rl_accel.patches.parity import require_agreement, with_fallback
from rl_accel.patches.patch import Patch

FEATURE = "advantages"
_CORE_ALGOS = "verl.trainer.ppo.core_algos"
_TORCH_FUNCTIONAL = "verl.utils.torch_functional"


def _make_reinforce_plus_plus(original: Any, _settings: Any) -> Any:
    def estimator(
        token_level_rewards: torch.Tensor, response_mask: torch.Tensor, config: Any = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gamma = getattr(config, "gamma", None)
        if not isinstance(gamma, float) and type(gamma) is not int:  # algorithm.gamma=1 on a command line is an int
            raise TypeError(f"config.gamma wants a number, found {gamma!r}")
        whiten.require_supported(token_level_rewards, response_mask)
        if token_level_rewards.dtype != torch.float32 or token_level_rewards.ndim != 2:
            raise TypeError("token_level_rewards wants float32 [B, T]")
        returns = ops.discounted_returns(token_level_rewards, response_mask, gamma, backend="numba")
        whitened = importlib.import_module(_TORCH_FUNCTIONAL).masked_whiten(returns, response_mask)
        return whitened * response_mask, returns

    return with_fallback(estimator, original, FEATURE)


def _probe_reinforce_plus_plus(original: Any, replacement: Any, _settings: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(31, 11, generator=generator)
    inside = torch.arange(11) < torch.randint(12, (31, 1), generator=generator)
    inside[0] = False
    holes = torch.rand(31, 11, generator=generator) < 0.4
    for mask in (inside.long(), (inside & ~holes).long()):
        for gamma in (1.0, 0.97, 0.0):
            config = OmegaConf.create({"gamma": gamma})
            arguments = {"token_level_rewards": rewards, "response_mask": mask, "config": config}
            require_agreement(original, replacement, arguments)


def _probe_whiten(original: Any, replacement: Any, _settings: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(13, 37, generator=generator)
    mask = (torch.rand(13, 37, generator=generator) < 0.6).long()
    values[mask == 0] *= 1e6
    for shift_mean in (True, False):
        require_agreement(original, replacement, {"values": values, "mask": mask, "shift_mean": shift_mean})


SWITCHES = (
    Patch(
        name="verl.reinforce_plus_plus",
        target=f"{_CORE_ALGOS}:compute_reinforce_plus_plus_outcome_advantage",
        bindings=(f"{_CORE_ALGOS}:ADV_ESTIMATOR_REGISTRY[reinforce_plus_plus]",),
        supports="verl>=0.9",  # before 0.9, a masked token ended the running return instead of being skipped
        params=("token_level_rewards", "response_mask", "config", "kwargs"),
        make=_make_reinforce_plus_plus,
        probe=_probe_reinforce_plus_plus,
        no_seam="register_adv_est refuses a second function under the name of a stock estimator",
        upstream="https://github.com/verl-project/verl/pull/4677",
        remove_when="verl's own estimator has no loop over tokens",
        independent=True,
    ),
    Patch(
        name="verl.masked_whiten",
        target=f"{_TORCH_FUNCTIONAL}:masked_whiten",
        supports="verl>=0.6.1",
        params=("values", "mask", "shift_mean"),
        make=lambda original, _settings: with_fallback(whiten.masked_whiten, original, FEATURE),
        probe=_probe_whiten,
        no_seam="a utility function: verl has no switch or registry for it",
        upstream="https://github.com/verl-project/verl/pull/4677",
        remove_when="verl computes the mean once",
        independent=True,
    ),
)
