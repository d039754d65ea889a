"""What tail batching decides. Plain data: the driver acts on each decision, in the order given."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

RoundKind = Literal["short", "long", "final"]
"""short: more prompts and responses than needed, the first ones win. long: deferred prompts, no surplus. final: what is
left when the run is about to end, no surplus."""


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its R0 responses, in the order in which their generation finished."""

    prompt_id: str
    response_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestPrompts:
    """Offer at least ``counts[domain]`` new prompts; without quotas the only domain is ``""``."""

    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RoundStarted:
    """A round begins: ``prompts`` are launched at once with ``responses`` each, as the launches that follow say."""

    number: int
    kind: RoundKind
    prompts: int
    responses: int


@dataclass(frozen=True, slots=True)
class Launch:
    """Start these responses of the prompt with the current weights. For a prompt that is already under way they replace
    failed ones."""

    prompt_id: str
    response_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop these responses wherever they are, drop what they left in any buffer, and acknowledge each that was not scored yet.
    The prompt itself stays: it may be launched again in a later round."""

    prompt_id: str
    response_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckGroup:
    """All responses of the group are scored: answer with ``group_checked``."""

    group: Group


@dataclass(frozen=True, slots=True)
class PromptFailed:
    """Responses failed again after their last retry, and too few are left. The prompt will not be trained: log it."""

    prompt_id: str


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The batch: exactly P0 groups of exactly R0 responses. Train on it; the core counts these prompts as trained."""

    number: int
    kind: RoundKind
    groups: tuple[Group, ...]


@dataclass(slots=True)
class RoundMetrics:
    """One round in numbers, complete when it has ended. ``None``: not known (yet). The table of metrics in
    ``docs/tail-batching.md`` says what each is.

    Attributes:
        seconds_saved: estimated seconds that a round of P0 prompts that waits for every response would have taken, less
            ``rollout_seconds``.
        oldest_deferral_rounds: rounds since the oldest of the deferred prompts was first deferred.
        tokens_wasted: of cancelled and failed responses. Groups that the filter rejects are not counted as waste.
        accepted_tokens_mean: mean length of the trained responses of prompts that also had responses cancelled.
        cancelled_tokens_mean: mean length at which the cancelled responses of the same prompts were cut off, so a lower
            bound of how long they would have become. Both are means over prompts of the mean within the prompt; their
            distance is the length bias of preferring the first R0.
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
    """Every cancelled response is acknowledged; the next round may begin."""

    metrics: RoundMetrics


Decision = RequestPrompts | RoundStarted | Launch | Cancel | CheckGroup | PromptFailed | TrainBatch | RoundEnded
