"""Time of a training step by stage, and time of the generation stage by cause, from measured completion times.

Nothing here is modelled. The seconds of stages come from the framework's own timers; time outside all timers is ``other``. The
generation is the window of ``gen`` seconds that starts with the first response. Let ``t(q)`` be the time by which a share ``q`` of
the completed responses were generated. The window consists of four parts, one after the other:

    most       until t(0.9)                      nine in ten responses are generated.
    waiting    t(0.9) to t(1)                    waiting for the longest responses.
    reward     t(1) to the last reward           rewards that do not overlap with generation.
    rest       the last reward to the end        storing, noticing the end (a poll), putting engines to sleep.

The idle share is the share of empty slots in the batch, ``1 - integral(min(n(t), C)) / (C * gen)``. ``n(t)`` is the number of
responses in generation at time t. The capacity ``C`` is the maximum of ``n(t)``, or the number of engine slots if that is smaller.
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
"""Timers of verl that do not overlap and lie within the step, with their colours in pictures."""

OTHER = "other"
PREFIX = "timing_s/"
FILE_NAME = "rl_accel_telemetry.jsonl"
"""Name of the file with responses, in verl's ``trainer.default_local_dir``."""

COMPLETED, CANCELLED, FAILED = "completed", "cancelled", "failed"


@dataclass(slots=True)
class Response:
    """One response. Times are wall-clock seconds, so that times of several processes can be compared.

    Attributes:
        prompt: id of the prompt group.
        began: start of the response's agent loop.
        generated: time of the last token; None if generation never finished.
        rewarded: time of the reward; None if there was no reward.
        ended: time at which all work on the response had ended.
        tokens: number of generated tokens; None if unknown.
        server: rollout server that generated the response (the last turn, if there are several); None if unknown.
        outcome: ``completed``, ``cancelled`` or ``failed``.
        tools: seconds of the generation spent waiting for tools; consecutive calls add up.
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
        """Time at which a completed response and its reward were finished."""
        return self.ended if self.rewarded is None else self.rewarded


def stages(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the seconds of each timed stage and of ``other``, which add up to the step; {} if this is no training step.

    Args:
        metrics: metrics that verl logs for a step, including ``timing_s/<stage>``.
    """
    whole = metrics.get(PREFIX + "step")
    if whole is None or not math.isfinite(whole):
        return {}
    timed = {stage: float(metrics[PREFIX + stage]) for stage in STAGES if PREFIX + stage in metrics}
    return {**timed, OTHER: float(whole) - sum(timed.values())}


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns each stage's share of a step; ``seconds`` holds all stages of the step. The shares add up to 1."""
    whole = sum(seconds.values())
    return {stage: value / whole for stage, value in seconds.items()} if whole > 0 else dict.fromkeys(seconds, 0.0)


def completion(responses: Sequence[Response]) -> dict[str, float]:
    """Returns the numbers of responses and tokens, and quantiles of completed responses' seconds until the reward; {} if empty."""
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
    """Returns the parts of a generation and further metrics by name, without unknown ones. ``responses`` may have any order.

    Names: the four parts and the idle share as above. ``after_half_seconds``: t(0.5) to t(1). ``concurrency``: maximum number of
    responses in generation at once. ``seconds_per_token``: median over completed responses. ``cancelled``: number of cancelled
    responses. ``tool_share``: share of tool calls in the generation time of completed responses, if tools were used.

    Args:
        responses: responses of one step, at least one.
        seconds: duration of the stage, above 0.
        slots: number of requests that the engines can run at once, if known.
        began: start of the stage by the clock of the responses; default: start of the first response.
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
    # At equal times, ends sort before starts: a slot is free before the next response takes it.
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
    """Returns the smallest value that at least a share ``share`` of the ``ordered`` values do not exceed."""
    return ordered[max(math.ceil(share * len(ordered) - 1e-9), 1) - 1]


def keep(path: Path, step: int, responses: Sequence[Response]) -> None:
    """Appends the ``responses`` of a step to a file, with times in seconds since the first response began.

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
        file.write("\n" + line if file.tell() else line)  # a killed run may have left half a line


def read_kept(path: Path) -> dict[int, list[Response]]:
    """Returns the responses of each step in a file of :func:`keep`. Skips incomplete lines.

    If a run was resumed at an earlier step, the older records of that step and of later steps are dropped.

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
