"""Replaces slime's computation of REINFORCE++ returns by one fused scan over the unpadded sequences."""

from collections.abc import Sequence
from typing import Any

import torch

from rl_accel import ops
from rl_accel.ops.scan import cu_seqlens_of
from rl_accel.patches.parity import with_fallback
from rl_accel.patches.patch import Patch
from rl_accel.patches.slime import packed

_NAME = "get_reinforce_plus_plus_returns"
_PARAMS = ("rewards", "kl", "loss_masks", "response_lengths", "total_lengths", "kl_coef", "gamma")


def packed_returns(
    rewards: torch.Tensor, kl: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], kl_coef: float, gamma: float
) -> list[torch.Tensor]:
    """Computes REINFORCE++ returns (discounted) of whole responses. Returns one tensor [length] per sequence.

    The reward of a token is ``-kl_coef * kl * mask``. The last token with a non-zero mask also gets the reward of the sequence.

    Args:
        rewards: rewards [S], one per sequence.
        kl: KL per token, one tensor [length] per sequence.
        masks: same shapes as ``kl``. 0: the token has no reward. The returns accumulate over all tokens, as in slime.

    Raises:
        AssertionError: a sequence has no token with a non-zero mask; same message as slime's.
        TypeError, ValueError, BackendMissing: see :func:`rl_accel.ops.discounted_returns`; ValueError also for unequal lengths.
    """
    lengths, mask_lengths = [len(row) for row in kl], [len(row) for row in masks]
    if mask_lengths != lengths or len(rewards) != len(lengths):
        raise ValueError(f"{len(rewards)} rewards and masks of {mask_lengths} do not go with sequences of {lengths}")
    flat_kl = torch.cat(list(kl))
    mask = torch.cat(list(masks)).to(flat_kl.device)
    sequence = torch.repeat_interleave(
        torch.arange(len(lengths), device=flat_kl.device), torch.tensor(lengths, device=flat_kl.device)
    )
    position = torch.arange(len(flat_kl), device=flat_kl.device)
    last = torch.full((len(lengths),), -1, device=flat_kl.device).scatter_reduce(
        0, sequence, torch.where(mask != 0, position, -1), "amax"
    )
    masked = (last < 0).nonzero()
    if len(masked):
        raise AssertionError(f"Sequence at index {int(masked[0])} is fully masked.")
    token_rewards = -kl_coef * (flat_kl * mask)
    token_rewards[last] += rewards.to(token_rewards)
    returns = ops.discounted_returns(token_rewards, None, gamma, cu_seqlens=cu_seqlens_of(lengths))
    return list(torch.split(returns, lengths))


def _make(original: Any, _settings: Any) -> Any:
    def get_reinforce_plus_plus_returns(
        rewards: Any, kl: Any, loss_masks: Any, response_lengths: Any, total_lengths: Any, kl_coef: Any, gamma: Any
    ) -> Any:
        if not len(rewards):
            return []
        totals, lengths = [int(n) for n in total_lengths], [int(n) for n in response_lengths]

        def compute(kl: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
            return [packed_returns(rewards, kl, loss_masks, kl_coef, gamma)]

        return packed.on_whole_responses(compute, (kl,), totals, lengths)[0]

    return with_fallback(get_reinforce_plus_plus_returns, original, "advantages")


def _probe(original: Any, _replacement: Any, _settings: Any) -> None:
    random = torch.Generator().manual_seed(0)
    kl = [torch.rand(length, generator=random) for length in packed.PROBE_LENGTHS]
    masks = [torch.ones(length, dtype=torch.int) for length in packed.PROBE_LENGTHS]
    masks[0][100:] = masks[2][::3] = 0
    rewards = torch.randn(len(kl), generator=random)
    token_rewards = [-0.1 * row * mask for row, mask in zip(kl, masks, strict=True)]
    for row, mask, reward in zip(token_rewards, masks, rewards, strict=True):
        row[int(mask.nonzero()[-1])] += reward

    def ours(gamma: float) -> list[torch.Tensor]:
        return [torch.cat(packed_returns(rewards, kl, masks, 0.1, gamma))]

    arguments = [{"gamma": gamma} for gamma in (1.0, 0.97, 0.0)]
    packed.require_equal_scan(original, "chunked_discounted_returns", (token_rewards,), ours, arguments)


SWITCHES = (
    Patch(
        name="slime.reinforce_plus_plus",
        target=f"{packed.LOSS}:{_NAME}",
        bindings=(f"{packed.PPO_UTILS}:{_NAME}",),
        params=_PARAMS,
        make=_make,
        fingerprints=("3440ff4207a8f05cded7ccc2f33382a5167e0e7281f8d0ffa489c2c64813712a",),
        probe=_probe,
        no_seam="--custom-advantage-function-path replaces the whole branch, the computation of token rewards included",
        remove_when="slime computes returns of packed samples without padding",
    ),
)
