"""The command ``rl-accel profile``. Shows the time of a run's training steps in tables and a picture, and estimates savings."""

import contextlib
import json
import math
import statistics
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from rl_accel.errors import RlAccelError
from rl_accel.features import RewardTimeoutFlags
from rl_accel.rollout.workload import from_groups
from rl_accel.telemetry import stage_clock
from rl_accel.telemetry.aggregates import (
    LEAST_STEPS,
    POLL_SECONDS,
    SMALLEST_GAIN,
    STALENESS,
    V1,
    Estimate,
    Range,
    Rollouts,
    estimate,
    in_rounds,
    launched_by,
)
from rl_accel.telemetry.readers import TELEMETRY, Logged, read
from rl_accel.telemetry.stage_clock import (
    CANCELLED,
    COMPLETED,
    FAILED,
    FILE_NAME,
    OTHER,
    PREFIX,
    SLIME_NAMES,
    Response,
)

WARMUP = 2
WAITING, NOTICING = "waiting for the longest responses", "noticing that the rollout is done"
_TABLES = {"drafts": "drafted", "balance": "slots_in_use", "skip_zero": "rows"}
"""Features whose metrics are printed in a table, each with the metric that must be above 0 for the table to be printed."""
NOTHING_HELPS = "Nothing of the pack would shorten a step of this run by more than can be told."
_LIMITS = RewardTimeoutFlags()
"""Default time limits of the feature reward_timeout."""
_NEVER_ZERO = {
    "timing_s/values",
    "timing_s/update_critic",
    "actor/kl_loss",
    "actor/entropy_loss",
    "actor/reward_kl_penalty",
}
"""Metrics of verl that indicate a critic, a KL term or an entropy term. In these cases, groups with equal rewards may influence
training."""

_TICK = 0.001
"""Seconds per tick of the clock in a simulation of tail_batching."""
_NOT_ESTIMATED = (
    "not in these numbers: final_output (host seconds of vLLM for each token), and drafts, which `rl-accel bench drafts` estimates"
    " from the files of trainer.rollout_data_dir"
)
_LARGE_OLD_LOG_PROB, _LARGE_STAGE = 0.15, 0.5
"""Shares of a step above which :func:`levers` advises a setting of verl: for ``old_log_prob``, and for generation or training."""

_PARTS = {
    "most_seconds": ("nine in ten responses", "#4878a8"),
    "waiting_seconds": ("waiting for the longest", "#b5498f"),
    "reward_seconds": ("rewards", "#9bc0de"),
    "unexplained_seconds": ("waiting that no length explains", "#9bc0de"),
    "rest_seconds": ("noticing, storing", "#b7b7a4"),
}
_OTHER_COLOUR = "#d9d9d9"
_LINES = {COMPLETED: "#4878a8", CANCELLED: "#e8a24c", FAILED: "#d1495b", "reward": "#2a9d5c"}
_MOST_ROWS = 2000

_NUMBERS = {
    "idle_share": ("idle share of generation", "{:.1%}"),
    "concurrency": ("most responses at once", "{:,.0f}"),
    "responses": ("responses a step", "{:,.0f}"),
    "cancelled": ("responses cancelled a step", "{:,.0f}"),
    "tokens": ("tokens a step", "{:,.0f}"),
    "preemptions": ("preemptions a step", "{:,.1f}"),
    "completion_p50_seconds": ("a response and its reward, p50", "{:.3g} s"),
    "completion_p90_seconds": ("a response and its reward, p90", "{:.3g} s"),
    "completion_p99_seconds": ("a response and its reward, p99", "{:.3g} s"),
    "completion_longest_seconds": ("the longest", "{:.3g} s"),
}
"""Label and number format of each metric that is printed in a line, by name of the metric."""


@dataclass(frozen=True)
class Saving:
    """A part of a mean training step, and advice that would shorten this part.

    Attributes:
        name: description of the part.
        seconds: duration of the part in a mean step.
        advice: flag or setting that would shorten the part.
        gain: estimated seconds that the advice would save per step, with an interval; None if unknown.
        arithmetic: basis of ``gain``, or the reason why ``gain`` is unknown.
        ours: whether the advice is a feature of rl-accel.
    """

    name: str
    seconds: float
    advice: str
    gain: Range | None
    arithmetic: str
    ours: bool = True

    @property
    def at_most(self) -> float:
        """Estimated gain in seconds per step or, if unknown, the seconds of the whole part."""
        return self.gain.mean if self.gain else self.seconds


@dataclass(frozen=True)
class Profile:
    """Time of a run's training steps by stage and cause, and possible savings.

    Attributes:
        folder: path that was read.
        logged: the log of the run.
        metrics: metrics of each logged step, by step number, with verl's names also for slime.
        staged: seconds of each stage of the measured steps, by step number. Warm-up steps are left out.
        notes: texts that each say which logged steps are left out and why.
        group: number of responses per prompt; None: the number in the log, if any.
    """

    folder: Path
    logged: Logged
    metrics: Mapping[int, Mapping[str, float]]
    staged: Mapping[int, Mapping[str, float]]
    notes: Sequence[str]
    group: int | None

    @property
    def is_v1(self) -> bool:
        """True for verl's V1 trainer."""
        return any(name.startswith(V1) for name in self.metrics[self.steps[-1]])

    @property
    def overlaps(self) -> bool:
        """True if rollouts overlap with training, so that they train older weights."""
        return self.logged.overlaps or any(self.metrics[step].get(STALENESS, 0) for step in self.steps)

    @property
    def log(self) -> Path:
        """First file of the log."""
        return self.logged.files[0]

    @property
    def steps(self) -> list[int]:
        """Numbers of the measured steps, which exclude the warm-up steps."""
        return list(self.staged)

    @cached_property
    def stages(self) -> Mapping[str, float]:
        """Mean seconds of each stage in a measured step, by name of the stage."""
        names = [name for name in (*stage_clock.STAGES, OTHER) if any(name in its for its in self.staged.values())]
        return {name: statistics.fmean(its.get(name, 0.0) for its in self.staged.values()) for name in names}

    @property
    def step_seconds(self) -> float:
        """Mean duration of a measured step in seconds."""
        return sum(self.stages.values())

    @property
    def last_seconds(self) -> float:
        """Seconds of the generation stage in the last step."""
        return self.staged[self.steps[-1]].get("gen", 0.0)

    @cached_property
    def on(self) -> frozenset[str]:
        """Names of the enabled features."""
        last = self.metrics[self.steps[-1]]
        return frozenset(name.split("/")[1] for name, value in last.items() if name.endswith("/applied") and value)

    @cached_property
    def noted(self) -> Mapping[int, Mapping[str, float]]:
        """Metrics of the feature telemetry in each measured step, by step number and name. Unknown metrics are left out."""
        return {step: _below(TELEMETRY, self.metrics[step]) for step in self.steps}

    @cached_property
    def numbers(self) -> Mapping[str, float]:
        """Means of the metrics of the feature telemetry, by name."""
        return _means(self.noted.values())

    def table(self, feature: str) -> Mapping[str, float]:
        """Returns the means of the metrics of ``feature`` by name."""
        return _means([_below(f"rl_accel/{feature}/", self.metrics[step]) for step in self.steps])

    @cached_property
    def kept_files(self) -> Sequence[Path]:
        """Files with the times of all responses."""
        return sorted((self.folder if self.folder.is_dir() else self.folder.parent).rglob(FILE_NAME))

    @cached_property
    def kept(self) -> Mapping[int, Sequence[Response]]:
        """Responses of all steps, including the warm-up, by step number. Times are in seconds since the first response began."""
        return stage_clock.read_kept(self.kept_files[0]) if self.numbers and len(self.kept_files) == 1 else {}

    @cached_property
    def responses(self) -> Mapping[int, Sequence[Response]]:
        """Responses of each measured step, by step number, if metrics of the step's generation are known."""
        known = [step for step, its in self.noted.items() if "concurrency" in its]
        return {step: self.kept[step] for step in known if step in self.kept}

    @property
    def last(self) -> Sequence[Response]:
        """Responses of the last measured step; empty if the times of the responses are unknown."""
        return self.responses.get(self.steps[-1], [])

    @property
    def rests(self) -> list[float]:
        """Seconds from the last reward of a step to the end of its generation, one number per step."""
        return [its["rest_seconds"] for its in self.noted.values() if "rest_seconds" in its]

    @cached_property
    def estimate(self) -> Estimate | None:
        """Parts of generation as estimated from the log, if their times are unknown and the log says enough."""
        prompts, group = self.logged.batch()
        polls = not self.on & {"sampler", "tail_batching"}
        rollouts = Rollouts.of([self.metrics[step] for step in self.steps], self.group or group, prompts, polls)
        if rollouts is None or self.overlaps or self.responses or "tail_batching" in self.on:
            return None
        return estimate(rollouts, _LIMITS.minimum)

    @property
    def parts(self) -> Mapping[str, float]:
        """Mean seconds of each part of generation, measured or estimated, by name; {} if unknown."""
        measured = {name: self.numbers[name] for name in _PARTS if name in self.numbers}
        if measured or self.estimate is None:
            return measured
        found = self.estimate
        parts = {
            "waiting_seconds": found.waiting.mean,
            "unexplained_seconds": found.unexplained.mean,
            "rest_seconds": found.polling.mean + found.storing,
        }
        parts["most_seconds"] = max(self.stages["gen"] - sum(parts.values()), 0.0)
        return {name: seconds for name, seconds in parts.items() if seconds}

    @cached_property
    def zero_groups(self) -> tuple[Sequence[float], str]:
        """Result of :func:`_zero_shares`; no shares if skip_zero is on or cannot work."""
        names = {name for its in self.metrics.values() for name in its}
        is_possible = self.folder.is_dir() and "skip_zero" not in self.on and _NEVER_ZERO.isdisjoint(names)
        return _zero_shares(self.folder) if is_possible else ([], "")

    @cached_property
    def savings(self) -> Sequence[Saving]:
        """Possible savings, the largest first; savings by other means than features of rl-accel come last."""
        return sorted(_savings(self), key=lambda saving: (not saving.ours, -saving.at_most))

    @property
    def missing(self) -> list[str]:
        """Texts that each say which results are unknown and why."""
        if not self.numbers:
            what = "waiting, rewards, completion times and preemptions as measured"
            why = "the run had no +rl_accel.telemetry.enable=True"
            return [f"{what}: {'telemetry is for verl' if self.logged.is_slime else why}"]
        missing = []
        if len(self.kept_files) != 1:
            what = "what tail_batching and reward_timeout would save, the servers, and the picture of responses"
            missing.append(f"{what}: {len(self.kept_files)} files named {FILE_NAME} are here, not one")
        if "concurrency" not in self.numbers:
            missing.append("parts of generation: in this trainer mode responses are under way when the stage begins")
        if unknown := sum("preemptions" not in its for its in self.noted.values() if its):
            why = "a server's own counter could not be read (vLLM: rollout.disable_log_stats=False)"
            missing.append(f"preemptions of {unknown} of {len(self.steps)} steps: {why}")
        return missing


def read_run(folder: Path, warmup: int = WARMUP, group: int | None = None) -> Profile:
    """Reads the run in ``folder``, or in several paths joined by commas. Skips the first ``warmup`` steps, but never the last step.

    ``group``: number of responses per prompt; None: the number in the log, if any.

    Raises:
        RlAccelError: ``folder`` contains no run, or more than one run.
        OSError: a file cannot be read.
    """
    logged = read(*([str(folder)] if folder.exists() else str(folder).split(",")))
    metrics = {
        step: {SLIME_NAMES.get(name, name): value for name, value in its.items()} for step, its in logged.steps.items()
    }
    for its in metrics.values() if logged.is_slime and logged.overlaps else ():
        within = sum(its.get(PREFIX + name, 0.0) for name in ("update_weights", "save_checkpoint"))
        its[PREFIX + "gen"] = max(its.get("perf/train_wait_time", 0.0) - within, 0.0)
    staged = {step: seconds for step, its in metrics.items() if (seconds := stage_clock.stages(its))}
    if not staged:
        wanted = "timing_s/step, as verl logs it, or perf/step_time, as slime does"
        raise RlAccelError(f"{folder}: {logged}, but no step has its seconds: wanted {wanted}")
    timers = {PREFIX + name for name in ("step", *stage_clock.STAGES)}
    notes = list(logged.notes)
    if unknown := [str(step) for step, its in metrics.items() if step not in staged and timers & its.keys()]:
        notes.append(f"left out, because a stage or the step has an invalid duration: {', '.join(unknown)}")
    measured = list(staged.items())[min(warmup, len(staged) - 1) :]
    return Profile(folder, logged, metrics, dict(measured), notes, group)


def _below(prefix: str, logged: Mapping[str, float]) -> dict[str, float]:
    """Returns the finite metrics whose names start with ``prefix``, by the rest of the name."""
    below = {name.removeprefix(prefix): value for name, value in logged.items() if name.startswith(prefix)}
    return {name: value for name, value in below.items() if math.isfinite(value)}


def _means(of_steps: Collection[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for its in of_steps for name in its)
    return {name: statistics.fmean(its[name] for its in of_steps if name in its) for name in names}


# Savings


def _savings(run: Profile) -> list[Saving]:
    """Returns the possible savings in a run."""
    stages, gen = run.stages, run.stages.get("gen", 0.0)
    savings = []
    if "concurrency" in run.numbers:
        savings = _measured(run)
    elif gen > 0 and run.overlaps:
        name, why = "waiting for rollouts", "they overlap with training, so that only this part of them delays a step"
        if run.is_v1:
            savings = [_saving(run, name, gen, (None, why), "sampler")]
        else:
            savings = [Saving(name, gen, "more replicas", None, why, ours=False)]
    elif gen > 0 and run.estimate is not None:
        savings = _estimated(run, run.estimate)
    elif gen > 0 and not run.numbers:
        wanted = (
            f"{LEAST_STEPS} steps with response_length/mean and /max, or +rl_accel.telemetry.enable=True, tell how much of it is"
            " waiting and which feature would save it"
        )
        advice = ", ".join(name for name in ("sampler", "tail_batching") if name not in run.on)
        name = "generation, waiting included"
        savings = [Saving(name, gen, advice or "on already", None, wanted, ours=bool(advice))]
    if "reward" in stages:
        needed = "unknown without the time of each reward, which +rl_accel.telemetry.enable=True logs"
        savings.append(_saving(run, "rewards", stages["reward"], (None, needed), "reward_timeout"))
    if stages.get("adv", 0.0) > 0:
        has_critic = stages.keys() & {"values", "update_critic"}
        measured = "; `rl-accel bench gae` measures your shape"
        at_most = "at most all of it" + (measured if has_critic else " with REINFORCE++, nothing with GRPO")
        features = ("gae", "advantages") if has_critic else ("advantages", "gae")
        saving = _saving(run, "advantages", stages["adv"], (None, at_most), *features)
        if "reward" not in stages and not run.is_v1 and not run.numbers:
            advice = f"+rl_accel.reward_timeout.enable=True, {saving.advice}"
            why = "early versions of verl time them as one, so the log does not tell which part is rewards"
            saving = replace(saving, name="rewards and advantages", advice=advice, arithmetic=why)
        savings.append(saving)
    shares, how = run.zero_groups
    if shares:
        seconds = stages.get("update_actor", 0.0) * np.array(shares)
        gain = Range.of(seconds[1:], float(seconds[0]))
        savings.append(_saving(run, "training of groups with equal rewards", gain.mean, (gain, how), "skip_zero"))
    return savings


def _saving(run: Profile, name: str, seconds: float, gain: tuple[Range | None, str], *features: str) -> Saving:
    """Returns the estimated saving by the first of ``features`` in a part of a step.

    If one of ``features`` is on already, the result has no estimate, and says that the part is the rest that the feature leaves.
    """
    if running := sorted(run.on.intersection(features)):
        return Saving(name, seconds, f"{', '.join(running)}: on", None, "this is what is left of it", ours=False)
    is_slime = run.logged.is_slime
    flag = f"{features[0]}, with rl-accel slime-config" if is_slime else f"+rl_accel.{features[0]}.enable=True"
    return Saving(name, seconds, flag, *gain)


def _measured(run: Profile) -> list[Saving]:
    """Returns savings in the generation of a run with telemetry."""
    steps = list(run.responses.values())
    names = ("most_seconds", "waiting_seconds", "reward_seconds", "rest_seconds")
    most, waiting, reward, rest = (run.numbers.get(name, 0.0) for name in names)
    share = run.numbers.get("tool_share", 0.0)
    savings = [
        _saving(run, WAITING, waiting, _gain_of_tail_batching(steps), "tail_batching"),
        _saving(run, "rewards after the last generation", reward, _gain_of_reward_timeout(steps), "reward_timeout"),
        _saving(run, NOTICING, rest, _gain_of_sampler(run.rests), "sampler", "tail_batching"),
        _generating(most * (1 - share)),
    ]
    if share:
        how = f"{share:.0%} of a response's time, by verl's own timer of its tool calls"
        hanging = "quicker tools; for those that hang: rl_accel.tail_batching.agent_loop_limit"
        savings.append(Saving("tools of nine in ten responses", most * share, hanging, None, how, ours=False))
    return savings


def _estimated(run: Profile, found: Estimate) -> list[Saving]:
    """Returns savings in the generation of a run without telemetry."""
    rollouts, count = found.rollouts, len(found.rollouts.seconds)
    noticing = found.polling.mean + found.storing
    explained = run.stages["gen"] - noticing - found.unexplained.mean
    savings = [_generating(max(explained - found.waiting.mean, 0.0))]
    if found.polling.mean:
        how = (
            f"the trainer looks every {POLL_SECONDS:g} s whether a rollout is done; how long each of {count} rollouts had been done"
            " is estimated from its longest response and the seconds of the others"
        )
        savings.append(_saving(run, NOTICING, noticing, (found.polling, how), "sampler", "tail_batching"))
    if found.unexplained.mean:
        how = (
            f"at most, and for rewards that execute something: response lengths explain {format_seconds(explained)} of {count}"
            " rollouts; the rest may also be tools or the reading of prompts."
            f" Less a limit of {_LIMITS.minimum:g} s for each rollout"
        )
        unexplained = found.unexplained.mean, (found.over, how)
        savings.append(_saving(run, _PARTS["unexplained_seconds"][0], *unexplained, "reward_timeout"))
    if found.tail is None:
        how = "the log does not say how many responses a step has: --responses and their launch line would"
    else:
        per = f"{rollouts.group or '4, 8 and 16'} response{'s' * (rollouts.group != 1)} a prompt"
        per += "" if rollouts.group else " (--responses says how many)"
        training = sum(run.stages.get(name, 0.0) for name in stage_clock.TRAINING)
        whole = found.tail.mean + found.polling.mean + training * (1 - found.trained.mean)
        pace, base = format_seconds(found.pace.mean), format_seconds(found.base.mean)
        how = (
            f"published shapes of lengths, stretched to the mean, the longest and the share at the limit of {count} batches of"
            f" {rollouts.responses} responses, in rounds with {per}. A token of the longest takes {pace}, all else {base}."
            " The engine is assumed as fast with 1.6 times the requests."
            f" With the polls and the training of shorter responses {format_seconds(max(whole, 0.0))} a step"
            f"{'' if rollouts.is_v1 else ', with the V1 trainer of verl 0.9'}"
        )
    return [*savings, _saving(run, WAITING, found.waiting.mean, (found.tail, how), "tail_batching")]


def _generating(seconds: float) -> Saving:
    unknown = "how an engine's speed changes with its requests is not in these numbers"
    advice = "more replicas, or a smaller max_response_length"
    return Saving("generating nine in ten responses", seconds, advice, None, unknown, ours=False)


def _again(values: Sequence[float]) -> Range:
    """Returns the mean of ``values`` with the 95% interval of a bootstrap."""
    drawn = np.random.default_rng(0).choice(values, (1000, len(values)))
    return Range.of(drawn.mean(axis=1), statistics.fmean(values))


def _zero_shares(folder: Path) -> tuple[Sequence[float], str]:
    """Returns the share of characters in prompt groups whose rewards are all equal, and the basis of this share in words.

    Prompts and responses are read from the files of verl's ``trainer.rollout_data_dir`` below ``folder``. The first number is the
    measured share, all others are shares of bootstrap draws. There are no numbers if no group has equal rewards.
    """
    of_groups: list[tuple[int, bool]] = []  # size in characters, and whether all rewards are equal
    for path in folder.rglob("*.jsonl"):
        groups: dict[str, list[tuple[float, int]]] = {}
        with contextlib.suppress(KeyError, TypeError, ValueError):  # another file, or a file that is being written
            for line in path.read_text(encoding="utf-8").split("\n") if path.stem.isdigit() else ():
                if line.strip():  # texts may hold other characters that end lines
                    row = json.loads(line)
                    size = len(row["input"]) + len(row["output"])
                    groups.setdefault(row["input"], []).append((row["score"], size))
        for group in groups.values():
            scores, its = zip(*group, strict=True)
            of_groups.append((sum(its), len(scores) > 1 and all(score == scores[0] for score in scores)))
    if not any(is_zero for _, is_zero in of_groups):
        return [], ""
    sizes, is_zero = np.array(of_groups).T
    zero, rng = sizes * is_zero, np.random.default_rng(0)
    draws = (rng.integers(len(sizes), size=len(sizes)) for _ in range(1000))
    shares = [float(zero[rows].sum() / sizes[rows].sum()) for rows in (np.arange(len(sizes)), *draws)]
    how = f"{is_zero.sum()} of {len(of_groups)} groups, {shares[0]:.0%} of the text"
    return shares, f"{how}; advantage 0 where rewards are compared in groups"


def _gain_of_tail_batching(steps: Sequence[Sequence[Response]]) -> tuple[Range | None, str]:
    known = [groups for responses in steps if (groups := prompt_ticks(responses))]
    if not known:
        return None, "no step in which every response completed"
    prompts, responses = max(map(len, known)), max(len(group) for groups in known for group in groups)
    launched, each = launched_by(prompts, responses)
    rng, gains, rounds = np.random.default_rng(0), [], []
    for draw in range(21):
        drawn = known if draw == 0 else [known[row] for row in rng.integers(len(known), size=len(known))]
        as_it_is = _TICK * statistics.fmean(max(max(group) for group in groups) for groups in drawn)
        workload = replace(from_groups([group for groups in drawn for group in groups], ""), seen=None)
        rounds.append(_TICK * in_rounds(workload, prompts, responses, launched, each, draw)[0])
        gains.append(max(as_it_is - rounds[-1], 0.0))
    return Range.of(gains[1:], gains[0]), (
        f"the seconds of {len(known) * prompts * responses} responses, drawn again in rounds of {launched} prompts for {prompts}"
        f" trained and {each} responses for {responses}, the rest in long rounds: {rounds[0]:.2f} s a rollout instead of"
        f" {gains[0] + rounds[0]:.2f} s"
    )


def prompt_ticks(responses: Sequence[Response]) -> list[list[float]] | None:
    """Returns for each prompt the ticks from the start of the step's first response to the last token of each of its responses.

    Returns None without responses. Also returns None if a response was cancelled or failed, because the full time of this response
    is unknown.
    """
    if not responses or any(response.outcome != COMPLETED for response in responses):
        return None
    return [[(r.generated or r.ended) / _TICK for r in group] for group in stage_clock.by_prompt(responses)]


def levers(run: Profile) -> list[str]:
    """Returns texts with advice on verl's own settings, which may save more time than the features of rl-accel.

    The advice depends on the share of each stage in a step.
    """
    shares = {} if run.logged.is_slime else stage_clock.shares(run.stages)
    found = []
    if shares.get("old_log_prob", 0.0) > _LARGE_OLD_LOG_PROB:
        what = "algorithm.rollout_correction.bypass_mode=True trains with the rollout's own probabilities instead"
        found.append(f"verl: old_log_prob takes {shares['old_log_prob']:.0%} of a step; {what}.")
    training = sum(shares.get(name, 0.0) for name in ("old_log_prob", "ref", "update_actor", "update_critic"))
    if training > _LARGE_STAGE:
        what = "actor_rollout_ref.actor.use_dynamic_bsz=True packs responses of different lengths"
        found.append(f"verl: training takes {training:.0%} of a step; {what}, if it is not on.")
    if shares.get("gen", 0.0) > _LARGE_STAGE and run.numbers.get("preemptions", 0.0) > 0:
        what = "rollout.enable_prefix_caching reads a prompt once for all its responses, enable_chunked_prefill delays others less"
        found.append(
            f"verl: the engines preempt {run.numbers['preemptions']:,.0f} requests a step; {what}, if they are not on."
        )
    return found


def _gain_of_reward_timeout(steps: Sequence[Sequence[Response]]) -> tuple[Range | None, str]:
    known = [
        [(r.generated, r.rewarded) for r in responses if r.generated is not None and r.rewarded is not None]
        for responses in steps
    ]
    durations = sorted(end - begin for rewards in known for begin, end in rewards)
    if not durations:
        return None, "no reward was noted"
    nine_in_ten = stage_clock.quantile(durations, 0.9)
    scale, slack, least = _LIMITS.scale, _LIMITS.slack, _LIMITS.minimum
    limit = max(scale * nine_in_ten + slack, least)
    gains = [
        max(end for _, end in rewards) - max(min(end, begin + limit) for begin, end in rewards)
        for rewards in known
        if rewards
    ]
    return _again(gains), (
        f"at most, and for rewards that execute something: rewards replayed with a limit of {limit:.1f} s, which is "
        f"max({scale} x {nine_in_ten:.2f} s (nine in ten take no longer) + {slack} s, {least} s)"
    )


def _gain_of_sampler(rests: Sequence[float]) -> tuple[Range | None, str]:
    if len(rests) < 2:
        return None, "one step alone does not tell polling from the rest"
    mean, shortest = statistics.fmean(rests), min(rests)
    how = f"mean {mean:.2f} s less the shortest of {len(rests)} steps, {shortest:.2f} s, whose poll came in time"
    return _again([rest - shortest for rest in rests]), how


# The command


@click.command()
@click.argument("run_dir", metavar="LOG", type=click.Path(path_type=Path))
@click.option("--warmup", type=click.IntRange(0), default=WARMUP, show_default=True, help="First steps to leave out.")
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    help="Where to write the PNG.  [default: profile.png in the folder of the log]",
)
@click.option("--no-picture", is_flag=True, help="Print only.")
@click.option("--responses", type=click.IntRange(1), help="Responses per prompt (rollout.n), if the log does not say.")
def profile(run_dir: Path, warmup: int, picture: Path | None, no_picture: bool, responses: int | None) -> None:
    """Shows where the time of a training step went in a run, and which flag would save most.

    LOG is a folder or a file: what verl or slime printed, verl's file logger, TensorBoard or W&B. Files joined by commas are one
    run. If the run had +rl_accel.telemetry.enable=True, the parts of generation are measured; otherwise they are estimated.
    """
    console = Console(width=None if sys.stdout.isatty() else 140)
    run = read_run(run_dir, warmup, responses)
    _show(run, console)
    if not no_picture:
        first = run_dir if run_dir.exists() else Path(str(run_dir).partition(",")[0])
        path = picture or (first if first.is_dir() else first.parent) / "profile.png"
        try:
            draw(run, path)
        except ValueError as error:  # matplotlib does not know the suffix
            raise RlAccelError(f"{path} is no picture: {error}") from error
        say(console, f"Picture: {path}")


def say(console: Console, *lines: str) -> None:
    """Prints ``lines`` as they are: not wrapped, and without markup or colours."""
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _show(run: Profile, console: Console) -> None:
    span = f"steps {run.steps[0]}-{run.steps[-1]}" if len(run.steps) > 1 else f"step {run.steps[0]}"
    say(console, f"{run.log}: {run.logged}", f"Means of {span}", *(f"note: {note}" for note in run.notes))
    table = Table("stage", "seconds", "share of the step")
    for column in table.columns[1:]:
        column.justify = "right"
    for stage, share in stage_clock.shares(run.stages).items():
        table.add_row(stage, format_seconds(run.stages[stage]), f"{share:.1%}")
        if stage == "gen":
            for name, (label, _) in _PARTS.items():
                if name in run.parts:
                    part = run.parts[name]
                    table.add_row(f"  {label}", format_seconds(part), f"{part / run.step_seconds:.1%}", style="dim")
    table.add_row("step", format_seconds(run.step_seconds), "100.0%", style="bold")
    console.print(table)
    if run.estimate is not None and "idle_share" not in run.numbers:
        idle = run.estimate.idle
        how = "measured by verl" if run.estimate.rollouts.is_measured else "if all responses begin together"
        say(console, f"idle share of generation: {idle.mean:.0%} ({idle.low:.0%} to {idle.high:.0%}), estimated: {how}")
    if "responses" in run.numbers:
        say(console, *(f"{label + ':':<32}{_shown(run.numbers, name)}" for name, (label, _) in _NUMBERS.items()))
    servers = sorted({response.server for response in run.last if response.server is not None})
    if len(servers) > 1:
        console.print(_table_of_servers(run, servers))
    for feature, needed in _TABLES.items():
        numbers = run.table(feature)
        if numbers.get(needed):
            table = Table(feature, "mean of a step")
            for name, value in numbers.items():
                if name != "applied":
                    table.add_row(name, f"{value:,.2f}")
            console.print(table)
    for line in run.missing:
        say(console, f"not known: {line}")
    if run.savings:
        console.print(_table_of_savings(run))
        arithmetic = (f"{saving.name}: {saving.arithmetic}" for saving in run.savings)
        say(console, *arithmetic, _NOT_ESTIMATED, *levers(run), _conclusion(run.savings[0], run.step_seconds))


def _conclusion(best: Saving, step_seconds: float) -> str:
    """Returns the sentence on the largest saving in a step."""
    what = f"{best.name}, {format_seconds(best.seconds)} a step."
    if not best.ours or best.at_most < SMALLEST_GAIN * step_seconds:
        return NOTHING_HELPS
    if best.gain is None:
        return f"Largest part that may be saved: {what} {best.advice} may save some of it."
    gain = f"{format_seconds(best.gain.mean)} of {format_seconds(step_seconds)} ({best.gain.mean / step_seconds:.0%})"
    return f"Largest saving: {what} {best.advice} would save about {gain}."


def _shown(numbers: Mapping[str, float], name: str) -> str:
    return _NUMBERS[name][1].format(numbers[name]) if name in numbers else "unknown"


def _table_of_servers(run: Profile, servers: Sequence[str]) -> Table:
    table = Table("server", "responses", "tokens", "idle", "longest", title=f"Servers in step {run.steps[-1]}")
    for server in servers:
        its = [response for response in run.last if response.server == server]
        numbers = stage_clock.completion(its) | stage_clock.generation(its, run.last_seconds, began=0.0)
        shown = ("responses", "tokens", "idle_share", "completion_longest_seconds")
        table.add_row(server, *(_shown(numbers, name) for name in shown))
    return table


def _table_of_savings(run: Profile) -> Table:
    columns = ("what takes time", "seconds", "share", "what would reduce it", "gain, with 95% interval")
    table = Table(*columns, title="Where it could be saved")
    whole = run.step_seconds
    for saving in run.savings:
        gain = "unknown"
        if saving.gain is not None:
            mean, low, high = map(format_seconds, (saving.gain.mean, saving.gain.low, saving.gain.high))
            gain = f"{mean} ({saving.gain.mean / whole:.0%}), {low} to {high}"
        table.add_row(saving.name, format_seconds(saving.seconds), f"{saving.seconds / whole:.1%}", saving.advice, gain)
    return table


def format_seconds(value: float) -> str:
    """Returns a duration, given in seconds, as text with three significant figures, in s or ms."""
    return f"{value:.3g} s" if value >= 0.1 else f"{value * 1000:.3g} ms"


# The picture


def draw(run: Profile, path: Path) -> None:
    """Writes a picture of ``run`` to ``path``: stages of a mean step, parts of generation, and responses of the last step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.6 if run.last else 1.9), layout="constrained")
    heights = [1.1, 3] if run.last else [1]
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part in axes:
        part.spines[["top", "right"]].set_visible(False)
    _draw_bars(axes[0], run)
    if run.last:
        _draw_responses(axes[1], run)
    figure.savefig(path, dpi=120, facecolor="white")


def _draw_bars(axes: Any, run: Profile) -> None:
    """Draws a bar with the stages of a mean step and, below this bar, a bar with the parts of generation."""
    rows = {
        "step": [(name, seconds, stage_clock.STAGES.get(name, _OTHER_COLOUR)) for name, seconds in run.stages.items()]
    }
    parts = [(label, run.parts[name], colour) for name, (label, colour) in _PARTS.items() if name in run.parts]
    if parts:
        rows["generation"] = parts
    for row, segments in enumerate(rows.values()):
        left = 0.0
        for label, seconds, colour in segments:
            axes.barh(row, seconds, left=left, height=0.7, color=colour, edgecolor="white", lw=0.5)
            # A bar too narrow for its label goes into the legend; a character takes a little more than 1% of the width.
            if seconds > 0.015 * len(label) * run.step_seconds:
                axes.text(left + seconds / 2, row, label, ha="center", va="center", fontsize=8)
            elif seconds > 0.003 * run.step_seconds:
                axes.barh(row, 0, color=colour, label=label)
            left += max(seconds, 0.0)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlim(0, run.step_seconds * 1.01)
    share = run.numbers.get("idle_share", run.estimate.idle.mean if run.estimate else None)
    how = "" if "idle_share" in run.numbers else " (estimated)"
    idle = "" if share is None else f", generation {share:.0%} idle{how}"
    axes.set_title(f"Mean of steps {run.steps[0]}-{run.steps[-1]}: {run.step_seconds:.2f} s{idle}", fontsize=10)
    axes.set_xlabel("seconds")
    axes.tick_params(axis="y", length=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1.1))


def _draw_responses(axes: Any, run: Profile) -> None:
    """Draws a horizontal line per response: generation, then reward. If there are too many responses, draws every k-th response."""
    responses = sorted(run.last, key=lambda r: (r.ended, r.began))
    for row, response in enumerate(responses[:: len(responses) // _MOST_ROWS + 1]):
        end = response.ended if response.generated is None else response.generated
        colour = _LINES[response.outcome]
        axes.plot([response.began, end], [row, row], color=colour, lw=1.2, solid_capstyle="butt")
        if response.rewarded is not None:
            axes.plot([end, response.rewarded], [row, row], color=_LINES["reward"], lw=1.2)
    for label, colour in _LINES.items():
        axes.plot([], [], color=colour, label=label)
    axes.axvline(run.last_seconds, color="black", lw=0.8, ls=":", label="end of the stage")
    axes.set_xlim(0, run.last_seconds * 1.01)
    axes.set_title(f"Responses of step {run.steps[-1]}, in the order in which they ended", fontsize=10)
    axes.set_xlabel("seconds since the first response began")
    axes.set_ylabel("responses")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
