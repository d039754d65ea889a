"""Decisions of tail batching, as plain data. The driver carries out the decisions in the given order."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

RoundKind = Literal["short", "long", "final"]
"""short: more prompts and responses than needed; the first ones to complete are trained. long: deferred prompts, no surplus.
final: the remaining prompts near the end of the run, no surplus."""


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its R0 responses, in the order in which their generation finished."""

    prompt_id: str
    response_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestPrompts:
    """Asks for at least ``counts[domain]`` new prompts by ``offer``; without quotas the only domain is ``""``."""

    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RoundStarted:
    """Start of a round: the launches that follow start ``prompts`` prompts at once, with ``responses`` responses each."""

    number: int
    kind: RoundKind
    prompts: int
    responses: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Starts responses of a prompt with the current weights. If the prompt is already running, these responses replace
    failed responses."""

    prompt_id: str
    response_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stops responses wherever they are and drops their data in all buffers. The driver acknowledges each response that was not
    scored yet. The prompt itself stays: it may be launched again in a later round."""

    prompt_id: str
    response_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckGroup:
    """Asks for the verdict on a group whose responses are all scored; the driver answers with ``group_checked``."""

    group: Group


@dataclass(frozen=True, slots=True)
class PromptFailed:
    """Reports a prompt that will not be trained: responses failed after the last retry, and too few are left."""

    prompt_id: str


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The batch to train on: exactly P0 groups of exactly R0 responses. The core counts these prompts as trained."""

    number: int
    kind: RoundKind
    groups: tuple[Group, ...]


@dataclass(slots=True)
class RoundMetrics:
    """Metrics of one round, complete when the round has ended. ``None``: not known (yet). The table of metrics in
    ``docs/tail-batching.md`` explains each metric.

    Attributes:
        seconds_saved: estimated seconds of a round of P0 prompts that waits for every response, minus ``rollout_seconds``.
        oldest_deferral_rounds: number of rounds since the first deferral of the prompt that was deferred earliest.
        tokens_wasted: tokens of cancelled and failed responses. Groups rejected by the filter do not count as waste.
        accepted_tokens_mean: mean length in tokens of the trained responses of prompts that also had responses cancelled.
        cancelled_tokens_mean: mean length at which the cancelled responses of the same prompts were stopped, a lower bound
            of their full length. Both means are taken within each prompt first, then over prompts. Their difference is the
            length bias of preferring the first R0 responses.
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
    """End of a round: every cancelled response is acknowledged, and the next round may begin."""

    metrics: RoundMetrics


Decision = RequestPrompts | RoundStarted | Launch | Cancel | CheckGroup | PromptFailed | TrainBatch | RoundEnded
