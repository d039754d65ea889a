"""State machine of tail batching (RollPacker, NSDI'26): a round starts more prompts than a batch needs and ends when enough
prompts are complete. Slow prompts run again in a later round, so no prompt is lost."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import fmean
from typing import Any

from rl_accel.errors import ConfigError, typed_line
from rl_accel.features import TailBatchingFlags
from rl_accel.rollout.tail_decisions import (
    Cancel,
    CheckGroup,
    Decision,
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

_FORMAT = "rl_accel.tail_batching"
_VERSION = 3
_MUST_AGREE = ("format", "version", "prompts_per_step", "responses_per_prompt", "data_id", "rows_id")


@dataclass(frozen=True)
class TailRun:
    """Fixed parameters of a training run with tail batching.

    Args:
        prompts_per_step: number of prompts in a batch (P0).
        responses_per_prompt: number of trained responses per prompt (R0).
        flags: the user's flags of tail batching.
        filter_groups: True if a group filter accepts or rejects each complete prompt.
        data_id: text that identifies the data set and its row order. A saved state with another text is refused.
        rows_id: digest of the rows of the data set. A saved state with another digest is refused.

    Raises:
        ConfigError: ``prompts_per_step`` or ``responses_per_prompt`` is below 1.
    """

    prompts_per_step: int
    responses_per_prompt: int
    flags: TailBatchingFlags = field(default_factory=TailBatchingFlags)
    filter_groups: bool = False
    data_id: str = ""
    rows_id: str = ""

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "responses_per_prompt"):
            if getattr(self, name) < 1:
                raise ConfigError(f"rl_accel.tail_batching wants {name} to be at least 1, found {getattr(self, name)}")

    @property
    def short_round_prompts(self) -> int:
        """Number of prompts that a short round starts, to train on the first that complete."""
        return _scaled(self.prompts_per_step, self.flags.prompt_ratio)

    @property
    def short_round_responses(self) -> int:
        """Number of responses that a short round starts for each prompt, to train on the first that finish."""
        return _scaled(self.responses_per_prompt, self.flags.response_ratio)

    @property
    def rounding_warnings(self) -> list[str]:
        """Warnings about ``prompt_ratio`` and ``response_ratio``, if rounding up makes a ratio more than 10% larger."""
        warnings = []
        counts = {"prompt_ratio": self.prompts_per_step, "response_ratio": self.responses_per_prompt}
        for name, count in counts.items():
            ratio = getattr(self.flags, name)
            number = _scaled(count, ratio)
            if number > 1.1 * ratio * count:
                warnings.append(f"{name}={ratio} launches {number} for {count}, which is {number / count:.2f} times")
        return warnings


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt that was not yet trained, rejected or given up.

    Attributes:
        deferrals: number of rounds that deferred the prompt.
        deferred_in: number of the first round that deferred the prompt, counted from 1; 0: never deferred.
    """

    id: str
    deferrals: int = 0
    deferred_in: int = 0


@dataclass(slots=True, eq=False)
class _Attempt:
    """A prompt in the current round, with the states of its responses.

    A response is in ``generating``, then in ``generated``. A cancelled response is in ``stopping``, or in ``generated_late`` once
    it is generated, until it has stopped. Failed and stopped responses are in none of these.

    Attributes:
        is_refill: True if the prompt was started during the round, in place of a rejected or failed prompt.
        generating: ids of the responses that are being generated, in the order of launch.
        generated: number of tokens of each generated response, by id, in the order of completion.
        scored: ids of the scored responses.
        stopping: ids of the cancelled responses that are still being generated.
        generated_late: number of tokens of each cancelled response that is generated and has not stopped, by id.
        retries: for a response that replaces a failed one, number of failures before it, by id. No entry means 0.
        cancelled_tokens: number of tokens of each cancelled response that has stopped.
    """

    prompt: _Prompt
    is_refill: bool
    generating: dict[int, None] = field(default_factory=dict)
    generated: dict[int, int] = field(default_factory=dict)
    scored: set[int] = field(default_factory=set)
    stopping: set[int] = field(default_factory=set)
    generated_late: dict[int, int] = field(default_factory=dict)
    retries: dict[int, int] = field(default_factory=dict)
    cancelled_tokens: list[int] = field(default_factory=list)

    def is_cancelled(self, response_id: int) -> bool:
        return response_id in self.stopping or response_id in self.generated_late

    def group(self) -> Group:
        return Group(self.prompt.id, tuple(self.generated))


class Phase(Enum):
    """Phase of a round of tail batching. The values are parts of error messages."""

    BETWEEN_ROUNDS = "no round is open"
    FILLING = "the round waits for prompts"
    OPEN = "a round is open"
    STOPPING = "cancelled responses are not acknowledged"


class TailBatching:
    """State machine that decides which responses to launch, to cancel and to train on. It has no I/O and no clock.

    P0 is the number of prompts in a batch. R0 is the number of trained responses per prompt.

    **Short round.** Launches more than P0 prompts, and more than R0 responses of each prompt. The first R0 responses of a prompt to
    finish *generating* are its group; the others are cancelled at once. A prompt is complete when its group is scored. The first P0
    complete prompts are the batch. All other prompts are deferred: their responses are cancelled, and they are launched anew in a
    later round, so training stays strictly on-policy. A prompt that was deferred ``flags.max_deferrals`` times waits in a queue.

    **Long round.** Runs P0 prompts with R0 responses each and waits for all of them, once the queue holds enough prompts or while a
    validation waits for its longest responses.

    **Final round.** Runs P0 prompts as a long round does. Near the end of the run, final rounds replace short rounds that would
    start more prompts than the remaining batches can train.

    Every prompt is trained, rejected or reported as failed exactly once, and every batch has P0 groups of R0 responses.

    **Driver.** The driver is the code that calls this class and has the responses generated. It calls ``begin_round``, carries out
    the decisions that each call returns, in their order, and reports events. The argument ``now`` is the time of an event in
    seconds, of any one clock. The driver answers the decisions as follows.

    - ``RequestPrompts``: ``offer`` new ids. Each epoch and row of the data has a unique id, for example ``"2:1017"``.
    - ``Launch``: for each response, ``response_generated`` and later ``response_scored``; or ``response_failed``, after which a
      retry may follow; or, after a cancel, ``response_aborted``.
    - ``Cancel``: ``response_aborted`` for each response that was not scored before, even if its server is gone.
    - ``CheckGroup`` (only with ``filter_groups``): ``group_checked``, before any other event.
    - ``TrainBatch``: train on exactly these groups. ``RoundEnded``: begin the next round after the weight update.

    Late events, about responses that have ended, are ignored. Impossible events raise ValueError and change nothing.

    **Save and resume.** ``state_dict`` works at any time. A batch counts as trained from ``TrainBatch`` on, so save the state with
    the checkpoint that contains the update. Also save the data rows of ``unsettled_prompts`` and the position in the data. After
    ``load_state_dict``, prompts that were running at the time of saving wait again. Do not offer them again.

    Attributes:
        run: parameters of the run.
        phase: phase of the current round.
        settled: number of prompts that were trained, rejected or failed, over all rounds.
    """

    def __init__(self, run: TailRun) -> None:
        self.run = run
        self.phase = Phase.BETWEEN_ROUNDS
        self.settled = 0
        self._fresh: deque[_Prompt] = (
            deque()
        )  # waiting prompts that are new or were deferred less than max_deferrals times
        self._queue: deque[_Prompt] = deque()  # waiting prompts for long and final rounds
        self._active: dict[str, _Attempt] = {}  # running prompts of the round, by prompt id
        self._kept: list[_Attempt] = []  # complete prompts, which go into the batch of the round
        self._trained: list[_Attempt] = []  # prompts of the last batch
        self._target = 0  # number of prompts that the round starts, and replaces if they are rejected or fail
        self._unsettled: dict[str, _Prompt] = {}
        self._rounds = 0
        self._steps_left = 0
        self._kind: RoundKind = "short"
        self._responses_each = 0
        self._began = 0.0
        self._metrics = RoundMetrics()
        self._attempts: dict[int, _Attempt] = {}  # by response id, until the response has ended
        self._next_response = 0
        self._unacknowledged = 0
        self._unchecked: _Attempt | None = None

    def begin_round(self, steps_left: int, now: float, during_validation: bool = False) -> list[Decision]:
        """Opens the next round and returns the first decisions to carry out.

        Args:
            steps_left: number of batches still to be trained, including the batch of this round.
            now: current time in seconds.
            during_validation: True if a validation runs at the same time. The round is then a long one.

        Raises:
            ValueError: a round is open, or ``steps_left`` is below 1.
        """
        if self.phase is not Phase.BETWEEN_ROUNDS:
            raise ValueError(f"begin_round must come between rounds, but {self.phase.value}")
        if steps_left < 1:
            raise ValueError(f"steps_left must be at least 1, found {steps_left}")
        self._steps_left = steps_left
        self._kind = self._plan(during_validation)
        short = self._kind == "short"
        self._responses_each = self.run.short_round_responses if short else self.run.responses_per_prompt
        self.phase = Phase.FILLING
        return self._fill(now)

    def offer(self, prompt_ids: Sequence[str], now: float) -> list[Decision]:
        """Adds new prompts. Allowed at any time.

        Raises:
            TypeError, ValueError: a prompt id is no string or is already known. No prompt is added then.
        """
        new: dict[str, _Prompt] = {}
        for prompt_id in prompt_ids:
            if not isinstance(prompt_id, str):
                raise TypeError(f"ids of prompts must be strings, found {prompt_id!r}")
            if prompt_id in self._unsettled or prompt_id in new:
                raise ValueError(f"ids of prompts must be new, found {prompt_id!r} twice")
            new[prompt_id] = _Prompt(prompt_id)
        self._unsettled |= new
        self._fresh += new.values()
        if self.phase is Phase.FILLING:
            return self._fill(now)
        return self._refill() if self.phase is Phase.OPEN else []

    # Responses and groups

    def response_generated(self, response_id: int, tokens: int) -> list[Decision]:
        """Records that a response was generated, with ``tokens`` tokens.

        If its prompt then has enough generated responses, cancels the prompt's other responses.
        """
        attempt = self._find(response_id, tokens)
        if attempt is None:
            return []
        if response_id in attempt.generating:
            del attempt.generating[response_id]
            attempt.generated[response_id] = tokens
            complete = len(attempt.generated) == self.run.responses_per_prompt
            return self._cancel(attempt) if complete else []
        if response_id not in attempt.stopping:
            raise ValueError(f"response_id must be of a response that is generating, but {response_id} had finished")
        attempt.stopping.remove(response_id)
        attempt.generated_late[response_id] = tokens
        return []

    def response_scored(self, response_id: int, now: float) -> list[Decision]:
        """Records that a generated response was scored at the time ``now``.

        If this completes the prompt, keeps the prompt for the batch or, with a group filter, asks the driver to check it.
        """
        attempt = self._find(response_id)
        if attempt is None:
            return []
        if response_id in attempt.generated_late:
            return self.response_aborted(response_id, attempt.generated_late[response_id])
        if response_id not in attempt.generated or response_id in attempt.scored:
            state = "was scored before" if response_id in attempt.scored else "is still generating"
            raise ValueError(f"response_id must be of a response without a score, but {response_id} {state}")
        attempt.scored.add(response_id)
        if len(attempt.scored) < self.run.responses_per_prompt:
            return []
        if not self.run.filter_groups:
            return self._keep(attempt, now)
        self._unchecked = attempt
        return [CheckGroup(attempt.group())]

    def response_failed(self, response_id: int, tokens: int, now: float, lost: bool = False) -> list[Decision]:
        """Records that a response failed after ``tokens`` tokens. Launches a new response in its place.

        Each response is replaced at most ``max_retries`` times. Failures because a process died (``lost``) do not count. After
        that, the prompt is given up if it has too few responses left to train on.
        """
        attempt = self._find(response_id, tokens)
        if attempt is None:
            return []
        if attempt.is_cancelled(response_id):
            return self.response_aborted(response_id, tokens)
        if response_id in attempt.scored:
            raise ValueError(f"response_id must be of a response without a score, but {response_id} was scored before")
        del self._attempts[response_id]
        attempt.generating.pop(response_id, None)
        attempt.generated.pop(response_id, None)
        retries = attempt.retries.pop(response_id, 0)
        self._metrics.responses_failed += 1
        self._waste(tokens)
        if lost or retries < self.run.flags.max_retries:
            return [self._launch(attempt, 1, retries + (not lost))]
        if len(attempt.generating) + len(attempt.generated) >= self.run.responses_per_prompt:
            return []
        self._metrics.prompts_failed += 1
        cancelled = self._cancel(attempt, generated=True)
        return [*cancelled, PromptFailed(attempt.prompt.id), *self._replace(attempt)]

    def response_aborted(self, response_id: int, tokens: int) -> list[Decision]:
        """Records that a cancelled response has stopped after ``tokens`` tokens.

        Ends the round if its batch is chosen and no other cancelled response still runs.
        """
        attempt = self._find(response_id, tokens)
        if attempt is None:
            return []
        if not attempt.is_cancelled(response_id):
            raise ValueError(f"response_id must be of a cancelled response, but {response_id} was not cancelled")
        del self._attempts[response_id]
        attempt.stopping.discard(response_id)
        attempt.generated_late.pop(response_id, None)
        self._unacknowledged -= 1
        self._waste(tokens)
        attempt.cancelled_tokens.append(tokens)
        return self._end_if_stopped()

    def group_checked(self, prompt_id: str, passes: bool, now: float) -> list[Decision]:
        """Keeps a prompt for the batch if it ``passes`` the group filter. Otherwise drops it and starts another prompt."""
        attempt = self._unchecked
        if attempt is None or attempt.prompt.id != prompt_id:
            raise ValueError(f"prompt_id must be of the group to check, found {prompt_id!r}")
        self._unchecked = None
        if passes:
            return self._keep(attempt, now)
        self._metrics.prompts_rejected += 1
        return self._replace(attempt)

    # Saving

    def unsettled_prompts(self) -> list[str]:
        """Returns the ids of all prompts passed to :meth:`offer` that are not yet trained, rejected or failed."""
        return list(self._unsettled)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as JSON-compatible data, from which a later run can resume."""
        running = [attempt.prompt for attempt in (*self._kept, *self._active.values())]
        prompts = [*running, *self._queue, *self._fresh]  # in the order in which a resumed run launches them
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "prompts_per_step": self.run.prompts_per_step,
            "responses_per_prompt": self.run.responses_per_prompt,
            "data_id": self.run.data_id,
            "rows_id": self.run.rows_id,
            "rounds": self._rounds - (self.phase is Phase.OPEN),
            "next_response": self._next_response,
            "settled": self.settled,
            "prompts": [[p.id, p.deferrals, p.deferred_in] for p in prompts],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the current state by a saved state. The flags may differ from those of the saved run.

        Raises:
            ValueError: ``state`` is damaged or has another version, batch size, number of responses per prompt or data id. The
                current state stays unchanged then.
        """
        own_state = self.state_dict()
        for key in _MUST_AGREE:
            saved = state.get(key) if isinstance(state, Mapping) else type(state).__name__
            is_same = type(saved) is type(own_state[key]) and saved == own_state[key]
            if not is_same and key == "rows_id":
                raise ValueError("the data set has other rows than the saved run")
            if not is_same:
                raise ValueError(f"state must have {key} = {own_state[key]!r}, found {saved!r}")
        resumed = TailBatching(self.run)
        try:
            resumed._rounds = _count_in(state["rounds"])
            resumed._next_response = _count_in(state["next_response"])
            resumed.settled = _count_in(state["settled"])
            prompts = [_saved_prompt(*fields) for fields in state["prompts"]]
            resumed._unsettled = {prompt.id: prompt for prompt in prompts}
            if len(resumed._unsettled) < len(prompts):
                raise ValueError("a prompt is there twice")
            resumed._put_back(prompts)
        except Exception as error:  # a damaged state may hold anything
            raise ValueError(f"state is damaged or does not fit: {typed_line(error)}") from error
        self.__dict__.update(resumed.__dict__)

    # Filling, refilling and ending a round

    def _plan(self, during_validation: bool) -> RoundKind:
        """Returns the kind of the next round, and sets the number of prompts to run in it."""
        batch_size = self.run.prompts_per_step
        launched = self.run.short_round_prompts
        self._target = batch_size
        # If rounds start no more prompts than they train, no prompt is deferred, and the queue never fills up. Run it now.
        queue_is_full = len(self._queue) >= (self.run.flags.queue_threshold or batch_size)
        if during_validation or queue_is_full or (self._queue and launched == batch_size):
            return "long"
        if launched - len(self._fresh) > self._trainable_prompts():
            return "final"
        self._target = launched
        return "short"

    def _started(self) -> int:
        """Returns the number of prompts that are running or complete in this round."""
        return len(self._active) + len(self._kept)

    def _trainable_prompts(self) -> int:
        """Returns how many more new prompts the batches up to the end of the run can train."""
        known = self._started() + len(self._fresh) + len(self._queue)
        return max(self._steps_left * self.run.prompts_per_step - known, 0)

    def _fill(self, now: float) -> list[Decision]:
        """Starts the round if enough prompts wait. Otherwise, asks the driver for more prompts."""
        uses_queue = self._kind != "short"
        available = len(self._fresh)
        if uses_queue:
            available += len(self._queue)
        if available < self._target:
            return [RequestPrompts(self._target - available)]
        self.phase = Phase.OPEN
        self._rounds += 1
        self._metrics = RoundMetrics(self._rounds, self._kind, self._target / self.run.prompts_per_step)
        self._began = now
        decisions: list[Decision] = [RoundStarted(self._rounds, self._kind, self._target, self._responses_each)]
        for _ in range(self._target):
            decisions.append(self._admit(from_queue=uses_queue and bool(self._queue)))
        return decisions

    def _refill(self) -> list[Decision]:
        """Starts new prompts in place of rejected and failed prompts, as far as the remaining batches of the run can train them.

        Otherwise starts deferred prompts, but only if the round has too few prompts for its batch.
        """
        decisions: list[Decision] = []
        while self._started() < self._target:
            trainable = self._trainable_prompts()
            if not self._fresh and trainable:
                decisions.append(RequestPrompts(min(self._target - self._started(), trainable)))
                break
            # If no further prompt is trainable, the unsettled prompts fill all batches, so there are enough deferred prompts.
            if not self._fresh and self._started() >= self.run.prompts_per_step:
                break
            decisions.append(self._admit(from_queue=not self._fresh, is_refill=True))
        return decisions

    def _keep(self, attempt: _Attempt, now: float) -> list[Decision]:
        """Adds a complete prompt to the batch. If the batch is full then, defers all other prompts and has the batch trained."""
        del self._active[attempt.prompt.id]
        self._kept.append(attempt)
        if len(self._kept) < self.run.prompts_per_step:
            return []
        decisions: list[Decision] = []
        for slow in self._active.values():
            prompt = slow.prompt
            # A refill started late and had no fair chance, so that it does not count as deferred.
            if not slow.is_refill:
                self._metrics.prompts_deferred += 1
                prompt.deferred_in = prompt.deferred_in or self._rounds
                prompt.deferrals += 1
            decisions += self._cancel(slow, generated=True)
        self._put_back([slow.prompt for slow in self._active.values()])
        self._active.clear()
        return decisions + self._train(now)

    def _put_back(self, prompts: Sequence[_Prompt]) -> None:
        """Lets prompts wait: those deferred ``max_deferrals`` times in the queue for long rounds, others ahead of new prompts."""
        for prompt in prompts:
            if prompt.deferrals >= self.run.flags.max_deferrals:
                self._queue.append(prompt)
        for prompt in reversed(prompts):
            if prompt.deferrals < self.run.flags.max_deferrals:
                self._fresh.appendleft(prompt)

    def _train(self, now: float) -> list[Decision]:
        trained = self._kept
        self._kept = []
        for attempt in trained:
            self._settle(attempt)
        self._trained = trained
        self._metrics.prompts_trained = len(trained)
        self._metrics.rollout_seconds = now - self._began
        self.phase = Phase.STOPPING
        batch = TrainBatch(self._rounds, self._kind, tuple(attempt.group() for attempt in trained))
        return [batch, *self._end_if_stopped()]

    def _end_if_stopped(self) -> list[Decision]:
        if self.phase is not Phase.STOPPING or self._unacknowledged:
            return []
        self.phase = Phase.BETWEEN_ROUNDS
        metrics = self._metrics
        metrics.queue_length = len(self._queue)
        deferred_in = [prompt.deferred_in for prompt in self._unsettled.values() if prompt.deferrals]
        metrics.oldest_deferral_rounds = self._rounds - min(deferred_in, default=self._rounds)
        if metrics.tokens_generated:
            metrics.wasted_token_share = metrics.tokens_wasted / metrics.tokens_generated
        # Cancelled responses of a trained prompt are acknowledged after TrainBatch, so their lengths are complete only now.
        with_cancelled = [attempt for attempt in self._trained if attempt.cancelled_tokens]
        if with_cancelled:
            metrics.accepted_tokens_mean = fmean(fmean(attempt.generated.values()) for attempt in with_cancelled)
            metrics.cancelled_tokens_mean = fmean(fmean(attempt.cancelled_tokens) for attempt in with_cancelled)
        return [RoundEnded(metrics)]

    def _waste(self, tokens: int) -> None:
        self._metrics.tokens_generated += tokens
        self._metrics.tokens_wasted += tokens

    # Prompts and their responses

    def _admit(self, from_queue: bool, is_refill: bool = False) -> Launch:
        waiting = self._queue if from_queue else self._fresh
        prompt = waiting.popleft()
        attempt = _Attempt(prompt, is_refill)
        self._active[prompt.id] = attempt
        self._metrics.prompts_admitted += 1
        return self._launch(attempt, self._responses_each)

    def _launch(self, attempt: _Attempt, count: int, retries: int = 0) -> Launch:
        new = range(self._next_response, self._next_response + count)
        self._next_response += count
        self._attempts.update(dict.fromkeys(new, attempt))
        attempt.generating.update(dict.fromkeys(new))
        if retries:
            attempt.retries.update(dict.fromkeys(new, retries))
        return Launch(attempt.prompt.id, tuple(new))

    def _cancel(self, attempt: _Attempt, generated: bool = False) -> list[Decision]:
        """Cancels the responses of a prompt that are being generated and, with ``generated=True``, also those already generated."""
        response_ids = [*attempt.generating]
        attempt.stopping.update(attempt.generating)
        self._unacknowledged += len(attempt.generating)
        attempt.generating.clear()
        if generated:
            response_ids += attempt.generated
            for response_id, tokens in attempt.generated.items():
                if response_id in attempt.scored:  # a scored response has ended already
                    del self._attempts[response_id]
                    self._waste(tokens)
                else:
                    attempt.generated_late[response_id] = tokens
                    self._unacknowledged += 1
            attempt.generated.clear()
        self._metrics.responses_cancelled += len(response_ids)
        return [Cancel(attempt.prompt.id, tuple(response_ids))] if response_ids else []

    def _settle(self, attempt: _Attempt) -> None:
        """Forgets a prompt that was trained, rejected or given up, and its generated responses."""
        del self._unsettled[attempt.prompt.id]
        self.settled += 1
        for response_id in attempt.generated:
            del self._attempts[response_id]
        self._metrics.tokens_generated += sum(attempt.generated.values())

    def _replace(self, attempt: _Attempt) -> list[Decision]:
        self._settle(attempt)
        del self._active[attempt.prompt.id]
        return self._refill()

    def _find(self, response_id: int, tokens: int = 0) -> _Attempt | None:
        """Checks an event about a response, and returns the attempt (prompt in this round) of the response; None if it has ended.

        Raises:
            ValueError: the response was never launched, the event's number of ``tokens`` is negative, or the state machine must
                first get the answer to its last ``CheckGroup``.
        """
        attempt = self._attempts.get(response_id)
        if attempt is None and not (isinstance(response_id, int) and 0 <= response_id < self._next_response):
            raise ValueError(f"response_id must be of a response that was launched, found {response_id!r}")
        if tokens < 0:
            raise ValueError(f"tokens must be at least 0, found {tokens}")
        if self._unchecked is not None:
            raise ValueError(f"group_checked must come first, for prompt {self._unchecked.prompt.id}")
        return attempt


def _count_in(saved: Any) -> int:
    """Returns the number ``saved`` in a state. Raises TypeError or ValueError if it is no whole number from 0 on."""
    if type(saved) is not int:
        raise TypeError(f"a number must be of type int, found {saved!r}")
    if saved < 0:
        raise ValueError(f"a number must be at least 0, found {saved}")
    return saved


def _saved_prompt(prompt_id: Any, deferrals: Any, deferred_in: Any) -> _Prompt:
    """Returns the prompt with these fields in a state. Raises TypeError or ValueError if a field has a wrong type or sign."""
    if not isinstance(prompt_id, str):
        raise TypeError(f"the id of a prompt must be a string, found {prompt_id!r}")
    return _Prompt(prompt_id, _count_in(deferrals), _count_in(deferred_in))


def _scaled(count: int, ratio: float) -> int:
    """Returns the ceiling of ``count * ratio``. Ignores rounding errors, which make 10 * 1.1 larger than 11."""
    return math.ceil(count * ratio - 1e-9)
