"""Tail batching: rounds that end with the first P0 prompts to complete, and lose no prompt (RollPacker, NSDI'26)."""

from collections.abc import Iterable, Mapping
from enum import Enum
from statistics import fmean
from typing import Any

from rl_accel.rollout.tail_decisions import (
    Cancel,
    CheckGroup,
    Decision,
    Finished,
    Group,
    Launch,
    PromptFailed,
    RequestPrompts,
    RoundEnded,
    RoundKind,
    RoundMetrics,
    RoundStarted,
    TrainBatch,
)
from rl_accel.rollout.tail_prompts import Lane, Prompt, PromptPool, Response, TailRun, scaled
from rl_accel.rollout.tail_ratio import CompletionTimes

FIRST_RATIO = 1.25
"""Where ``prompt_ratio=auto`` starts."""

_FORMAT = "rl_accel.tail_batching"
_VERSION = 1
_MUST_AGREE = ("format", "version", "prompts_per_step", "responses_per_prompt", "data_id")


class Phase(Enum):
    """Where the machine is; the value completes the sentence "... but"."""

    BETWEEN_ROUNDS = "no round is open"
    FILLING = "the round waits for prompts"
    OPEN = "a round is open"
    SETTLING = "cancelled responses are not acknowledged"


class TailBatching:
    """Decides what to launch, what to cancel and what to train on. No I/O and no clock: events in, decisions out.

    A **short** round launches more prompts than the P0 it needs, and more than R0 responses of each. The first R0
    responses of a prompt to finish *generating* are its group; the others are cancelled at once, so a slow reward cannot
    make a response look long. A prompt is complete when its R0 are scored; the first P0 complete prompts are the batch.
    Everything else is cancelled and launched anew in a later round: strictly on-policy. Prompts that were cut off wait
    in a queue. When it holds enough, a **long** round runs P0 of them with R0 responses each and waits for all. When the
    data is exhausted and too little is left for a short round, **final** rounds do so with the rest, deferred prompts
    first.

    Every prompt is trained, rejected or reported as failed exactly once, and every batch is P0 groups of R0. In the end
    fewer than P0 prompts can be left. A smaller batch would not fit the trainer's mini-batches, so they are named in
    ``Finished`` and stay in the queue. (A data loader that drops the last partial batch loses as many in every epoch.)

    **What the driver does.** It calls ``begin_round``, carries out the decisions each call returns, in their order, and
    reports what happens. ``now`` is in seconds of one clock of its choice.

    - ``RequestPrompts``: ``offer`` new ids, ``end_epoch`` where an epoch ends, ``data_exhausted`` after the last one. An
      id is the key under which the driver finds its payload; it is unique for each epoch and row, say ``"2:1017"``.
    - ``Launch``: each response ends in one of three ways. ``response_generated``, then ``response_scored``.
      ``response_failed`` (engine, agent loop or reward), which is retried. Or ``response_aborted`` once it is cancelled,
      which must come for each one, also if it had just finished or its server is gone.
    - ``CheckGroup`` (only with ``filter_groups``): ``group_kept`` or ``group_rejected``, which is refilled at once.
    - ``TrainBatch``: train on exactly these. ``RoundEnded``: all is settled; begin the next round after the update.

    Messages may be late: an event about a response that is settled already is ignored. Ids of responses never recur. An event
    that cannot be (of a response that was never launched, that has finished before, that is still generating, with fewer than
    0 tokens, a verdict without ``filter_groups``) raises ValueError and changes nothing.

    **Save and resume.** ``state_dict`` works at any time. It holds prompts, not responses; a batch counts as trained
    from ``TrainBatch`` on, so save it with the checkpoint that contains the update. The driver saves, as of the same
    moment, the payloads of ``unsettled_prompts`` and its position in the data. After ``load_state_dict`` no round is
    open: prompts that were in flight wait again, none deferred or lost by it. The driver drops what is left of older
    responses, does not offer unsettled prompts again, and begins a round. That the data was exhausted is not saved: a
    resumed run may have more.
    """

    def __init__(self, run: TailRun) -> None:
        self.run = run
        self._pool = PromptPool(run)
        self._times = CompletionTimes(run.prompts_per_step)
        self._phase = Phase.BETWEEN_ROUNDS
        self._exhausted = False
        self._rounds = 0
        self._ratio = FIRST_RATIO
        self._kind: RoundKind = "short"
        self._began = 0.0
        self._metrics = RoundMetrics(0, "short", 1.0)
        self._lengths: list[tuple[list[int], list[int]]] = []  # of each trained prompt: accepted, cancelled responses
        self._responses: dict[int, Response] = {}
        self._next_response = 0
        self._unacknowledged = 0

    # Between rounds

    def begin_round(self, now: float) -> list[Decision]:
        """Open the next round.

        Raises:
            ValueError: the last round is not over.
        """
        if self._phase is not Phase.BETWEEN_ROUNDS:
            raise ValueError(f"begin_round must come between rounds, but {self._phase.value}")
        ratio = self.run.flags.prompt_ratio
        self._ratio = (
            self._times.best_ratio(FIRST_RATIO, self.run.flags.auto_limit) if isinstance(ratio, str) else ratio
        )
        self._phase = Phase.FILLING
        return self._fill(now)

    def offer(self, prompt_ids: Iterable[str], now: float, domain: str = "") -> list[Decision]:
        """Take over new prompts, at any time and of any number. Without quotas the domain is not looked at.

        Raises:
            TypeError, ValueError: an id is no string, or is known already, or the domain has no quota.
        """
        self._pool.offer(prompt_ids, domain)
        self._exhausted = False
        return self._supply(now)

    def data_exhausted(self, now: float) -> list[Decision]:
        """There are no more prompts (until some are offered after all)."""
        self._exhausted = True
        return self._supply(now)

    def end_epoch(self) -> list[Decision]:
        """Count prompts offered from now on to the next epoch."""
        return list(self._pool.end_epoch())

    @property
    def is_settling(self) -> bool:
        """Whether the open round has its batch, or was given up, and only waits for cancelled responses."""
        return self._phase is Phase.SETTLING

    # Responses and groups

    def response_generated(self, response_id: int, tokens: int, now: float) -> list[Decision]:
        """Generation of a response has finished; its reward may still be computed."""
        response = self._find(response_id)
        _check_tokens(tokens)
        if response is None or response.cancelled:
            return []
        if response.tokens >= 0:
            raise ValueError(f"response_id must be of a response that is generating, but {response_id} had finished")
        response.tokens = tokens
        prompt = response.prompt
        prompt.generated.append(response_id)
        if len(prompt.generated) < self.run.responses_per_prompt:
            return []
        return self._cancel(prompt, [i for i, r in prompt.responses.items() if r.tokens < 0])

    def response_scored(self, response_id: int, now: float) -> list[Decision]:
        """The reward of a generated response is there."""
        response = self._find(response_id)
        if response is None or response.cancelled:
            return []
        if response.tokens < 0 or response.scored:
            state = "was scored before" if response.scored else "is still generating"
            raise ValueError(f"response_id must be of a response without a score, but {response_id} {state}")
        response.scored = True
        prompt = response.prompt
        prompt.scored_at.append(now)
        if len(prompt.scored_at) < self.run.responses_per_prompt:
            return []
        self._observe(prompt)
        if not self.run.filter_groups:
            return self._keep(prompt, now)
        prompt.awaits_verdict = True
        return [CheckGroup(Group(prompt.id, tuple(prompt.generated)))]

    def response_failed(self, response_id: int, tokens: int, now: float) -> list[Decision]:
        """The engine, the agent loop or the reward failed on a response, after ``tokens`` tokens."""
        response = self._find(response_id)
        _check_tokens(tokens)
        if response is None:
            return []
        if response.cancelled:
            return self.response_aborted(response_id, tokens, now)
        if response.scored:
            raise ValueError(f"response_id must be of a response without a score, but {response_id} was scored before")
        prompt = response.prompt
        del self._responses[response_id], prompt.responses[response_id]
        if response.tokens >= 0:
            prompt.generated.remove(response_id)
        self._metrics.responses_failed += 1
        self._waste(tokens)
        if response.retries < self.run.flags.max_retries:
            return [self._launch(prompt, 1, response.retries + 1)]
        if len(prompt.responses) >= self.run.responses_per_prompt:
            return []
        decisions = self._cancel(prompt, list(prompt.responses))
        decisions.append(PromptFailed(prompt.id))
        self._metrics.prompts_failed += 1
        decisions += self._pool.settle(prompt, "failed")
        return decisions + self._drop(prompt, now)

    def response_aborted(self, response_id: int, tokens: int, now: float) -> list[Decision]:
        """A cancelled response has stopped after ``tokens`` tokens and left nothing behind."""
        response = self._find(response_id)
        _check_tokens(tokens)
        if response is None:
            return []
        if not response.cancelled:
            raise ValueError(f"response_id must be of a cancelled response, but {response_id} was not cancelled")
        del self._responses[response_id]
        self._unacknowledged -= 1
        self._waste(tokens)
        response.prompt.surplus_tokens.append(tokens)
        return self._end_if_settled()

    def group_kept(self, group: Group, now: float) -> list[Decision]:
        """The filter lets a complete group pass."""
        prompt = self._awaiting_verdict(group)
        return self._keep(prompt, now) if prompt else []

    def group_rejected(self, group: Group, now: float) -> list[Decision]:
        """The filter rejects a complete group; another prompt takes its place."""
        prompt = self._awaiting_verdict(group)
        if prompt is None:
            return []
        self._metrics.tokens_generated += self._release(prompt)
        self._metrics.prompts_rejected += 1
        return [*self._pool.settle(prompt, "rejected"), *self._drop(prompt, now)]

    # Saving

    def unsettled_prompts(self) -> list[str]:
        """Return the ids of all prompts that were offered and are not trained, rejected or failed."""
        return list(self._pool.unsettled)

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs, ready for JSON."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "prompts_per_step": self.run.prompts_per_step,
            "responses_per_prompt": self.run.responses_per_prompt,
            "data_id": self.run.data_id,
            "rounds": self._rounds - (self._phase is Phase.OPEN),
            "next_response": self._next_response,
            "pool": self._pool.state_dict(),
            "times": self._times.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state, in place of any other. Ratios, thresholds and quotas may differ from the saved run's.

        Raises:
            ValueError: the state is of another kind, version, P0, R0 or data, or it is damaged; nothing has changed then.
        """
        ours = self.state_dict()
        for key in _MUST_AGREE:
            saved = state.get(key) if isinstance(state, Mapping) else type(state).__name__
            if saved != ours[key]:
                raise ValueError(f"state must have {key} = {ours[key]!r}, found {saved!r}")
        resumed = TailBatching(self.run)
        try:
            resumed._rounds, resumed._next_response = int(state["rounds"]), int(state["next_response"])
            resumed._pool = PromptPool.restored(self.run, state["pool"])
            resumed._times.load_state_dict(state["times"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"state is damaged or does not fit: {type(error).__name__}: {error}") from error
        self.__dict__.update(resumed.__dict__)

    # How a round is filled, refilled, cut off and settled

    def _supply(self, now: float) -> list[Decision]:
        if self._phase is Phase.FILLING:
            return self._fill(now)
        return self._refill(now) if self._phase is Phase.OPEN else []

    def _fill(self, now: float) -> list[Decision]:
        """Start the round as soon as it is known to have its prompts, or that there are no more."""
        lanes = self._pool.lanes
        for lane in lanes.values():
            lane.share, lane.target = lane.quota, scaled(lane.quota, self._ratio)
        queued = sum(len(lane.queue) for lane in lanes.values())
        surplus = any(lane.target > lane.quota for lane in lanes.values())
        self._kind = "short"
        # Without surplus nothing is deferred and the queue would never fill up: its prompts may as well go now.
        if queued >= self.run.queue_threshold or (queued and not surplus):
            self._kind = "long"
            for lane in lanes.values():
                lane.target = lane.quota
        missing = {}
        for domain, lane in lanes.items():
            available = len(lane.fresh) if self._kind == "short" else lane.waiting
            if available < lane.target:
                missing[domain] = lane.target - available
        if missing and not self._exhausted:
            return [RequestPrompts(missing)]
        if missing:
            self._kind = "final"
            if not self._pool.share_out_rest():
                self._phase = Phase.BETWEEN_ROUNDS
                return [Finished(tuple(self._pool.unsettled))]
        return self._start(now)

    def _start(self, now: float) -> list[Decision]:
        self._phase = Phase.OPEN
        self._rounds += 1
        launched = sum(lane.target for lane in self._pool.lanes.values())
        self._metrics = RoundMetrics(self._rounds, self._kind, launched / self.run.prompts_per_step)
        self._began, self._lengths = now, []
        decisions: list[Decision] = [RoundStarted(self._rounds, self._kind, launched, self._responses_each)]
        for lane in self._pool.lanes.values():
            for _ in range(lane.target):
                decisions.append(self._admit(lane, now, first=True))
        return decisions

    def _refill(self, now: float) -> list[Decision]:
        """Replace rejected and failed prompts: by new ones, else by deferred ones, else at the cost of a surplus."""
        decisions: list[Decision] = []
        missing = {}
        lanes = list(self._pool.lanes.items())
        while lanes:
            domain, lane = lanes.pop()
            while not lane.is_full and lane.going < lane.target:
                must = self._exhausted and lane.going < lane.share
                if lane.fresh or (lane.queue and must):
                    decisions.append(self._admit(lane, now, first=False))
                elif not self._exhausted:
                    missing[domain] = lane.target - lane.going
                    break
                elif not must:
                    break
                elif self._pool.lend(lane):
                    lanes = list(self._pool.lanes.items())
                else:
                    return decisions + self._give_up(now)
        return [*decisions, RequestPrompts(missing)] if missing else decisions

    def _keep(self, prompt: Prompt, now: float) -> list[Decision]:
        lane = self._pool.lane_of(prompt)
        del lane.active[prompt.id]
        lane.kept.append(prompt)
        decisions: list[Decision] = []
        if lane.is_full:
            for slow in lane.active.values():
                self._cut_off(slow, now)
                decisions += self._cancel(slow, list(slow.responses))
            lane.cut_off += lane.active.values()
            lane.active.clear()
            if all(other.is_full for other in self._pool.lanes.values()):
                decisions += self._train(now)
        return decisions

    def _cut_off(self, prompt: Prompt, now: float) -> None:
        """The prompt was too slow for this round. Launched late, in place of another, it had no fair chance."""
        if self._kind == "short" and not prompt.deferrals and not prompt.awaits_verdict:
            self._times.add_short(now - prompt.launched_at, completed=False)
        if not prompt.is_refill:
            self._metrics.prompts_deferred += 1
            self._pool.defer(prompt, self._rounds)

    def _train(self, now: float) -> list[Decision]:
        groups = []
        settled: list[Decision] = []
        for lane in self._pool.lanes.values():
            for prompt in lane.kept:
                groups.append(Group(prompt.id, tuple(prompt.generated)))
                self._lengths.append(([prompt.responses[i].tokens for i in prompt.generated], prompt.surplus_tokens))
                self._metrics.tokens_generated += self._release(prompt)
                settled += self._pool.settle(prompt, "trained")
            lane.kept.clear()
        self._metrics.prompts_trained = len(groups)
        return [TrainBatch(self._rounds, self._kind, tuple(groups)), *settled, *self._close(now)]

    def _give_up(self, now: float) -> list[Decision]:
        """There are too few prompts left to fill the round: what is under way waits again, no matter how far it is."""
        decisions: list[Decision] = []
        for lane in self._pool.lanes.values():
            for prompt in (*lane.kept, *lane.active.values()):
                decisions += self._cancel(prompt, list(prompt.responses))
                lane.cut_off.append(prompt)
            lane.kept.clear()
            lane.active.clear()
        return decisions + self._close(now)

    def _close(self, now: float) -> list[Decision]:
        self._phase = Phase.SETTLING
        self._metrics.rollout_seconds = now - self._began
        return self._end_if_settled()

    def _end_if_settled(self) -> list[Decision]:
        if self._phase is not Phase.SETTLING or self._unacknowledged:
            return []
        self._phase = Phase.BETWEEN_ROUNDS
        for lane in self._pool.lanes.values():
            self._pool.put_back(lane.cut_off)
            lane.cut_off = []
        return [RoundEnded(self._complete_metrics())]

    def _complete_metrics(self) -> RoundMetrics:
        metrics = self._metrics
        full_wait = self._times.full_wait()
        metrics.seconds_saved = None if full_wait is None else full_wait - metrics.rollout_seconds
        metrics.queue_length = sum(len(lane.queue) for lane in self._pool.lanes.values())
        metrics.oldest_deferral_rounds = self._rounds - next(iter(self._pool.deferred.values()), self._rounds)
        if metrics.tokens_generated:
            metrics.wasted_token_share = metrics.tokens_wasted / metrics.tokens_generated
        # The surplus of a trained prompt is acknowledged after it is trained, so its lengths are complete only now.
        with_surplus = [pair for pair in self._lengths if pair[1]]
        if with_surplus:
            metrics.accepted_tokens_mean = fmean(fmean(accepted) for accepted, _ in with_surplus)
            metrics.cancelled_tokens_mean = fmean(fmean(cancelled) for _, cancelled in with_surplus)
        return metrics

    def _waste(self, tokens: int) -> None:
        self._metrics.tokens_generated += tokens
        self._metrics.tokens_wasted += tokens

    # Prompts and their responses

    @property
    def _responses_each(self) -> int:
        return self.run.surplus_responses if self._kind == "short" else self.run.responses_per_prompt

    def _admit(self, lane: Lane, now: float, first: bool) -> Launch:
        # A deferred prompt that starts late would make a round long; as a refill it comes last.
        prompt = lane.take(queue_first=first and self._kind != "short")
        prompt.launched_at = now
        prompt.is_refill = not first
        lane.active[prompt.id] = prompt
        self._metrics.prompts_admitted += 1
        return self._launch(prompt, self._responses_each)

    def _launch(self, prompt: Prompt, count: int, retries: int = 0) -> Launch:
        new = range(self._next_response, self._next_response + count)
        self._next_response += count
        for response_id in new:
            self._responses[response_id] = prompt.responses[response_id] = Response(prompt, retries)
        return Launch(prompt.id, tuple(new))

    def _cancel(self, prompt: Prompt, response_ids: list[int]) -> list[Decision]:
        for response_id in response_ids:
            prompt.responses.pop(response_id).cancelled = True
        self._unacknowledged += len(response_ids)
        self._metrics.responses_cancelled += len(response_ids)
        return [Cancel(prompt.id, tuple(response_ids))] if response_ids else []

    def _drop(self, prompt: Prompt, now: float) -> list[Decision]:
        """A settled prompt leaves the round; another takes its place."""
        del self._pool.lane_of(prompt).active[prompt.id]
        return self._refill(now)

    def _release(self, prompt: Prompt) -> int:
        """Let go of a group that needs no cancelling; return its tokens."""
        for response_id in prompt.generated:
            del self._responses[response_id]
        return sum(prompt.responses[i].tokens for i in prompt.generated)

    def _observe(self, prompt: Prompt) -> None:
        """Remember how long a prompt took to complete, if it says something about prompts in general."""
        times = [scored - prompt.launched_at for scored in prompt.scored_at]
        if self._kind == "short" and not prompt.deferrals:
            self._times.add_short(times[-1], completed=True)
        elif self._kind != "short" and prompt.from_queue:
            wanted = self.run.responses_per_prompt
            rank = round(wanted * (wanted + 1) / (self.run.surplus_responses + 1))
            self._times.add_long(times[-1], times[max(rank, 1) - 1])

    def _find(self, response_id: int) -> Response | None:
        """Return the response, or None if it is settled already."""
        response = self._responses.get(response_id)
        if response is None and not (isinstance(response_id, int) and 0 <= response_id < self._next_response):
            raise ValueError(f"response_id must be of a response that was launched, found {response_id!r}")
        return response

    def _awaiting_verdict(self, group: Group) -> Prompt | None:
        """Return the prompt whose group awaits a verdict, or None if the verdict comes too late."""
        if not self.run.filter_groups:
            raise ValueError("filter_groups must be set for a group to be kept or rejected, found False")
        for response_id in group.response_ids:
            self._find(response_id)
        prompt = self._pool.unsettled.get(group.prompt_id)
        if prompt is None or not prompt.awaits_verdict or tuple(prompt.generated) != group.response_ids:
            return None
        if prompt.id not in self._pool.lane_of(prompt).active:
            return None
        prompt.awaits_verdict = False
        return prompt


def _check_tokens(tokens: int) -> None:
    if tokens < 0:
        raise ValueError(f"tokens must be at least 0, found {tokens}")
