"""Where a step's time goes: its stages, and what its generation was spent on, from completion times of the run itself.

Nothing here is modelled. A step's stages are what the framework's own timers say; what no timer covers is ``other``. Its generation
is the window of ``gen`` seconds from the moment at which the first response began. With ``t(q)`` the time by which a share ``q`` of
the completed responses were generated, that window is cut into four parts, one after the other, which add up to it:

    most       until t(0.9)                      nine in ten responses are generated
    waiting    t(0.9) to t(1)                    waiting for the longest responses
    reward     t(1) to the last reward           rewards that no generation hides
    rest       the last reward to the end        storing, noticing (a poll), putting engines to sleep

**Idle share.** ``n(t)`` responses are in generation at a time; the capacity ``C`` is the most that ever were, or the slots that the
engines have if these are fewer. The idle share is ``1 - integral(min(n(t), C)) / (C * gen)``: the share of places in the batch that
were empty. The integral is tokens decoded times time per token, with each response's own time per token, so that no model of the
engine's speed is needed. It says how much of the *batch* was empty, not of the processor: an engine that decodes faster with fewer
requests loses less than that. Time in a queue, in tools and on the way to the engine counts as generation, and so does that of
responses that are cancelled later.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

STAGES = (
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "update_weights",
    "save_checkpoint",
)
"""Timers of verl that do not overlap and lie within the step."""

OTHER = "other"
PREFIX = "timing_s/"
MOST = 0.9


COMPLETED, CANCELLED, FAILED = "completed", "cancelled", "failed"


@dataclass(slots=True)
class Response:
    """One response. Times are seconds of the wall clock, so that those of several processes can be compared.

    Attributes:
        prompt: its prompt group.
        began: its agent loop began.
        generated: its last token was there; None if it never was.
        rewarded: its reward was there; None if it never was.
        ended: nothing of it was under way any more.
        tokens: how many were generated; None if unknown.
        server: the rollout server that generated it (the last one, in several turns); None if unknown.
        outcome: ``completed``, ``cancelled`` or ``failed``.
    """

    prompt: str
    began: float
    generated: float | None = None
    rewarded: float | None = None
    ended: float = 0.0
    tokens: int | None = None
    server: str | None = None
    outcome: str = COMPLETED

    @property
    def completed_at(self) -> float:
        """When it and its reward were there, for one that completed."""
        return self.ended if self.rewarded is None else self.rewarded


def stages(metrics: Mapping[str, float]) -> dict[str, float] | None:
    """Return seconds of each stage that was timed and of ``other``; they add up to the step. None for what is no training step.

    Args:
        metrics: what verl logs for a step, ``timing_s/<stage>`` among it.
    """
    whole = metrics.get(PREFIX + "step")
    if whole is None or not math.isfinite(whole):
        return None
    timed = {stage: float(metrics[PREFIX + stage]) for stage in STAGES if PREFIX + stage in metrics}
    return {**timed, OTHER: float(whole) - sum(timed.values())}


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return each stage's share of the step, of which ``seconds`` are all stages; they add up to 1."""
    whole = sum(seconds.values())
    return {stage: value / whole for stage, value in seconds.items()} if whole > 0 else dict.fromkeys(seconds, 0.0)


@dataclass(frozen=True)
class Completion:
    """Seconds from a response's beginning until its reward was there, over the completed ones."""

    p50: float
    p90: float
    p99: float
    longest: float


@dataclass(frozen=True)
class Generation:
    """What the generation of one step was spent on. A number that cannot be known is None.

    Attributes:
        seconds: of the stage.
        responses, completed, cancelled, failed: how many there were.
        tokens: decoded, of the responses whose tokens are known.
        most, waiting, reward, rest: seconds of the four parts above, which add up to ``seconds``.
        after_half: seconds from t(0.5) to t(1).
        concurrency: the most responses that were in generation at once.
        idle: idle share of generation.
        seconds_per_token: median over the completed responses of generation seconds per token.
        completion: see there.
    """

    seconds: float
    responses: int
    completed: int
    cancelled: int
    failed: int
    tokens: int
    most: float | None
    waiting: float | None
    reward: float | None
    rest: float | None
    after_half: float | None
    concurrency: int
    idle: float | None
    seconds_per_token: float | None
    completion: Completion | None


def generation(
    responses: Sequence[Response], seconds: float, began: float | None = None, slots: int | None = None
) -> Generation | None:
    """Return what a generation of ``seconds`` was spent on, None if it had no responses. Their order does not matter.

    Args:
        responses: those of one step.
        seconds: of the stage.
        began: when it began, by the clock of the responses; default is when the first response did.
        slots: how many requests the engines run at once, if that is known.

    Raises:
        ValueError: ``seconds`` or ``slots`` is not positive.
    """
    if not seconds > 0:
        raise ValueError(f"seconds wants a positive number, found {seconds}")
    if slots is not None and slots < 1:
        raise ValueError(f"slots wants at least 1, found {slots}")
    if not responses:
        return None
    start = min(response.began for response in responses) if began is None else began

    def into(moment: float) -> float:
        return min(max(moment - start, 0.0), seconds)

    spans = sorted((into(r.began), into(r.ended if r.generated is None else r.generated)) for r in responses)
    completed = [r for r in responses if r.outcome == COMPLETED and r.generated is not None]
    generated = sorted(into(r.generated) for r in completed if r.generated is not None)
    parts: dict[str, float | None] = dict.fromkeys(("most", "waiting", "reward", "rest", "after_half"))
    if generated:
        rewarded = max([generated[-1], *(into(r.rewarded) for r in completed if r.rewarded is not None)])
        nearly = quantile(generated, MOST)
        parts["most"] = nearly
        parts["waiting"] = generated[-1] - nearly
        parts["reward"] = rewarded - generated[-1]
        parts["rest"] = seconds - rewarded
        parts["after_half"] = generated[-1] - quantile(generated, 0.5)
    concurrency, _ = _occupied(spans, len(spans))
    capacity = concurrency if slots is None else min(concurrency, slots)
    occupied = _occupied(spans, capacity)[1]
    token_seconds = [(r.generated - r.began) / r.tokens for r in completed if r.generated is not None and r.tokens]
    outcomes = [response.outcome for response in responses]
    return Generation(
        seconds=seconds,
        responses=len(responses),
        completed=outcomes.count(COMPLETED),
        cancelled=outcomes.count(CANCELLED),
        failed=outcomes.count(FAILED),
        tokens=sum(response.tokens or 0 for response in responses),
        concurrency=concurrency,
        idle=min(max(1 - occupied / (capacity * seconds), 0.0), 1.0) if capacity else None,
        seconds_per_token=statistics.median(token_seconds) if token_seconds else None,
        completion=completion(responses),
        **parts,
    )


def completion(responses: Iterable[Response]) -> Completion | None:
    """Return percentiles over the completed ``responses``, None if there are none."""
    seconds = sorted(r.completed_at - r.began for r in responses if r.outcome == COMPLETED)
    if not seconds:
        return None
    return Completion(quantile(seconds, 0.5), quantile(seconds, 0.9), quantile(seconds, 0.99), seconds[-1])


def by_server(responses: Sequence[Response], seconds: float, slots_each: int | None = None) -> dict[str, Generation]:
    """Return :func:`generation` of each server, over the same window; responses whose server is unknown are left out.

    Args:
        responses: those of one step.
        seconds: of the stage.
        slots_each: how many requests one server runs at once, if that is known.
    """
    if not responses:
        return {}
    began = min(response.began for response in responses)
    names = sorted({response.server for response in responses if response.server is not None})
    parts = {name: generation([r for r in responses if r.server == name], seconds, began, slots_each) for name in names}
    return {name: part for name, part in parts.items() if part is not None}


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the least value that at least ``share`` of the ``ordered`` values do not exceed."""
    return ordered[max(math.ceil(share * len(ordered) - 1e-9), 1) - 1]


def _occupied(spans: Sequence[tuple[float, float]], capacity: int) -> tuple[int, float]:
    """The most spans that overlap, and the integral over time of how many do, at most ``capacity`` of them."""
    # At equal times an end comes first: a place is free before the next response takes it.
    events = sorted(event for begin, end in spans if end > begin for event in ((begin, 1), (end, -1)))
    running, most, integral, last = 0, 0, 0.0, 0.0
    for moment, change in events:
        integral += min(running, capacity) * (moment - last)
        running, last = running + change, moment
        most = max(most, running)
    return most, integral
