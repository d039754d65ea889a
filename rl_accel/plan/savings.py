"""Estimates the seconds that each feature of rl-accel, and settings of verl, would save in the training steps of a run."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_accel.errors import RlAccelError
from rl_accel.features import RewardTimeoutFlags
from rl_accel.plan.answers import RATIOS, Range, answer, tail_option
from rl_accel.plan.setup import setup_of
from rl_accel.telemetry import stage_clock
from rl_accel.telemetry.profile import PARTS, Profile, format_seconds
from rl_accel.telemetry.stage_clock import POLL_SECONDS, reward_seconds

WAITING = "waiting for the longest responses"
REWARDS = "rewards after the last generation"
NOTICING = "noticing that the rollout is done"
VALIDATING = "validation, after or within steps"
REUSE = "log-probabilities before the update"
EQUAL = "training of groups with equal rewards"
NOTHING_HELPS = "Nothing of the pack would shorten a step of this run by more than can be told."
_DRAWS = 10
"""Number of draws of prompts and lengths for the replay of tail batching."""
_POLLS = f"the trainer looks every {POLL_SECONDS:g} s whether a rollout is done, which costs half of that on average"
_REPLAYED = 100_000
"""Approximate number of responses in the replay, which takes a few seconds."""
_LARGE_OLD_LOG_PROB = 0.15
"""Share of a step above which the stage ``old_log_prob`` is worth advice."""
_LARGE_STAGE = 0.5
"""Share of a step above which a setting of generation or of training is worth advice."""
_LARGE_SAVE = 0.05
"""Share of a step above which a setting of checkpoints is worth advice."""


@dataclass(frozen=True)
class Saving:
    """A part of a mean training step, and advice that would shorten it.

    Attributes:
        name: description of the part.
        seconds: duration of the part in a mean step.
        advice: flag or setting that would shorten the part.
        arithmetic: text that says how ``gain`` or ``at_most`` was computed, or why both are unknown.
        gain: estimated seconds per step that the advice would save; None if unknown.
        at_most: upper bound of these seconds; None if there is no better bound than ``seconds``.
        ours: True if the advice is a feature of rl-accel, which is not on yet.
        in_step: False if the part is not counted in the seconds of a step.
    """

    name: str
    seconds: float
    advice: str
    arithmetic: str
    gain: Range | None = None
    at_most: float | None = None
    ours: bool = True
    in_step: bool = True

    @property
    def largest(self) -> float:
        """Estimated seconds per step that the advice would save, else their upper bound."""
        if self.gain is not None:
            return self.gain.mean
        return self.seconds if self.at_most is None else self.at_most


def find_savings(run: Profile) -> list[Saving]:
    """Returns the possible savings in a run: first those by features of rl-accel, then others. Each group has the largest first."""
    savings = [*_in_generation(run), *_in_rewards(run), *_in_training(run), *_in_validation(run)]
    return sorted(savings, key=lambda saving: (not saving.ours, -saving.largest))


def _saving(run: Profile, name: str, seconds: float, features: Sequence[str], **more: Any) -> Saving:
    """Returns a saving that advises the first of ``features``; if one of them is on already, the saving says this instead."""
    if running := sorted(run.on.intersection(features)):
        return Saving(name, seconds, f"{', '.join(running)}: on", "this is what is left of it", ours=False)
    if run.logged.is_slime:
        return Saving(name, seconds, f"{features[0]}, with rl-accel slime-config", **more)
    return Saving(name, seconds, f"+rl_accel.{features[0]}.enable=True", **more)


def _in_generation(run: Profile) -> list[Saving]:
    gen = run.stages.get("gen", 0.0)
    if "concurrency" in run.numbers:
        return _measured_generation(run)
    if gen <= 0 or run.numbers:
        return []
    if run.overlaps:
        why = "they overlap with training, so that only this part of them delays a step"
        if run.is_v1:
            return [_saving(run, "waiting for rollouts", gen, ["sampler"], arithmetic=why)]
        return [Saving("waiting for rollouts", gen, "more replicas", why, ours=False)]
    savings = []
    if run.is_v1:
        at_most = min(POLL_SECONDS, gen)
        features = ["sampler", "tail_batching"]
        savings.append(_saving(run, NOTICING, at_most, features, arithmetic=_POLLS, at_most=at_most))
    if run.tail_bound is None:
        how = "response_length/mean and /max would tell a bound, +rl_accel.telemetry.enable=True the rest"
        return [*savings, _saving(run, "generation, waiting included", gen, ["tail_batching"], arithmetic=how)]
    return [
        *savings,
        _saving(run, WAITING, run.tail_bound, ["tail_batching"], arithmetic=bound_of(run), at_most=run.tail_bound),
    ]


def bound_of(run: Profile) -> str:
    """Returns a sentence on :attr:`Profile.tail_bound`, the bound of what tail batching saves in a log without response times."""
    if run.lengths is None:
        return ""
    mean, longest = run.lengths
    bound = "a bound: what generation would save if no response were longer than the mean"
    text = f"{bound} ({mean:,.0f} tokens; the longest has {longest:,.0f}), and each token took the same time"
    text += ". Training on shorter responses is not in it"
    if run.is_v1:
        text += ". Rewards and tools count as generation here; +rl_accel.telemetry.enable=True tells them apart"
    return text


def _measured_generation(run: Profile) -> list[Saving]:
    """Returns possible savings in the stage ``gen`` of a run with telemetry."""
    most, waiting, reward, rest = (run.numbers.get(name, 0.0) for name in PARTS)
    gain, how = _gain_of_tail_batching(run)
    longest_reward = max((seconds for step in run.responses.values() for seconds in reward_seconds(step)), default=0.0)
    at_most = reward if longest_reward > RewardTimeoutFlags.minimum else 0.0
    of_rewards = f"at most all of it, if rewards execute something; the longest takes {format_seconds(longest_reward)}"
    poll = min(POLL_SECONDS, rest)
    return [
        _saving(run, WAITING, waiting, ["tail_batching"], gain=gain, arithmetic=how),
        _saving(run, REWARDS, reward, ["reward_timeout"], arithmetic=of_rewards, at_most=at_most),
        _saving(run, NOTICING, rest, ["sampler", "tail_batching"], arithmetic=_POLLS, at_most=poll),
        Saving(
            "generating nine in ten responses",
            most,
            "more replicas, smaller max_response_length",
            "`rl-accel plan --replicas` simulates other numbers of replicas",
            ours=False,
        ),
    ]


def _gain_of_tail_batching(run: Profile) -> tuple[Range | None, str]:
    """Replays the run's own responses with the rounds of tail batching, on an engine that is fitted to their times."""
    if "tail_batching" in run.on:
        return None, ""
    try:
        setup, fit = setup_of(run, {})
    except RlAccelError as error:
        return None, str(error)
    rounds = min(max(_REPLAYED // (2 * _DRAWS * setup.prompts * setup.responses), 5), 20)
    stock, tail = answer(setup, [tail_option(setup, *RATIOS[0])], _DRAWS, rounds)
    before, after = (format_seconds(found.outcome.rollout_seconds) for found in (stock, tail))
    return tail.saved, (
        f"{fit.responses:,} responses, replayed by an engine that is fitted to them (off by {fit.error:.0%}) in rounds of"
        f" tail batching: {after} a rollout instead of {before}. `rl-accel plan` tries other ratios"
    )


def _in_rewards(run: Profile) -> list[Saving]:
    if _times_rewards_as_advantages(run):
        how = (
            "at most all of it: early versions of verl time them as one, so the log does not tell which part is rewards"
        )
        seconds = run.stages["adv"]
        return [_saving(run, "rewards and advantages", seconds, ["reward_timeout"], arithmetic=how, at_most=seconds)]
    if "reward" not in run.stages:
        return []
    how = "at most all of it, if rewards execute something that may hang"
    seconds = run.stages["reward"]
    return [_saving(run, "rewards", seconds, ["reward_timeout"], arithmetic=how, at_most=seconds)]


def _times_rewards_as_advantages(run: Profile) -> bool:
    is_early = "reward" not in run.stages and not run.is_v1 and not run.logged.is_slime
    return is_early and run.stages.get("adv", 0.0) > 0


def _in_training(run: Profile) -> list[Saving]:
    savings = []
    estimator = run.logged.setting("adv_estimator") or ""
    adv = 0.0 if _times_rewards_as_advantages(run) else run.stages.get("adv", 0.0)
    if adv > 0 and run.stages.keys() & {"values", "update_critic"}:
        how = "at most all of it; `rl-accel bench gae` measures your shape"
        savings.append(_saving(run, "advantages", adv, ["gae"], arithmetic=how, at_most=adv))
    elif adv > 0 and "reinforce_plus_plus" in estimator:
        how = "at most all of it"
        savings.append(_saving(run, "advantages", adv, ["advantages"], arithmetic=how, at_most=adv))
    share, how = run.zero_groups
    if share:
        seconds = run.stages.get("update_actor", 0.0) * share
        savings.append(_saving(run, EQUAL, seconds, ["skip_zero"], arithmetic=how, at_most=seconds))
    old_log_prob = run.stages.get("old_log_prob", 0.0)
    may_reuse = (
        not run.logged.is_slime and not run.overlaps and "actor/reward_kl_penalty" not in run.logged.metric_names
    )
    if old_log_prob > 0 and may_reuse and run.updates_per_batch in (None, 1):
        how = "the update computes them again, and a batch gets one update: train_batch_size = ppo_mini_batch_size"
        if run.updates_per_batch is None:
            how = "at most, and only if a batch gets one update: train_batch_size = ppo_mini_batch_size, ppo_epochs = 1"
        features = ["reuse_log_probs"]
        savings.append(_saving(run, REUSE, old_log_prob, features, arithmetic=how, at_most=old_log_prob))
    return savings


def _in_validation(run: Profile) -> list[Saving]:
    if not run.validations or run.logged.is_slime or run.overlaps:
        return []
    per_step = sum(run.validations) / len(run.steps)
    mean = format_seconds(statistics.fmean(run.validations))
    how = f"{len(run.validations)} of {mean} each; at most all of it, because the next rollout can begin beside it"
    features = ["overlap_validation"]
    return [_saving(run, VALIDATING, per_step, features, arithmetic=how, at_most=per_step, in_step=False)]


def levers(run: Profile) -> list[str]:
    """Returns at most one sentence: verl's own settings that the log or launch line shows off, for stages that take long.

    For old log-probabilities of several updates a batch, the sentence says what changes.
    """
    if run.logged.is_slime:
        return []
    shares = stage_clock.shares(run.stages)
    training = sum(shares.get(name, 0.0) for name in ("old_log_prob", "ref", "update_actor", "update_critic"))
    words = []
    if training > _LARGE_STAGE and run.logged.is_off("use_dynamic_bsz"):
        words.append("actor_rollout_ref.actor.use_dynamic_bsz=True packs responses of different lengths")
    if training > _LARGE_STAGE and run.logged.is_off("use_fused_kernels"):
        words.append("actor_rollout_ref.model.use_fused_kernels=True computes log-probabilities without all logits")
    elif training > _LARGE_STAGE and run.logged.is_off("entropy_from_logits_with_chunking"):
        words.append("actor_rollout_ref.actor.entropy_from_logits_with_chunking=True needs less memory")
    if shares.get("gen", 0.0) > _LARGE_STAGE and run.logged.is_off("enable_prefix_caching", default=True):
        words.append(
            "actor_rollout_ref.rollout.enable_prefix_caching=True reads a prompt once for all of its responses"
        )
    uses_megatron = "megatron" in (run.logged.setting(r"(?:strategy|model_engine)") or "")
    if shares.get("save_checkpoint", 0.0) > _LARGE_SAVE and uses_megatron and run.logged.is_off("async_save"):
        words.append("actor_rollout_ref.actor.checkpoint.async_save=True writes checkpoints beside training")
    large_log_prob = shares.get("old_log_prob", 0.0) > _LARGE_OLD_LOG_PROB
    if large_log_prob and (run.updates_per_batch or 0) > 1:
        words.append(
            f"old_log_prob takes {shares['old_log_prob']:.0%} of a step, and algorithm.rollout_correction.bypass_mode=True"
            " leaves it out, but changes the loss: it trains against the rollout's own log-probabilities"
        )
    return [f"Off in this run, without any plug-in: {'; '.join(words)}."] if words else []
