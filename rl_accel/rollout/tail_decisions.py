"""Decisions of the tail-batching state machine, as plain data. The driver, which has the responses generated, carries out the
decisions in the given order."""

from dataclasses import dataclass
from typing import Literal

RoundKind = Literal["short", "long", "final"]
"""Kind of a round of tail batching.

short: starts more prompts and responses than needed and trains on the first prompts to complete.
long: runs deferred prompts and waits for all responses.
final: runs the remaining prompts near the end of the run and waits for all responses."""


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and the ids of its responses to train on, in the order in which the responses finished generating."""

    prompt_id: str
    response_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestPrompts:
    """Request to pass at least ``count`` new prompts to ``TailBatching.offer``."""

    count: int


@dataclass(frozen=True, slots=True)
class RoundStarted:
    """Start of a round. The ``Launch`` decisions that follow start ``prompts`` prompts with ``responses`` responses each."""

    number: int
    kind: RoundKind
    prompts: int
    responses: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Order to generate more responses to a prompt, with the current weights."""

    prompt_id: str
    response_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Order to stop responses and to drop their data. The driver reports ``response_aborted`` for each that was not scored yet."""

    prompt_id: str
    response_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckGroup:
    """Request to let the group filter accept or reject a complete prompt. The answer is ``TailBatching.group_checked``."""

    group: Group


@dataclass(frozen=True, slots=True)
class PromptFailed:
    """Report that a prompt is given up, because too many of its responses failed."""

    prompt_id: str


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Batch to train on, always with the full number of prompts and of responses per prompt.

    ``number`` and ``kind`` are those of the round. From this decision on, ``TailBatching`` counts the prompts as trained.
    """

    number: int
    kind: RoundKind
    groups: tuple[Group, ...]


@dataclass(slots=True)
class RoundMetrics:
    """Metrics of one round of tail batching, complete at the end of the round. None: unknown.

    The table of metrics in ``docs/metrics.md`` explains each metric.

    Attributes:
        oldest_deferral_rounds: number of rounds since the oldest deferral of a prompt that still waits; 0 if there is none.
        tokens_wasted: number of tokens of cancelled and failed responses.
        accepted_tokens_mean: mean length in tokens of the trained responses, over prompts that also have cancelled responses.
        cancelled_tokens_mean: mean number of tokens of these cancelled responses when they were stopped. Both means are taken
            within each prompt first, then over prompts.
    """

    number: int = 0
    kind: RoundKind = "short"
    prompt_ratio: float = 1.0
    rollout_seconds: float = 0.0
    queue_length: int = 0
    oldest_deferral_rounds: int = 0
    prompts_admitted: int = 0
    prompts_trained: int = 0
    prompts_deferred: int = 0
    prompts_rejected: int = 0
    prompts_failed: int = 0
    responses_cancelled: int = 0
    responses_failed: int = 0
    tokens_generated: int = 0
    tokens_wasted: int = 0
    wasted_token_share: float = 0.0
    accepted_tokens_mean: float | None = None
    cancelled_tokens_mean: float | None = None


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """End of a round. All cancelled responses have stopped."""

    metrics: RoundMetrics


Decision = RequestPrompts | RoundStarted | Launch | Cancel | CheckGroup | PromptFailed | TrainBatch | RoundEnded
