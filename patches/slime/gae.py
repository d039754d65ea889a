"""Replaces slime's generalised advantage estimation (GAE) by one fused scan over the unpadded sequences.

slime pads all sequences to the length of the longest. If a few responses are very long, slime computes mostly on padding. The
results are equal to slime's up to float rounding. For sequences that the kernels do not support, slime's own function is called.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from rl_accel.errors import BackendMissing, PatchRefused
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
    """Computes the GAE of responses, of each of which the first ``lengths[i]`` tokens count. Returns (advantages, returns)."""
    return gae_of_lists(
        [reward[:length] for reward, length in zip(rewards, lengths, strict=True)],
        [value[:length] for value, length in zip(values, lengths, strict=True)],
        gamma,
        lambd,
        backend=settings.backend,
        chunk_size=settings.chunk_size,
        num_threads=settings.threads,
    )


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
        totals, lengths = [int(n) for n in total_lengths], [int(n) for n in response_lengths]
        compute = partial(packed_gae, lengths=lengths, gamma=gamma, lambd=lambd, settings=settings)
        with torch.no_grad():
            return tuple(packed.on_whole_responses(compute, (values_list, rewards_list), totals, lengths))

    return with_fallback(get_advantages_and_returns_batch, original, "gae")


def _probe(original: Any, _replacement: Any, settings: Any) -> None:
    random = torch.Generator().manual_seed(0)
    values, rewards = ([torch.randn(length, generator=random) for length in packed.PROBE_LENGTHS] for _ in range(2))

    def ours(gamma: float, lambd: float) -> list[torch.Tensor]:
        try:
            outputs = packed_gae(values, rewards, packed.PROBE_LENGTHS, gamma, lambd, settings)
        except (ValueError, BackendMissing) as error:
            raise PatchRefused(f"gae.backend={settings.backend} cannot be checked on the CPU: {error}") from error
        return [torch.cat(rows) for rows in outputs]

    arguments = [{"gamma": gamma, "lambd": lambd} for gamma, lambd in ((1.0, 1.0), (0.99, 0.95), (1.0, 0.0))]
    packed.require_equal_scan(original, "chunked_gae", (rewards, values), ours, arguments)


SWITCHES = (
    Patch(
        name="slime.gae",
        target=f"{packed.LOSS}:{_NAME}",
        bindings=(f"{packed.PPO_UTILS}:{_NAME}",),
        params=_PARAMS,
        make=_make,
        fingerprints=("c95e193c270dbe3b7c1636026fa207eaab5247a71f8efb1df787ccbc924c7179",),
        probe=_probe,
        no_seam="--custom-advantage-function-path replaces the whole branch; critics with their own configuration ignore it",
        remove_when="slime computes GAE of packed samples without padding",
    ),
)
