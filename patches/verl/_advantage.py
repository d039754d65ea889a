"""What the advantage patches share: how one is built, and the check against verl's function before it goes in."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rl_accel.patches.parity import require_agreement
from rl_accel.patches.patch import Patch
from rl_accel.telemetry import metrics

logger = logging.getLogger("rl_accel")

MODULE = "verl.trainer.ppo.core_algos"


def advantage_patch(
    estimator: str,
    function: str,
    params: tuple[str, ...],
    fast: Callable[..., Any],
    fingerprints: tuple[str, ...],
    probe_arguments: Callable[[], dict[str, Any]],
) -> Patch:
    """Return the patch of one advantage estimator, at its function and its registry entry.

    ``fast`` takes the arguments of verl's function and returns (advantages, returns), or the error that says why these
    arguments are outside the domain in which it is exact; verl's own function then does the work.
    """

    def make(original: Any, _settings: Any) -> Any:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            found = fast(*args, **kwargs)
            if isinstance(found, Exception):
                left_to_verl(estimator, str(found))
                return original(*args, **kwargs)
            return found

        return replacement

    return Patch(
        name=f"verl.{estimator}",
        feature="advantages",
        target=f"{MODULE}:{function}",
        bindings=(f"{MODULE}:ADV_ESTIMATOR_REGISTRY[{estimator}]",),
        supports="verl>=0.9",
        params=params,
        make=make,
        fingerprints=fingerprints,
        probe=lambda original, replacement: require_agreement(original, replacement, probe_arguments()),
        no_seam="register_adv_est refuses a second function under the name of a stock estimator",
    )


def left_to_verl(what: str, reason: str) -> None:
    """Count a call that verl's own function had to serve, and warn once for each reason."""
    metrics.add("advantages/stock_calls", 1)
    _warn_once(what, reason)


@functools.lru_cache(maxsize=32)
def _warn_once(what: str, reason: str) -> None:
    logger.warning("rl-accel: %s is left to verl's own function: %s", what, reason)


def ragged_batch() -> dict[str, Any]:
    """Return a small batch with groups of several sizes, a shorter mask per row and holes in it."""
    random = np.random.RandomState(0)
    index = np.array([f"prompt-{n}" for n in np.repeat(np.arange(6), (2, 3, 4, 5, 8, 9))], dtype=object)
    random.shuffle(index)
    rows, tokens = len(index), 11
    mask = (np.arange(tokens) < random.randint(1, tokens + 1, (rows, 1))) & (random.rand(rows, tokens) < 0.8)
    return {
        "token_level_rewards": torch.from_numpy(random.randn(rows, tokens)).float(),
        "response_mask": torch.from_numpy(mask).long(),
        "index": index,
    }
