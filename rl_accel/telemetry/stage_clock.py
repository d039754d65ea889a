"""Time of a training step by stage, and time of the generation stage by cause.

The seconds of the stages come from the framework's own timers. Time outside all timers is ``other``.

The generation is the period of ``gen`` seconds that starts with the first response. Let ``t(q)`` be the time by which a share ``q``
of the completed responses were generated. The generation consists of four parts, one after the other:

    most       until t(0.9)                      nine in ten responses are generated.
    waiting    t(0.9) to t(1)                    waiting for the longest responses.
    reward     t(1) to the last reward           rewards that do not overlap with generation.
    rest       the last reward to the end        storing, noticing the end (a poll), putting engines to sleep.

The idle share is the mean share of empty slots in the engines' batch: ``1 - integral(min(n(t), C)) / (C * gen)``. ``n(t)`` is the
number of responses in generation at time t. The capacity ``C`` is the number of engine slots, or the largest ``n(t)`` if smaller.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rl_accel.files import BAD_RECORD

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
    "testing": "#8d6e63",
}
"""Mapping from each stage of a training step (name of verl's timer) to its colour in pictures. Stages do not overlap."""

SLIME_NAMES = {
    "perf/step_time": "timing_s/step",
    "perf/rollout_time": "timing_s/gen",
    "perf/log_probs_time": "timing_s/old_log_prob",
    "perf/ref_log_probs_time": "timing_s/ref",
    "perf/values_time": "timing_s/values",
    "perf/actor_train_time": "timing_s/update_actor",
    "perf/critic_train_time": "timing_s/update_critic",
    "perf/update_weights_time": "timing_s/update_weights",
    "perf/save_model_time": "timing_s/save_checkpoint",
    "rollout/response_len/mean": "response_length/mean",
    "rollout/response_len/max": "response_length/max",
    "rollout/truncated_ratio": "response_length/clip_ratio",
}
"""Mapping from slime's name of a metric to verl's name of the same metric."""

SAVING = "save_checkpoint"
VALIDATION = "testing"
"""verl's timer of a validation. verl's V1 trainer counts it beside the seconds of the step, its older trainer among them."""
V1 = "training/off_policy/trajectory_"
"""Prefix of metrics that only verl's V1 trainer logs."""
STALENESS = "training/off_policy/trajectory_staleness/mean"
"""verl's metric for the mean number of weight updates between the generation and the training of a response."""
POLL_SECONDS = 2.0
"""Seconds between two looks of verl's V1 trainer whether a rollout is done."""
OVERLAPPING = frozenset({"timing_s/generate_async", "fully_async/trainer/idle_ratio"})
"""Metrics that only verl's trainers one_step_off and fully_async log. These trainers generate while they train."""
TRAINING = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
"""Stages of a training step whose seconds are proportional to the number of trained tokens."""
OTHER = "other"
PREFIX = "timing_s/"
FILE_NAME = "rl_accel_telemetry.jsonl"
"""Name of the file with the times of all responses. Its folder is verl's ``trainer.default_local_dir``."""

COMPLETED = "completed"
CANCELLED = "cancelled"
FAILED = "failed"


@dataclass(slots=True)
class ResponseTimes:
    """Times and final state of one response. Times are in seconds of the wall clock.

    Attributes:
        prompt: id of the prompt, equal for all responses to it in this step.
        began: start of the agent loop.
        generated: time of the last generated token; None if generation never finished.
        rewarded: time at which the reward was ready; None if there was no reward.
        ended: end of all work on the response.
        tokens: number of generated tokens; None if unknown.
        server: rollout server that generated the response, or its last turn; None if unknown.
        outcome: ``completed``, ``cancelled`` or ``failed``.
        tools: seconds of waiting for tool calls. The time of parallel calls counts once.
        step: training step for which the response was launched. It may be launched during the step before.
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
    step: int = 0

    @property
    def completed_at(self) -> float:
        """Time at which the response and its reward (if any) were ready. Meaningful for completed responses only."""
        return self.ended if self.rewarded is None else self.rewarded


def by_prompt(responses: Sequence[ResponseTimes]) -> list[list[ResponseTimes]]:
    """Returns one list of responses per prompt."""
    groups: dict[str, list[ResponseTimes]] = {}
    for response in responses:
        groups.setdefault(response.prompt, []).append(response)
    return list(groups.values())


def reward_seconds(responses: Sequence[ResponseTimes]) -> list[float]:
    """Returns the seconds from the last token to the reward, of each response that has a reward."""
    times = [(response.generated, response.rewarded) for response in responses]
    return [rewarded - generated for generated, rewarded in times if generated is not None and rewarded is not None]


def stages(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the seconds of each stage of a training step, by verl's name of the stage, and under ``other`` the rest of the step.

    ``metrics`` are those that verl logs for a step, including ``timing_s/<stage>``. Validation is no part of the step. Returns {}
    if the metrics are not of a training step, or if a duration is negative or not finite.
    """
    whole = metrics.get(PREFIX + "step")
    timed = {stage: float(metrics[PREFIX + stage]) for stage in STAGES if PREFIX + stage in metrics}
    timed.pop(VALIDATION, None)
    if not OVERLAPPING.isdisjoint(metrics):  # the time of a step does not include checkpoints
        timed.pop(SAVING, None)
    if whole is None or not 0 < whole < math.inf or not all(0 <= value < math.inf for value in timed.values()):
        return {}
    return {**timed, OTHER: float(whole) - sum(timed.values()) - validation_within_step(metrics)}


def validation_within_step(metrics: Mapping[str, float], prefix: str = PREFIX) -> float:
    """Returns the seconds of a validation that ``timing_s/step`` includes; 0 if there was none, or outside the step.

    verl's V1 trainer validates after the step, its older trainer within it. There, the seconds of the step that no stage explains
    are at least those of the validation.
    """
    seconds = metrics.get(prefix + VALIDATION, 0.0)
    stages_seconds = sum(metrics.get(prefix + stage, 0.0) for stage in STAGES)  # with the validation
    is_within = metrics.get(prefix + "step", 0.0) >= stages_seconds * (1 - 1e-6)  # timers are rounded
    return seconds if is_within and not any(name.startswith(V1) for name in metrics) else 0.0


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns the share of each stage in a step. ``seconds`` are the durations of all stages, by name."""
    whole = sum(seconds.values())
    return {stage: value / whole if whole else 0.0 for stage, value in seconds.items()}


def completion(responses: Sequence[ResponseTimes]) -> dict[str, float]:
    """Returns metrics of the responses of a step, by name; {} without responses.

    They are the numbers of responses and tokens, and quantiles and maximum of the seconds from the start of a completed response to
    its reward.
    """
    if not responses:
        return {}
    numbers: dict[str, float] = {"responses": len(responses), "tokens": sum(r.tokens or 0 for r in responses)}
    if seconds := [r.completed_at - r.began for r in responses if r.outcome == COMPLETED]:
        numbers["completion_p50_seconds"] = quantile(seconds, 0.5)
        numbers["completion_p90_seconds"] = quantile(seconds, 0.9)
        numbers["completion_p99_seconds"] = quantile(seconds, 0.99)
        numbers["completion_longest_seconds"] = max(seconds)
    return numbers


def generation(
    responses: Sequence[ResponseTimes], seconds: float, slots: int | None = None, began: float | None = None
) -> dict[str, float]:
    """Returns metrics of the generation stage of one step, by name. Leaves out metrics whose value is unknown.

    - ``most_seconds``, ``waiting_seconds``, ``reward_seconds``, ``rest_seconds``: seconds until nine in ten completed responses are
      generated; from then until all are; from then until the last reward; from then until the end of the stage.
    - ``idle_share``: mean share of empty slots in the engines' batch (formula in the module's docstring).
    - ``after_half_seconds``: seconds from when half of the completed responses are generated until all are.
    - ``concurrency``: maximum number of responses in generation at the same time.
    - ``seconds_per_token``: median over completed responses.
    - ``cancelled``: number of cancelled responses.
    - ``tool_share``: share of tool calls in the generation time of completed responses, if tools were used.

    Args:
        responses: responses of one step in any order, at least one response.
        seconds: duration of the generation stage in seconds, above 0.
        slots: number of requests that all engines together can run at once, if known.
        began: start of the generation stage, by the clock of the responses. None: start of the first response.
    """
    start = min(response.began for response in responses) if began is None else began

    def into(moment: float) -> float:
        return min(max(moment - start, 0.0), seconds)

    numbers: dict[str, float] = {"cancelled": sum(r.outcome == CANCELLED for r in responses)}
    completed = [(r, r.generated) for r in responses if r.outcome == COMPLETED and r.generated is not None]
    if completed:
        generated = [into(moment) for _, moment in completed]
        half, nearly, last = (quantile(generated, share) for share in (0.5, 0.9, 1.0))
        rewarded = max([last, *(into(r.rewarded) for r, _ in completed if r.rewarded is not None)])
        numbers["most_seconds"] = nearly
        numbers["waiting_seconds"] = last - nearly
        numbers["reward_seconds"] = rewarded - last
        numbers["rest_seconds"] = seconds - rewarded
        numbers["after_half_seconds"] = last - half
        if tools := sum(r.tools for r, _ in completed):
            numbers["tool_share"] = min(tools / sum(moment - r.began for r, moment in completed), 1.0)
    if per_token := [(moment - r.began) / r.tokens for r, moment in completed if r.tokens]:
        numbers["seconds_per_token"] = statistics.median(per_token)

    spans = [(into(r.began), into(r.ended if r.generated is None else r.generated)) for r in responses]
    # At equal times, ends sort before starts, because a slot is free before the next response takes this slot.
    events = sorted(event for begin, end in spans if end > begin for event in ((begin, 1), (end, -1)))
    running = np.cumsum([change for _, change in events], dtype=np.int64)[:-1]  # between each event and the next
    lasted = np.diff([moment for moment, _ in events])
    numbers["concurrency"] = concurrency = int(max(running, default=0))
    if concurrency:
        capacity = concurrency if slots is None else min(concurrency, slots)
        occupied = float(np.minimum(running, capacity) @ lasted)
        numbers["idle_share"] = min(max(1 - occupied / (capacity * seconds), 0.0), 1.0)
    return numbers


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the smallest of ``values`` for which at least ``share`` (0 to 1) of the values are not larger."""
    return float(np.quantile(values, share, method="inverted_cdf"))


def keep(path: Path, step: int, responses: Sequence[ResponseTimes]) -> None:
    """Appends the times of the ``responses`` of a training step to the file ``path``, in seconds since the first response began.

    Raises:
        OSError: the file cannot be written.
    """
    start = min((response.began for response in responses), default=0.0)
    prompts = {prompt: index for index, prompt in enumerate(dict.fromkeys(r.prompt for r in responses))}
    rows = []
    for r in responses:
        moments = (r.began, r.generated, r.rewarded, r.ended)
        times = [None if moment is None else round(moment - start, 4) for moment in moments]
        rows.append([prompts[r.prompt], *times, r.tokens, r.server, r.outcome, round(r.tools, 4)])
    line = json.dumps({"step": step, "responses": rows}, separators=(",", ":"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("\n" + line if file.tell() else line)  # a killed run may have left half a line


def read_kept(path: Path) -> dict[int, list[ResponseTimes]]:
    """Returns the responses in a file written by :func:`keep`, by step number. Skips incomplete lines.

    A run that was resumed repeats steps. When the file begins a step again, the responses read so far of this and of later steps
    are dropped.

    Raises:
        OSError: the file cannot be read.
    """
    steps: dict[int, list[ResponseTimes]] = {}
    for line in path.read_text(errors="replace").splitlines():
        try:
            entry = json.loads(line)
            step = int(entry["step"])
            responses = [ResponseTimes(str(prompt), *rest) for prompt, *rest in entry["responses"]]
        except BAD_RECORD:
            continue
        while steps and next(reversed(steps)) >= step:
            steps.popitem()
        steps[step] = responses
    return steps
