"""Replaces slime's generalised advantage estimation (GAE) by one fused scan over the unpadded sequences.

slime pads all sequences to the length of the longest. If a few responses are very long, slime computes mostly on padding. The
results are equal to slime's up to float rounding. slime's own function is called for sequences that the kernels do
not support, and where a result is NaN or infinite.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from rl_accel.ops import gae_of_lists
from rl_accel.patches.parity import with_fallback
from rl_accel.patches.patch import Patch
from rl_accel.patches.slime import packed

_NAME = "get_advantages_and_returns_batch"
_PARAMS = ("total_lengths", "response_lengths", "values_list", "rewards_list", "gamma", "lambd", "chunked")


def packed_gae(
    values: Sequence[torch.Tensor],
    rewards: Sequence[torch.Tensor],
    lengths: Sequence[int],
    gamma: float,
    lambd: float,
    settings: Any,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Computes the GAE of responses, of each of which the first ``lengths[i]`` tokens count. Returns (advantages, returns).

    Raises TypeError, ValueError and BackendMissing as :func:`rl_accel.ops.gae_of_lists`; ValueError also for a result with NaN or
    infinity.
    """
    advantages, returns = gae_of_lists(
        [reward[:length] for reward, length in zip(rewards, lengths, strict=True)],
        [value[:length] for value, length in zip(values, lengths, strict=True)],
        gamma,
        lambd,
        backend=settings.backend,
        chunk_size=settings.chunk_size,
        num_threads=settings.threads,
    )
    packed.require_finite(returns)
    return advantages, returns


def _make(original: Any, settings: Any) -> Any:
    def get_advantages_and_returns_batch(
        total_lengths: Any,
        response_lengths: Any,
        values_list: Any,
        rewards_list: Any,
        gamma: Any,
        lambd: Any,
        chunked: bool = True,
    ) -> Any:
        totals = [int(n) for n in total_lengths]
        lengths = [int(n) for n in response_lengths]
        compute = partial(packed_gae, lengths=lengths, gamma=gamma, lambd=lambd, settings=settings)
        with torch.no_grad():
            return tuple(packed.on_whole_responses(compute, (values_list, rewards_list), totals, lengths))

    return with_fallback(get_advantages_and_returns_batch, original, "gae")


def _probe(original: Any, replacement: Any, _settings: Any) -> None:
    random = torch.Generator().manual_seed(0)
    lengths = list(packed.PROBE_LENGTHS)
    values, rewards = ([torch.randn(length, generator=random) for length in lengths] for _ in range(2))
    batch: dict[str, Any] = {"total_lengths": [n + 5 for n in lengths], "response_lengths": lengths}
    batch |= {"values_list": values, "rewards_list": rewards}
    numbers = ((1.0, 1.0), (0.99, 0.95), (1.0, 0.0))
    scans = itertools.product(numbers, (True, False))
    calls = ({**batch, "gamma": gamma, "lambd": lambd, "chunked": chunked} for (gamma, lambd), chunked in scans)
    packed.require_equal(original, replacement, calls)


SWITCHES = (
    Patch(
        name="slime.gae",
        target=f"{packed.LOSS}:{_NAME}",
        bindings=(f"{packed.PPO_UTILS}:{_NAME}",),
        params=_PARAMS,
        make=_make,
        probe=_probe,
        no_seam="--custom-advantage-function-path replaces the whole branch; critics with their own configuration ignore it",
        remove_when="slime computes GAE of packed samples without padding",
    ),
)
