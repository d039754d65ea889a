"""Counts of the round under way, and the metrics they become."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean

from rl_accel.rollout.tail_decisions import RoundKind, RoundMetrics


@dataclass(slots=True)
class RoundTally:
    """What happened in a round so far."""

    began: float = 0.0
    seconds: float = 0.0
    prompt_ratio: float = 1.0
    admitted: int = 0
    trained: int = 0
    deferred: int = 0
    rejected: int = 0
    failed: int = 0
    cancelled_responses: int = 0
    failed_responses: int = 0
    used_tokens: int = 0
    rejected_tokens: int = 0
    wasted_tokens: int = 0
    lengths: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Of each trained prompt, the tokens of its accepted and of its cancelled responses."""

    def metrics(
        self, number: int, kind: RoundKind, full_wait: float | None, queued: int, oldest_deferral: int
    ) -> RoundMetrics:
        """Return the round in numbers."""
        every_token = self.used_tokens + self.rejected_tokens + self.wasted_tokens
        both = [pair for pair in self.lengths if pair[1]]
        return RoundMetrics(
            number=number,
            kind=kind,
            prompt_ratio=self.prompt_ratio,
            rollout_seconds=self.seconds,
            seconds_saved=None if full_wait is None else full_wait - self.seconds,
            queue_length=queued,
            oldest_deferral_rounds=oldest_deferral,
            prompts_admitted=self.admitted,
            prompts_trained=self.trained,
            prompts_deferred=self.deferred,
            prompts_rejected=self.rejected,
            prompts_failed=self.failed,
            responses_cancelled=self.cancelled_responses,
            responses_failed=self.failed_responses,
            tokens_generated=every_token,
            tokens_wasted=self.wasted_tokens,
            wasted_token_share=self.wasted_tokens / every_token if every_token else 0.0,
            accepted_tokens_mean=_mean_of_means(accepted for accepted, _ in both),
            cancelled_tokens_mean=_mean_of_means(cancelled for _, cancelled in both),
        )


def _mean_of_means(lengths: Iterable[list[int]]) -> float | None:
    means = [fmean(tokens) for tokens in lengths]
    return fmean(means) if means else None
