"""Computes slime's GAE from the lists as they are, in one fused scan, in place of padding to the longest and a scan over chunks.

slime pads every sequence to the longest in a Python loop; with long-tailed responses most of what it computes on is padding.
Results equal slime's to float rounding. Sequences that the kernels do not take go to slime's own function.
"""

from typing import Any

import torch

from rl_accel.errors import BackendMissing, PatchRefused
from rl_accel.ops.ragged import gae_of_lists
from rl_accel.patches.patch import Patch
from rl_accel.patches.slime._packed import LOSS, PPO_UTILS, ContextParallel, warn_once
from rl_accel.telemetry import metrics

_NAME = "get_advantages_and_returns_batch"
_PARAMS = ("total_lengths", "response_lengths", "values_list", "rewards_list", "gamma", "lambd", "chunked")


def packed_gae(
    values: list[torch.Tensor],
    rewards: list[torch.Tensor],
    lengths: list[int],
    gamma: float,
    lambd: float,
    settings: Any,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """GAE of whole responses, the first ``lengths[i]`` tokens of each; see :func:`~rl_accel.ops.ragged.gae_of_lists`."""
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
        with torch.no_grad():
            ranks = ContextParallel()
            totals, lengths = [int(n) for n in total_lengths], [int(n) for n in response_lengths]
            values = ranks.gather(values_list, totals, lengths)
            rewards = ranks.gather(rewards_list, totals, lengths)
            try:
                advantages, returns = packed_gae(values, rewards, lengths, gamma, lambd, settings)
            except (TypeError, ValueError, BackendMissing) as error:
                metrics.put("gae/applied", 0)
                warn_once("GAE", str(error))
                return original(total_lengths, response_lengths, values_list, rewards_list, gamma, lambd, chunked)
            metrics.put("gae/applied", 1)
            return ranks.cut(advantages, totals, lengths), ranks.cut(returns, totals, lengths)

    setattr(get_advantages_and_returns_batch, "settings", settings)  # noqa: B010 - for the probe
    return get_advantages_and_returns_batch


def _probe(original: Any, replacement: Any) -> None:
    """Compare with slime's chunk scan on a padded batch. Gathering and cutting are slime's own functions in both."""
    chunked_gae = original.__globals__.get("chunked_gae")
    if chunked_gae is None:
        raise PatchRefused(f"{PPO_UTILS} has no chunked_gae to compare with")
    random = torch.Generator().manual_seed(0)
    lengths = [130, 1, 57, 128, 3]
    padded_values, padded_rewards = (torch.zeros(len(lengths), max(lengths)) for _ in range(2))
    for row, length in enumerate(lengths):
        padded_values[row, :length] = torch.randn(length, generator=random)
        padded_rewards[row, :length] = torch.randn(length, generator=random)
    for gamma, lambd in ((1.0, 1.0), (0.99, 0.95), (1.0, 0.0)):
        wanted = chunked_gae(padded_rewards, padded_values, gamma, lambd)
        try:
            found = packed_gae(list(padded_values), list(padded_rewards), lengths, gamma, lambd, replacement.settings)
        except (ValueError, BackendMissing) as error:
            raise PatchRefused(
                f"gae.backend={replacement.settings.backend} cannot be checked on the CPU: {error}"
            ) from error
        for name, whole, rows in zip(("advantages", "returns"), wanted, found, strict=True):
            for row, length in enumerate(lengths):
                if not torch.allclose(rows[row], whole[row, :length], rtol=1e-4, atol=1e-4):
                    apart = float((rows[row] - whole[row, :length]).abs().max())
                    raise PatchRefused(f"{name} of sequence {row} differ by {apart:.3g} (gamma={gamma}, lambd={lambd})")


PATCHES = (
    Patch(
        name="slime.gae",
        feature="gae",
        target=f"{LOSS}:{_NAME}",
        bindings=(f"{PPO_UTILS}:{_NAME}",),
        supports="",
        params=_PARAMS,
        make=_make,
        fingerprints=("c95e193c270dbe3b7c1636026fa207eaab5247a71f8efb1df787ccbc924c7179",),
        probe=_probe,
        no_seam="--custom-advantage-function-path replaces the whole branch; critics with their own configuration ignore it",
    ),
)
