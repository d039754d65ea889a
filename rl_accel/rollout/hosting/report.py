"""What a run says of its rounds: lines of the log, and numbers for the framework's logger."""

import logging
from collections.abc import Sequence
from typing import Any

from rl_accel.rollout.tail_decisions import EpochSettled, RoundMetrics, RoundStarted

logger = logging.getLogger("rl_accel")

PREFIX = "rl_accel/tail_batching/"
# A step has a second round only if the first could not be filled: then these add up, the others are the last round's.
_ADD_UP = (
    "rollout_seconds",
    "seconds_saved",
    "prompts_admitted",
    "prompts_trained",
    "prompts_deferred",
    "prompts_rejected",
    "prompts_failed",
    "responses_cancelled",
    "responses_failed",
    "tokens_generated",
    "tokens_wasted",
)
_AS_THEY_ARE = (
    "prompt_ratio",
    "queue_length",
    "oldest_deferral_rounds",
    "wasted_token_share",
    "accepted_tokens_mean",
    "cancelled_tokens_mean",
)


def announce(event: RoundStarted | EpochSettled) -> None:
    """Log that a round has begun, or how the prompts of an epoch ended."""
    match event:
        case RoundStarted(number, kind, prompts, responses):
            logger.info("rl-accel: round %d is %s: %d prompts with %d responses each", number, kind, prompts, responses)
        case EpochSettled(epoch, trained, rejected, failed):
            logger.info(
                "rl-accel: epoch %d is settled: %d prompts trained, %d rejected, %d failed",
                epoch,
                trained,
                rejected,
                failed,
            )


def numbers(rounds: Sequence[RoundMetrics]) -> dict[str, float]:
    """Return ``rl_accel/tail_batching/<name>``: every field of :class:`RoundMetrics` that is known, the kind as 0 or 1.

    No name holds ``max``, ``min``, ``sum`` or ``total``, by which verl would choose another reduction.
    """
    last = rounds[-1]
    out: dict[str, Any] = {f"{kind}_round": float(last.kind == kind) for kind in ("short", "long", "final")}
    out["round"] = last.number
    out["rounds"] = len(rounds)
    for name in _ADD_UP:
        known = [value for value in (getattr(item, name) for item in rounds) if value is not None]
        out[name] = sum(known) if known else None
    for name in _AS_THEY_ARE:
        out[name] = getattr(last, name)
    return {PREFIX + name: float(value) for name, value in out.items() if value is not None}
