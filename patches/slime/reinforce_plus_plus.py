"""Replaces slime's computation of REINFORCE++ returns by one fused scan over the unpadded sequences.

slime's own function is called for batches with an empty or fully masked response, and where a result is NaN or infinite.
"""

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
        TypeError, ValueError, BackendMissing: see :func:`rl_accel.ops.discounted_returns`; ValueError also for unequal lengths, for
            a sequence whose mask has only zeros, and for a result with NaN or infinity.
    """
    lengths = [len(row) for row in kl]
    mask_lengths = [len(row) for row in masks]
    if not lengths or mask_lengths != lengths or len(rewards) != len(lengths):
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
    if (last < 0).any():
        raise ValueError("a sequence is empty or fully masked")
    token_rewards = -kl_coef * (flat_kl * mask)
    token_rewards[last] += rewards.to(token_rewards)
    all_returns = ops.discounted_returns(token_rewards, None, gamma, cu_seqlens=cu_seqlens_of(lengths))
    returns = list(torch.split(all_returns, lengths))
    packed.require_finite(returns)
    return returns


def _make(original: Any, _settings: Any) -> Any:
    def get_reinforce_plus_plus_returns(
        rewards: Any, kl: Any, loss_masks: Any, response_lengths: Any, total_lengths: Any, kl_coef: Any, gamma: Any
    ) -> Any:
        totals = [int(n) for n in total_lengths]
        lengths = [int(n) for n in response_lengths]

        def compute(kl: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
            return [packed_returns(rewards, kl, loss_masks, kl_coef, gamma)]

        return packed.on_whole_responses(compute, (kl,), totals, lengths)[0]

    return with_fallback(get_reinforce_plus_plus_returns, original, "advantages")


def _probe(original: Any, replacement: Any, _settings: Any) -> None:
    random = torch.Generator().manual_seed(0)
    lengths = [length for length in packed.PROBE_LENGTHS if length]  # slime refuses empty responses
    masks = [torch.ones(length, dtype=torch.int) for length in lengths]
    masks[0][100:] = 0
    masks[2][::3] = 0
    masks[3][:20] = 0
    batch = {
        "rewards": torch.randn(len(lengths), generator=random),
        "kl": [torch.rand(length, generator=random) for length in lengths],
        "loss_masks": masks,
        "response_lengths": lengths,
        "total_lengths": [length + 5 for length in lengths],
    }
    numbers = ((0.0, 1.0), (0.1, 0.97), (1.0, 0.0))
    packed.require_equal(
        original, replacement, ({**batch, "kl_coef": kl_coef, "gamma": gamma} for kl_coef, gamma in numbers)
    )


SWITCHES = (
    Patch(
        name="slime.reinforce_plus_plus",
        target=f"{packed.LOSS}:{_NAME}",
        bindings=(f"{packed.PPO_UTILS}:{_NAME}",),
        params=_PARAMS,
        make=_make,
        probe=_probe,
        no_seam="--custom-advantage-function-path replaces the whole branch, the computation of token rewards included",
        remove_when="slime computes returns of packed samples without padding",
    ),
)
