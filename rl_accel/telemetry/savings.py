"""Estimates the seconds that each feature of rl-accel, and settings of verl, would save in the training steps of a run.

The estimates assume that the speed of an engine does not depend on its number of requests. :mod:`rl_accel.plan` has a model of
this speed.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rl_accel.features import RewardTimeoutFlags
from rl_accel.rollout.tail_batching import TailRun
from rl_accel.rollout.workload import from_groups
from rl_accel.telemetry import stage_clock
from rl_accel.telemetry.aggregates import LEAST_STEPS, POLL_SECONDS, Estimate, Range, in_rounds
from rl_accel.telemetry.profile import PARTS, Profile, format_seconds
from rl_accel.telemetry.stage_clock import COMPLETED, ResponseTimes

WAITING, NOTICING = "waiting for the longest responses", "noticing that the rollout is done"
NOTHING_HELPS = "Nothing of the pack would shorten a step of this run by more than can be told."
_LIMITS = RewardTimeoutFlags()
"""Default time limits of the feature reward_timeout."""
_TICK = 0.001
"""Seconds that one token stands for when measured durations are simulated as response lengths, which must be whole numbers."""
_LARGE_OLD_LOG_PROB, _LARGE_STAGE = 0.15, 0.5
"""Shares of a step above which :func:`levers` gives advice: share of the stage ``old_log_prob``, and share of generation or of
training. Chosen by hand."""


@dataclass(frozen=True)
class Saving:
    """A part of a mean training step, and advice that would shorten it.

    Attributes:
        name: description of the part.
        seconds: duration of the part in a mean step.
        advice: flag or setting that would shorten the part.
        gain: estimated seconds per step that the advice would save; None if unknown.
        arithmetic: text that says how ``gain`` was computed, or why it is unknown.
        ours: True if the advice is a feature of rl-accel, which is not on yet.
    """

    name: str
    seconds: float
    advice: str
    gain: Range | None
    arithmetic: str
    ours: bool = True

    @property
    def at_most(self) -> float:
        """Estimated seconds per step that the advice would save; if these are unknown, the seconds of the whole part."""
        return self.gain.mean if self.gain else self.seconds


def find_savings(run: Profile) -> list[Saving]:
    """Returns the possible savings in a run: first those by features of rl-accel, then others. Each group has the largest first."""
    stages, gen = run.stages, run.stages.get("gen", 0.0)
    savings = []
    if "concurrency" in run.numbers:
        savings = _measured_savings(run)
    elif gen > 0 and run.overlaps:
        name, why = "waiting for rollouts", "they overlap with training, so that only this part of them delays a step"
        savings = [Saving(name, gen, "more replicas", None, why, ours=False)]
        if run.is_v1:
            savings = [_saving(run, name, gen, (None, why), "sampler")]
    elif gen > 0 and run.estimate is not None:
        savings = _estimated_savings(run, run.estimate)
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
            why = "early versions of verl time them as one, so the log does not tell which part is rewards"
            saving = replace(saving, name="rewards and advantages", arithmetic=why)
            if "reward_timeout" not in run.on:
                saving = replace(saving, advice=f"+rl_accel.reward_timeout.enable=True, {saving.advice}", ours=True)
        savings.append(saving)
    shares, how = run.zero_groups
    if shares:
        seconds = stages.get("update_actor", 0.0) * np.array(shares)
        gain = Range.of(seconds[1:], float(seconds[0]))
        savings.append(_saving(run, "training of groups with equal rewards", gain.mean, (gain, how), "skip_zero"))
    validation = stages.get(stage_clock.VALIDATION, 0.0)
    if validation > 0 and run.is_v1 and not run.overlaps:
        at_most = "at most all of it, if the rollout after a validation lasts as long"
        savings.append(_saving(run, "validations", validation, (None, at_most), "overlap_validation"))
    return sorted(savings, key=lambda saving: (not saving.ours, -saving.at_most))


def _saving(run: Profile, name: str, seconds: float, gain: tuple[Range | None, str], *features: str) -> Saving:
    """Returns a saving that advises the first of ``features``; if one of them is on already, the saving says this instead.

    ``name`` and ``seconds`` describe the part of a step. ``gain`` holds the fields ``gain`` and ``arithmetic``.
    """
    if running := sorted(run.on.intersection(features)):
        return Saving(name, seconds, f"{', '.join(running)}: on", None, "this is what is left of it", ours=False)
    is_slime = run.logged.is_slime
    flag = f"{features[0]}, with rl-accel slime-config" if is_slime else f"+rl_accel.{features[0]}.enable=True"
    return Saving(name, seconds, flag, *gain)


def _measured_savings(run: Profile) -> list[Saving]:
    """Returns possible savings in the stage ``gen`` of a run with telemetry."""
    steps = list(run.responses.values())
    most, waiting, reward, rest = (
        run.numbers.get(f"{part}_seconds", 0.0) for part in ("most", "waiting", "reward", "rest")
    )
    share = run.numbers.get("tool_share", 0.0)
    savings = [
        _saving(run, WAITING, waiting, _gain_of_tail_batching(steps), "tail_batching"),
        _saving(run, "rewards after the last generation", reward, _gain_of_reward_timeout(steps), "reward_timeout"),
        _saving(run, NOTICING, rest, _gain_of_sampler(run.rests), "sampler", "tail_batching"),
        _saving_of_generation(most * (1 - share)),
    ]
    if share:
        how = f"{share:.0%} of a response's time, by verl's own timer of its tool calls"
        hanging = "quicker tools; for those that hang: rl_accel.tail_batching.agent_loop_limit"
        savings.append(Saving("tools of nine in ten responses", most * share, hanging, None, how, ours=False))
    return savings


def _estimated_savings(run: Profile, estimate: Estimate) -> list[Saving]:
    """Returns possible savings in the stage ``gen`` of a run without telemetry."""
    rollouts, count = estimate.rollouts, len(estimate.rollouts.seconds)
    noticing = estimate.polling.mean + estimate.storing
    explained = run.stages["gen"] - noticing - estimate.unexplained.mean
    savings = [_saving_of_generation(max(explained - estimate.waiting.mean, 0.0))]
    if estimate.polling.mean:
        how = (
            f"the trainer looks every {POLL_SECONDS:g} s whether a rollout is done; the ends of {count} rollouts are estimated from"
            " their longest responses"
        )
        savings.append(_saving(run, NOTICING, noticing, (estimate.polling, how), "sampler", "tail_batching"))
    if estimate.unexplained.mean:
        how = (
            f"at most, and for rewards that execute something: response lengths explain {format_seconds(explained)} of {count}"
            f" rollouts; the rest may also be tools or the reading of prompts. Less a limit of {_LIMITS.minimum:g} s for each"
        )
        name, gain = PARTS["unexplained_seconds"][0], (estimate.over, how)
        savings.append(_saving(run, name, estimate.unexplained.mean, gain, "reward_timeout"))
    if estimate.tail is None:
        how = "the log does not say how many responses a step has: --responses and their launch line would"
    else:
        per = f"{rollouts.group or '4, 8 and 16'} response{'s' * (rollouts.group != 1)} a prompt"
        per += "" if rollouts.group else " (--responses says how many)"
        training = sum(run.stages.get(name, 0.0) for name in stage_clock.TRAINING)
        whole = estimate.tail.mean + estimate.polling.mean + training * (1 - estimate.trained.mean)
        pace, base = format_seconds(estimate.pace.mean), format_seconds(estimate.base.mean)
        how = (
            f"published shapes of lengths, stretched to the mean, the longest and the share at the limit of {count} batches of"
            f" {rollouts.responses} responses, in rounds with {per}. A token of the longest takes {pace}, all else {base}."
            " The engine is assumed as fast with 1.6 times the requests."
            f" With the polls and the training of shorter responses {format_seconds(max(whole, 0.0))} a step"
            f"{'' if run.is_v1 else ', with the V1 trainer of verl 0.9'}"
        )
    return [*savings, _saving(run, WAITING, estimate.waiting.mean, (estimate.tail, how), "tail_batching")]


def _saving_of_generation(seconds: float) -> Saving:
    unknown = "how an engine's speed changes with its requests is not in these numbers"
    advice = "more replicas, or a smaller max_response_length"
    return Saving("generating nine in ten responses", seconds, advice, None, unknown, ours=False)


def _bootstrap_mean(values: Sequence[float]) -> Range:
    """Returns the mean of ``values`` with its 95% bootstrap interval."""
    drawn = np.random.default_rng(0).choice(values, (1000, len(values)))
    return Range.of(drawn.mean(axis=1), statistics.fmean(values))


def _gain_of_tail_batching(steps: Sequence[Sequence[ResponseTimes]]) -> tuple[Range | None, str]:
    known = [groups for responses in steps if (groups := prompt_ticks(responses))]
    if not known:
        return None, "no step in which every response completed"
    run = TailRun(max(map(len, known)), max(len(group) for groups in known for group in groups))
    prompts, responses = run.prompts_per_step, run.responses_per_prompt
    rng, gains, rounds = np.random.default_rng(0), [], []
    for draw in range(21):
        drawn = known if draw == 0 else [known[row] for row in rng.integers(len(known), size=len(known))]
        as_it_is = _TICK * statistics.fmean(max(max(group) for group in groups) for groups in drawn)
        workload = replace(from_groups([group for groups in drawn for group in groups], ""), seen=None)
        rounds.append(_TICK * in_rounds(workload, run, draw)[0])
        gains.append(max(as_it_is - rounds[-1], 0.0))
    return Range.of(gains[1:], gains[0]), (
        f"the seconds of {len(known) * prompts * responses} responses, drawn again in rounds of {run.surplus_prompts} prompts for"
        f" {prompts} trained and {run.surplus_responses} responses for {responses}, the rest in long rounds:"
        f" {rounds[0]:.2f} s a rollout instead of {gains[0] + rounds[0]:.2f} s"
    )


def prompt_ticks(responses: Sequence[ResponseTimes]) -> list[list[float]] | None:
    """Returns the milliseconds from the start of a step's first response to the end of each response, as one list per prompt.

    Returns None if there are no responses, or if any was cancelled or failed.
    """
    if not responses or any(response.outcome != COMPLETED for response in responses):
        return None
    return [[(r.generated or r.ended) / _TICK for r in group] for group in stage_clock.by_prompt(responses)]


def levers(run: Profile) -> list[str]:
    """Returns sentences that advise on verl's own settings, for stages that take a large share of a step."""
    shares = {} if run.logged.is_slime else stage_clock.shares(run.stages)
    advice = []
    if shares.get("old_log_prob", 0.0) > _LARGE_OLD_LOG_PROB:
        what = "algorithm.rollout_correction.bypass_mode=True trains with the rollout's own probabilities instead"
        advice.append(f"verl: old_log_prob takes {shares['old_log_prob']:.0%} of a step; {what}.")
    training = sum(shares.get(name, 0.0) for name in ("old_log_prob", "ref", "update_actor", "update_critic"))
    if training > _LARGE_STAGE:
        what = "actor_rollout_ref.actor.use_dynamic_bsz=True packs responses of different lengths"
        advice.append(f"verl: training takes {training:.0%} of a step; {what}, if it is not on.")
    if shares.get("gen", 0.0) > _LARGE_STAGE and run.numbers.get("preemptions", 0.0) > 0:
        what = "rollout.enable_prefix_caching reads a prompt once for all its responses, enable_chunked_prefill delays others less"
        advice.append(
            f"verl: the engines preempt {run.numbers['preemptions']:,.0f} requests a step; {what}, if they are not on."
        )
    return advice


def _gain_of_reward_timeout(steps: Sequence[Sequence[ResponseTimes]]) -> tuple[Range | None, str]:
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
    return _bootstrap_mean(gains), (
        f"at most, and for rewards that execute something: rewards replayed with a limit of {limit:.1f} s, which is "
        f"max({scale} x {nine_in_ten:.2f} s (nine in ten take no longer) + {slack} s, {least} s)"
    )


def _gain_of_sampler(rests: Sequence[float]) -> tuple[Range | None, str]:
    if len(rests) < 2:
        return None, "one step alone does not tell polling from the rest"
    mean, shortest = statistics.fmean(rests), min(rests)
    how = f"mean {mean:.2f} s less the shortest of {len(rests)} steps, {shortest:.2f} s, whose poll came in time"
    return _bootstrap_mean([rest - shortest for rest in rests]), how
