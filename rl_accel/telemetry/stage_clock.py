"""Where a step's time goes: its stages, and what its generation was spent on, from completion times of the run itself.

Nothing here is modelled. A step's stages are what the framework's own timers say; what no timer covers is ``other``. Its generation
is the window of ``gen`` seconds from the moment at which the first response began. With ``t(q)`` the time by which a share ``q`` of
the completed responses were generated, that window is cut into four parts, one after the other, which add up to it:

    most       until t(0.9)                      nine in ten responses are generated
    waiting    t(0.9) to t(1)                    waiting for the longest responses
    reward     t(1) to the last reward           rewards that no generation hides
    rest       the last reward to the end        storing, noticing (a poll), putting engines to sleep

The idle share is that of empty places in the batch, ``1 - integral(min(n(t), C)) / (C * gen)``: ``n(t)`` responses are in
generation at a time, and the capacity ``C`` is the most that ever were, or the slots that the engines have if these are fewer.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

STAGES = {
    "gen": "#4878a8",
    "reward": "#9bc0de",
    "old_log_prob": "#e8a24c",
    "ref": "#f4d29b",
    "values": "#6fb07f",
    "adv": "#d1495b",
    "update_critic": "#9d84b7",
    "update_actor": "#c9b8dd",
    "update_weights": "#5fb3b3",
    "save_checkpoint": "#b7b7a4",
}
"""Timers of verl that do not overlap and lie within the step, and their colours in pictures."""

OTHER = "other"
PREFIX = "timing_s/"
FILE_NAME = "rl_accel_telemetry.jsonl"
"""Of the file with responses, in verl's ``trainer.default_local_dir``."""

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
        tools: seconds of its generation in which it waited for tools, one after the other.
    """

    prompt: str
    began: float
    generated: float | None = None
    rewarded: float | None = None
    ended: float = 0.0
    tokens: int | None = None
    server: str | None = None
    outcome: str = COMPLETED
    tools: float = 0.0

    @property
    def completed_at(self) -> float:
        """When it and its reward were there, for one that completed."""
        return self.ended if self.rewarded is None else self.rewarded


def stages(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return seconds of each stage that was timed and of ``other``; they add up to the step. {} for what is no training step.

    Args:
        metrics: what verl logs for a step, ``timing_s/<stage>`` among it.
    """
    whole = metrics.get(PREFIX + "step")
    if whole is None or not math.isfinite(whole):
        return {}
    timed = {stage: float(metrics[PREFIX + stage]) for stage in STAGES if PREFIX + stage in metrics}
    return {**timed, OTHER: float(whole) - sum(timed.values())}


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return each stage's share of the step, of which ``seconds`` are all stages; they add up to 1."""
    whole = sum(seconds.values())
    return {stage: value / whole for stage, value in seconds.items()} if whole > 0 else dict.fromkeys(seconds, 0.0)


def completion(responses: Sequence[Response]) -> dict[str, float]:
    """Return how many there are, their tokens, and of those that completed the seconds until their reward; {} of none."""
    if not responses:
        return {}
    numbers: dict[str, float] = {"responses": len(responses), "tokens": sum(r.tokens or 0 for r in responses)}
    seconds = sorted(r.completed_at - r.began for r in responses if r.outcome == COMPLETED)
    if seconds:
        numbers["completion_p50_seconds"] = quantile(seconds, 0.5)
        numbers["completion_p90_seconds"] = quantile(seconds, 0.9)
        numbers["completion_p99_seconds"] = quantile(seconds, 0.99)
        numbers["completion_longest_seconds"] = seconds[-1]
    return numbers


def generation(
    responses: Sequence[Response], seconds: float, slots: int | None = None, began: float | None = None
) -> dict[str, float]:
    """Return what a generation was spent on, by name; what cannot be known is left out. The order of ``responses`` does not matter.

    The four parts above and ``after_half_seconds``, t(0.5) to t(1); ``idle_share``; ``concurrency``, the most responses in
    generation at once; ``seconds_per_token``, the median over completed responses; ``cancelled``, how many were; ``tool_share``,
    the share of tools in the time of completed responses, if there are any.

    Args:
        responses: those of one step, at least one.
        seconds: of the stage, more than 0.
        slots: how many requests the engines run at once, if that is known.
        began: when the stage began, by the clock of the responses; default is when the first response did.
    """
    start = min(response.began for response in responses) if began is None else began

    def into(moment: float) -> float:
        return min(max(moment - start, 0.0), seconds)

    numbers: dict[str, float] = {"cancelled": sum(r.outcome == CANCELLED for r in responses)}
    completed = [(r, r.generated) for r in responses if r.outcome == COMPLETED and r.generated is not None]
    if completed:
        generated = sorted(into(moment) for _, moment in completed)
        nearly, last = quantile(generated, 0.9), generated[-1]
        rewarded = max([last, *(into(r.rewarded) for r, _ in completed if r.rewarded is not None)])
        numbers["most_seconds"] = nearly
        numbers["waiting_seconds"] = last - nearly
        numbers["reward_seconds"] = rewarded - last
        numbers["rest_seconds"] = seconds - rewarded
        numbers["after_half_seconds"] = last - quantile(generated, 0.5)
        if tools := sum(r.tools for r, _ in completed):
            numbers["tool_share"] = min(tools / sum(moment - r.began for r, moment in completed), 1.0)
    if per_token := [(moment - r.began) / r.tokens for r, moment in completed if r.tokens]:
        numbers["seconds_per_token"] = statistics.median(per_token)

    spans = [(into(r.began), into(r.ended if r.generated is None else r.generated)) for r in responses]
    # At equal times an end comes first: a place is free before the next response takes it.
    events = sorted(event for begin, end in spans if end > begin for event in ((begin, 1), (end, -1)))
    running = np.cumsum([change for _, change in events])
    concurrency = int(max(running, default=0))
    numbers["concurrency"] = concurrency
    if concurrency:
        capacity = concurrency if slots is None else min(concurrency, slots)
        lasted = np.diff([moment for moment, _ in events])
        occupied = float(np.minimum(running[:-1], capacity) @ lasted)
        numbers["idle_share"] = min(max(1 - occupied / (capacity * seconds), 0.0), 1.0)
    return numbers


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the least value that at least ``share`` of the ``ordered`` values do not exceed."""
    return ordered[max(math.ceil(share * len(ordered) - 1e-9), 1) - 1]


def keep(path: Path, step: int, responses: Sequence[Response]) -> None:
    """Append the ``responses`` of a step to a file, with times in seconds since the first of them began.

    Raises:
        OSError: the file cannot be written.
    """
    start = min((response.began for response in responses), default=0.0)
    prompts = {prompt: index for index, prompt in enumerate(dict.fromkeys(r.prompt for r in responses))}

    def since(moment: float | None) -> float | None:
        return None if moment is None else round(moment - start, 4)

    rows = [
        [
            prompts[r.prompt],
            *map(since, (r.began, r.generated, r.rewarded, r.ended)),
            *(r.tokens, r.server, r.outcome, round(r.tools, 4)),
        ]
        for r in responses
    ]
    line = json.dumps({"step": step, "responses": rows}, separators=(",", ":"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("\n" + line if file.tell() else line)  # after what may be half a line of a run that was killed


def read_kept(path: Path) -> dict[int, list[Response]]:
    """Return the responses of each step in a file of :func:`keep`, without lines that are not whole.

    Where a run began again, the steps that an earlier one had done from there on are left out.

    Raises:
        OSError: the file cannot be read.
    """
    steps: dict[int, list[Response]] = {}
    for line in path.read_text(errors="replace").splitlines():
        try:
            entry = json.loads(line)
            step = int(entry["step"])
            responses = [Response(str(prompt), *rest) for prompt, *rest in entry["responses"]]
        except (ValueError, TypeError, KeyError):
            continue
        while steps and next(reversed(steps)) >= step:
            steps.popitem()
        steps[step] = responses
    return steps
