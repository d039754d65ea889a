"""The rounds of tail batching: how one is filled, refilled, cut off and settled. Events come in by ``TailBatching``."""

from enum import Enum

from rl_accel.rollout.tail_decisions import (
    Cancel,
    Decision,
    Finished,
    Group,
    Launch,
    RequestPrompts,
    RoundEnded,
    RoundKind,
    RoundStarted,
    TrainBatch,
)
from rl_accel.rollout.tail_prompts import Lane, Prompt, PromptPool, Response
from rl_accel.rollout.tail_ratio import CompletionTimes
from rl_accel.rollout.tail_settings import DEFAULT_RATIO, TailSettings, scaled
from rl_accel.rollout.tail_tally import RoundTally


class Phase(Enum):
    """Where the machine is; the value completes the sentence "... but"."""

    BETWEEN_ROUNDS = "no round is open"
    FILLING = "the round waits for prompts"
    OPEN = "a round is open"
    SETTLING = "cancelled responses are not acknowledged"


class Rounds:
    """BETWEEN_ROUNDS -> FILLING -> OPEN -> SETTLING -> BETWEEN_ROUNDS, and what happens on each way."""

    def __init__(self, settings: TailSettings) -> None:
        self.settings = settings
        self._pool = PromptPool(settings)
        self._times = CompletionTimes(settings.prompts_per_step)
        self._phase = Phase.BETWEEN_ROUNDS
        self._exhausted = False
        self._rounds = 0
        self._ratio = DEFAULT_RATIO
        self._kind: RoundKind = "short"
        self._tally = RoundTally()
        self._responses: dict[int, Response] = {}
        self._next_response = 0
        self._unacknowledged = 0

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
        if queued >= self.settings.threshold or (queued and not surplus):
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
        self._tally = RoundTally(began=now, prompt_ratio=launched / self.settings.prompts_per_step)
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
            self._times.add_cut_off(now - prompt.launched_at)
        if not prompt.is_refill:
            self._tally.deferred += 1
            self._pool.defer(prompt, self._rounds)

    def _train(self, now: float) -> list[Decision]:
        groups = []
        settled: list[Decision] = []
        for lane in self._pool.lanes.values():
            for prompt in lane.kept:
                groups.append(Group(prompt.id, tuple(prompt.generated)))
                lengths = [prompt.responses[i].tokens for i in prompt.generated]
                self._tally.lengths.append((lengths, prompt.surplus_tokens))
                self._tally.used_tokens += self._release(prompt)
                settled += self._pool.settle(prompt, "trained")
            lane.kept.clear()
        self._tally.trained = len(groups)
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
        self._tally.seconds = now - self._tally.began
        return self._end_if_settled()

    def _end_if_settled(self) -> list[Decision]:
        if self._phase is not Phase.SETTLING or self._unacknowledged:
            return []
        self._phase = Phase.BETWEEN_ROUNDS
        for lane in self._pool.lanes.values():
            self._pool.put_back(lane.cut_off)
            lane.cut_off = []
        queued = sum(len(lane.queue) for lane in self._pool.lanes.values())
        oldest = next(iter(self._pool.deferred.values()), self._rounds)
        full_wait = self._times.full_wait()
        return [RoundEnded(self._tally.metrics(self._rounds, self._kind, full_wait, queued, self._rounds - oldest))]

    # Prompts and their responses

    @property
    def _responses_each(self) -> int:
        return self.settings.surplus_responses if self._kind == "short" else self.settings.responses_per_prompt

    def _admit(self, lane: Lane, now: float, first: bool) -> Launch:
        # A deferred prompt that starts late would make a round long; as a refill it comes last.
        prompt = lane.take(queue_first=first and self._kind != "short")
        prompt.launched_at = now
        prompt.is_refill = not first
        lane.active[prompt.id] = prompt
        self._tally.admitted += 1
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
        self._tally.cancelled_responses += len(response_ids)
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
            self._times.add_completed(times[-1])
        elif self._kind != "short" and prompt.from_queue:
            wanted = self.settings.responses_per_prompt
            rank = round(wanted * (wanted + 1) / (self.settings.surplus_responses + 1))
            self._times.add_long(times[-1], times[max(rank, 1) - 1])
