"""What is fixed for a run, and its prompts that are not settled yet: where each waits, and how each epoch ended."""

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_accel.errors import ConfigError
from rl_accel.features import TailBatchingFlags
from rl_accel.rollout.tail_decisions import EpochSettled


@dataclass(frozen=True)
class TailRun:
    """What is fixed for a run of :class:`~rl_accel.rollout.tail_batching.TailBatching`.

    Args:
        prompts_per_step: P0, prompts in a batch.
        responses_per_prompt: R0, responses of each.
        flags: the user's.
        filter_groups: ask for a verdict on each complete group (dynamic sampling as in DAPO).
        data_id: anything that names the data and its order; a saved state with another one is refused.

    Raises:
        ConfigError: P0 or R0 is below 1, or ``flags.domain_quotas`` do not add up to P0.
    """

    prompts_per_step: int
    responses_per_prompt: int
    flags: TailBatchingFlags = field(default_factory=TailBatchingFlags)
    filter_groups: bool = False
    data_id: str = ""

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "responses_per_prompt"):
            if getattr(self, name) < 1:
                raise ConfigError(f"rl_accel.tail_batching wants {name} to be at least 1, found {getattr(self, name)}")
        placed = sum(self.domain_quotas.values())
        if self.domain_quotas and placed != self.prompts_per_step:
            raise ConfigError(
                f"rl_accel.tail_batching: domain_quotas must add up to the batch of {self.prompts_per_step} prompts, "
                f"found {placed}"
            )

    @property
    def domain_quotas(self) -> Mapping[str, int]:
        """Prompts of each domain in a batch; empty without quotas."""
        return self.flags.domain_quotas or {}

    @property
    def queue_threshold(self) -> int:
        """Deferred prompts that make a long round."""
        return self.flags.queue_threshold or self.prompts_per_step

    @property
    def surplus_responses(self) -> int:
        """Responses of each prompt that a short round launches."""
        return scaled(self.responses_per_prompt, self.flags.response_ratio)


def scaled(count: int, ratio: float) -> int:
    """Return ``ceil(count * ratio)``, not one more where the product is whole but for rounding (10 * 1.1)."""
    return math.ceil(count * ratio - 1e-9)


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt that is not trained, rejected or failed yet. Below ``deferred_in`` all belongs to its current attempt."""

    id: str
    domain: str
    epoch: int
    deferrals: int = 0
    deferred_in: int | None = None  # number of the round that deferred it first
    launched_at: float = 0.0
    is_refill: bool = False
    from_queue: bool = False
    awaits_verdict: bool = False
    responses: "dict[int, Response]" = field(default_factory=dict)  # all but the cancelled and the failed ones
    generated: list[int] = field(default_factory=list)
    scored_at: list[float] = field(default_factory=list)
    surplus_tokens: list[int] = field(default_factory=list)

    def reset(self) -> None:
        """Forget the current attempt: nothing of it may be used again."""
        self.is_refill = self.from_queue = self.awaits_verdict = False
        self.responses, self.generated, self.scored_at, self.surplus_tokens = {}, [], [], []


@dataclass(slots=True, eq=False)
class Response:
    """A response that was launched and is not settled yet."""

    prompt: Prompt
    retries: int = 0
    tokens: int = -1  # below zero: still generating
    scored: bool = False
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class Lane:
    """The prompts of one domain; without quotas there is one lane.

    ``share`` is what the lane gives to the batch of this round, ``target`` how many prompts it keeps going for that.
    """

    quota: int
    share: int = 0
    target: int = 0
    fresh: deque[Prompt] = field(default_factory=deque)
    queue: deque[Prompt] = field(default_factory=deque)
    active: dict[str, Prompt] = field(default_factory=dict)
    kept: list[Prompt] = field(default_factory=list)
    cut_off: list[Prompt] = field(default_factory=list)

    @property
    def going(self) -> int:
        """Prompts under way or kept for the batch."""
        return len(self.active) + len(self.kept)

    @property
    def waiting(self) -> int:
        """Prompts that could be launched."""
        return len(self.fresh) + len(self.queue)

    @property
    def is_full(self) -> bool:
        """Whether the lane has all that it gives to the batch."""
        return len(self.kept) == self.share

    def take(self, queue_first: bool) -> Prompt:
        """Remove and return the next prompt to launch."""
        from_queue = bool(self.queue) and (queue_first or not self.fresh)
        prompt = (self.queue if from_queue else self.fresh).popleft()
        prompt.from_queue = from_queue
        return prompt

    def prompts(self) -> Iterator[Prompt]:
        """All prompts, in the order in which a resumed run should take them."""
        for place in (self.kept, self.active.values(), self.queue, self.cut_off, self.fresh):
            yield from place


class PromptPool:
    """All unsettled prompts by lane, and the counts of every epoch that has any.

    A prompt that was cut off waits in its lane's ``queue`` once it has been deferred ``max_deferrals`` times, and at the
    front of ``fresh`` before.
    """

    def __init__(self, run: TailRun) -> None:
        self.run = run
        self.lanes = {d: Lane(q) for d, q in run.domain_quotas.items()} or {"": Lane(run.prompts_per_step)}
        self.unsettled: dict[str, Prompt] = {}
        self.deferred: dict[str, int] = {}  # prompt id to the round that deferred it first; oldest first
        self.epoch = 1
        self.epochs: dict[int, Counter[str]] = {1: Counter()}  # offered, trained, rejected, failed

    def lane_of(self, prompt: Prompt) -> Lane:
        """Return the lane of the prompt's domain."""
        return self.lanes[prompt.domain if self.run.domain_quotas else ""]

    def offer(self, prompt_ids: Iterable[str], domain: str) -> None:
        """Add new prompts of the current epoch; all or, if one of them is refused, none."""
        if self.run.domain_quotas and domain not in self.lanes:
            raise ValueError(f"domain must be one of {', '.join(self.lanes)}, found {domain!r}")
        prompts = [Prompt(prompt_id, domain, self.epoch) for prompt_id in prompt_ids]
        for prompt in prompts:
            if not isinstance(prompt.id, str):
                raise TypeError(f"prompt_ids must be strings, found {prompt.id!r}")
        added = {prompt.id: prompt for prompt in prompts}
        twice = added.keys() & self.unsettled.keys()
        if twice or len(added) < len(prompts):
            prompt_id = next(iter(twice), None) or next(p.id for p in prompts if added[p.id] is not p)
            raise ValueError(f"prompt_ids must be new (unique for each epoch and row), found {prompt_id!r} twice")
        self.unsettled.update(added)
        self.epochs[self.epoch]["offered"] += len(prompts)
        if prompts:
            self.lane_of(prompts[0]).fresh.extend(prompts)

    def defer(self, prompt: Prompt, round_number: int) -> None:
        """Count that the prompt was cut off for being slow."""
        prompt.deferrals += 1
        if prompt.deferred_in is None:
            prompt.deferred_in = self.deferred[prompt.id] = round_number

    def put_back(self, prompts: Iterable[Prompt]) -> None:
        """Let prompts wait again: deferred ones behind the queue, all others before new ones."""
        early = []
        for prompt in prompts:
            prompt.reset()
            if prompt.deferrals >= self.run.flags.max_deferrals:
                self.lane_of(prompt).queue.append(prompt)
            else:
                early.append(prompt)
        for prompt in reversed(early):
            self.lane_of(prompt).fresh.appendleft(prompt)

    def settle(self, prompt: Prompt, outcome: str) -> list[EpochSettled]:
        """Count the prompt as trained, rejected or failed, for ever."""
        del self.unsettled[prompt.id]
        self.deferred.pop(prompt.id, None)
        self.epochs[prompt.epoch][outcome] += 1
        return self._close(prompt.epoch)

    def end_epoch(self) -> list[EpochSettled]:
        """Prompts offered from now on belong to the next epoch."""
        self.epoch += 1
        self.epochs[self.epoch] = Counter()
        return self._close(self.epoch - 1)

    def _close(self, epoch: int) -> list[EpochSettled]:
        counts = self.epochs[epoch]
        if epoch == self.epoch or _open_prompts(counts):
            return []
        del self.epochs[epoch]
        return [EpochSettled(epoch, counts["trained"], counts["rejected"], counts["failed"])]

    def share_out_rest(self) -> bool:
        """Plan a final round: every lane gives up to its quota, and others fill up. False: fewer than P0 are left."""
        missing = self.run.prompts_per_step
        for lane in self.lanes.values():
            lane.share = min(lane.quota, lane.waiting)
            missing -= lane.share
        for lane in self.lanes.values():
            extra = min(missing, lane.waiting - lane.share)
            lane.share += extra
            missing -= extra
            lane.target = lane.share
        return missing == 0

    def lend(self, lane: Lane) -> bool:
        """Give one of the lane's places in the batch to another lane that has a prompt for it. False: none has."""
        for other in self.lanes.values():
            if other is not lane and (other.waiting or other.going > other.share):
                lane.share -= 1
                other.share += 1
                other.target = max(other.going, other.share)
                return True
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return prompts and counts, ready for JSON."""
        prompts = [p for lane in self.lanes.values() for p in lane.prompts()]
        return {
            "epoch": self.epoch,
            "ledgers": {str(epoch): dict(counts) for epoch, counts in self.epochs.items()},
            "prompts": [[p.id, p.domain, p.epoch, p.deferrals, p.deferred_in] for p in prompts],
        }

    @classmethod
    def restored(cls, run: TailRun, state: Mapping[str, Any]) -> "PromptPool":
        """Return the pool that ``state_dict`` saved, every prompt waiting."""
        pool = cls(run)
        pool.epoch = int(state["epoch"])
        pool.epochs = {int(epoch): Counter(counts) for epoch, counts in state["ledgers"].items()}
        prompts = [Prompt(*fields) for fields in state["prompts"]]
        for prompt in prompts:
            if run.domain_quotas and prompt.domain not in pool.lanes:
                raise ValueError(f"domain_quotas must cover the domain {prompt.domain!r} of a saved prompt")
        pool.unsettled = {prompt.id: prompt for prompt in prompts}
        by_age = sorted((p for p in prompts if p.deferred_in is not None), key=lambda p: p.deferred_in or 0)
        pool.deferred = {p.id: p.deferred_in or 0 for p in by_age}
        open_prompts = sum(map(_open_prompts, pool.epochs.values()))
        if not len(pool.unsettled) == len(prompts) == open_prompts or pool.epoch not in pool.epochs:
            raise ValueError(f"the counts of epochs leave {open_prompts} prompts open, found {len(pool.unsettled)}")
        pool.put_back(prompts)
        return pool


def _open_prompts(counts: Counter[str]) -> int:
    """How many prompts of an epoch are not settled."""
    return counts["offered"] - counts["trained"] - counts["rejected"] - counts["failed"]
