"""Decisions of the tail-batching state machine, as plain data. The driver, which has the responses generated, carries out the
decisions in the given order."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

RoundKind = Literal["short", "long", "final"]
"""Kind of a round of tail batching.

short: starts more prompts and responses than needed and trains on the first prompts to complete.
long: runs prompts that earlier rounds cut off, and waits for all responses.
final: runs the remaining prompts near the end of the run, and waits for all responses."""


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and the ids of its responses to train on, in the order in which the responses finished generating."""

    prompt_id: str
    response_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestPrompts:
    """Request to pass at least ``counts[domain]`` new prompts of each domain to ``TailBatching.offer``.
    Without domain quotas, the only domain is ``""``."""

    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RoundStarted:
    """Start of a round. The ``Launch`` decisions that follow start ``prompts`` prompts, with ``responses`` responses each."""

    number: int
    kind: RoundKind
    prompts: int
    responses: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Order to generate new responses of a prompt with the current weights. If the prompt is already running, the new responses
    replace failed responses."""

    prompt_id: str
    response_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Order to stop responses, in any state, and to drop their data from all buffers. The driver must report ``response_aborted``
    for each of these responses that was not scored yet. The prompt itself may be launched again in a later round."""

    prompt_id: str
    response_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckGroup:
    """Request to let the group filter accept or reject a prompt whose responses are all scored. The driver answers with
    ``TailBatching.group_checked``."""

    group: Group


@dataclass(frozen=True, slots=True)
class PromptFailed:
    """Report that a prompt is given up and will not be trained: responses failed after the last retry, and too few are left."""

    prompt_id: str


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Batch to train on: exactly ``prompts_per_step`` groups of exactly ``responses_per_prompt`` responses each.

    ``TailBatching`` counts these prompts as trained from now on. ``number`` and ``kind`` are the number and the kind of the round.
    """

    number: int
    kind: RoundKind
    groups: tuple[Group, ...]


@dataclass(slots=True)
class RoundMetrics:
    """Metrics of one round of tail batching, complete when the round has ended. The value ``None`` means unknown so far.

    The table of metrics in ``docs/tail-batching.md`` explains each metric.

    Attributes:
        seconds_saved: estimated seconds of a round without tail batching (one batch of prompts, all responses), minus
            ``rollout_seconds``.
        oldest_deferral_rounds: number of rounds since the earliest deferral of a prompt that is still unsettled; 0 if there is
            none.
        tokens_wasted: number of tokens of cancelled and failed responses. Groups rejected by the filter do not count as waste.
        accepted_tokens_mean: mean length in tokens of the trained responses, over the trained prompts with cancelled responses.
        cancelled_tokens_mean: mean number of tokens at which these prompts' cancelled responses were stopped, a lower bound of
            their full length. Both means are taken within each prompt first, then over prompts. Their difference measures the
            length bias of training on the first responses to finish.
    """

    number: int
    kind: RoundKind
    prompt_ratio: float
    rollout_seconds: float = 0.0
    seconds_saved: float | None = None
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
    """End of a round. All cancelled responses are confirmed as stopped, and the next round may begin."""

    metrics: RoundMetrics


Decision = RequestPrompts | RoundStarted | Launch | Cancel | CheckGroup | PromptFailed | TrainBatch | RoundEnded
