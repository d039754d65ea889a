"""Drives the rounds of tail batching for any framework whose workers can run, cancel and report single responses."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

from rl_accel.rollout.prompt_supply import PromptSupply
from rl_accel.rollout.tail_batching import TailBatching
from rl_accel.rollout.tail_decisions import (
    Cancel,
    CheckGroup,
    Decision,
    EpochSettled,
    Finished,
    Launch,
    PromptFailed,
    RequestPrompts,
    RoundEnded,
    RoundMetrics,
    RoundStarted,
    TrainBatch,
)

logger = logging.getLogger("rl_accel")

REPORT_SECONDS = 60.0
"""After so long without an event one line says what the round waits for."""

METRICS_PREFIX = "rl_accel/tail_batching/"
# A step has a second round only if the first could not be filled. Its metrics are sums over rounds, but for these: there the
# last round's count.
_NOT_ADDED_UP = (
    "prompt_ratio",
    "queue_length",
    "oldest_deferral_rounds",
    "wasted_token_share",
    "accepted_tokens_mean",
    "cancelled_tokens_mean",
)


@dataclass(frozen=True, slots=True)
class Job:
    """Responses of one prompt to start. ``payload`` is the prompt's row of the data set; ``step`` the training step."""

    prompt_id: str
    payload: dict[str, Any]
    response_ids: tuple[int, ...]
    step: int


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to a response.

    ``generated``, then ``scored``; or ``failed`` or ``aborted``, which a response can become at any time before it is scored.
    Nothing of a failed or aborted response is left anywhere.

    Attributes:
        tokens: generated so far.
        result: what the response is to the workers' framework (scored only); the driver only hands it on.
        error: one line (failed only).
    """

    kind: Literal["generated", "scored", "failed", "aborted"]
    response_id: int
    tokens: int = 0
    result: Any = None
    error: str = ""


class ResponseWorkers(Protocol):
    """What runs responses."""

    def launch(self, job: Job) -> None:
        """Start responses with the current weights."""

    def cancel(self, response_ids: Iterable[int]) -> None:
        """Stop responses wherever they are. Each is reported as aborted, unless it was over already."""

    def begin_round(self) -> None:
        """Get ready: the weights of this round are in place."""

    def end_round(self) -> None:
        """The batch is complete and all else is cancelled: stop it as fast as possible."""

    def wait(self, seconds: float) -> list[Event]:
        """Return what has happened since the last call; nothing after ``seconds`` without an event."""


@dataclass
class StepResult:
    """The batch of a training step and how it came about.

    Attributes:
        batch: what to train on; without groups until there is one.
        results: of its responses, group by group, in the order they were generated.
        rounds: more than one if a round could not be filled.
        trained, rejected, failed: the prompts settled in the step, id to the data set's own index of the row.
        errors: the last error of each failed prompt.
    """

    batch: TrainBatch = field(default_factory=lambda: TrainBatch(0, "short", ()))
    results: tuple[Any, ...] = ()
    rounds: list[RoundMetrics] = field(default_factory=list)
    trained: dict[str, Any] = field(default_factory=dict)
    rejected: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Return ``rl_accel/tail_batching/<name>``: every known field of the rounds' metrics, the kind as 0 or 1.

        No name holds ``max``, ``min``, ``sum`` or ``total``, by which verl would choose another reduction.
        """
        last = self.rounds[-1]
        values: dict[str, Any] = {f"{kind}_round": last.kind == kind for kind in ("short", "long", "final")}
        values |= {"round": last.number, "rounds": len(self.rounds)}
        for name in (spec.name for spec in fields(RoundMetrics) if spec.name not in ("number", "kind")):
            rounds = self.rounds[-1:] if name in _NOT_ADDED_UP else self.rounds
            known = [value for value in (getattr(metrics, name) for metrics in rounds) if value is not None]
            if known:
                values[name] = sum(known)
        return {METRICS_PREFIX + name: float(value) for name, value in values.items()}


@dataclass
class TokenRate:
    """How fast responses grow, for engines that do not tell how far a cancelled one got."""

    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Count a response that ran to its end."""
        self.tokens += tokens
        self.seconds += seconds

    def estimate(self, seconds: float) -> int:
        """Return how many tokens a response had after ``seconds``, if it ran like those; 0 if none did yet."""
        return int(seconds * self.tokens / self.seconds) if self.seconds else 0


class FailureLog:
    """Logs failed responses in one line each, and the traceback of the first failure of each kind."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def add(self, response_id: int, error: BaseException) -> str:
        """Log that the response failed; return the error as one line."""
        kind = type(error).__name__
        line = f"{kind}: {error}".splitlines()[0]
        logger.error(
            "rl-accel: response %d failed: %s", response_id, line, exc_info=None if kind in self._kinds else error
        )
        self._kinds.add(kind)
        return line


class RolloutDriver:
    """Carries out what ``core`` decides and tells it what happens, one call of :meth:`play` a training step.

    Args:
        core: the state machine.
        supply: where new prompts come from.
        workers: runs responses.
        discard: takes the results of scored responses that are not trained on.
        passes: the verdict on a group, from its prompt id and its results, in the order they were generated. Without one
            every group passes; it is called if the core's run has ``filter_groups``.
        now: a clock in seconds.
    """

    def __init__(
        self,
        core: TailBatching,
        supply: PromptSupply,
        workers: ResponseWorkers,
        discard: Callable[[Sequence[Any]], None],
        passes: Callable[[str, Sequence[Any]], bool] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self.supply = supply
        self._workers = workers
        self._discard = discard
        self._passes = passes
        self._now = now
        self._todo: deque[Decision] = deque()
        self._to_discard: list[Any] = []
        self._scored: dict[int, Event] = {}
        self._cancelled: set[int] = set()
        self._result = StepResult()
        self._round_is_over = False
        self._failed_in_a_row = 0
        self._last_error = ""
        self._step = 0

    def play(self, step: int, steps_left: int) -> StepResult:
        """Return the batch of training step ``step``, with everything else of its round settled and cleared.

        ``steps_left`` counts this step too; see :class:`~rl_accel.rollout.prompt_supply.PromptSupply`.

        Raises:
            RuntimeError: so many prompts failed one after the other that something must be broken.
            ConfigError: quotas and the domains of the data do not fit.
        """
        self._step = step
        self.supply.begin_step(steps_left)
        self._result = StepResult()
        while not self._result.batch.groups:
            self._play_round()
        ids = [response_id for group in self._result.batch.groups for response_id in group.response_ids]
        self._result.results = tuple(self._scored.pop(response_id).result for response_id in ids)
        self._to_discard += [event.result for event in self._scored.values()]  # of groups that the filter rejected
        self._discard_results()
        self._scored.clear()
        return self._result

    def _play_round(self) -> None:
        self._round_is_over = ending = False
        self._workers.begin_round()
        self._todo.extend(self.core.begin_round(self._now()))
        self._carry_out()
        while not self._round_is_over:
            if self.core.is_settling and not ending:
                ending = True
                self._workers.end_round()
            events = self._workers.wait(REPORT_SECONDS)
            if not events:
                logger.info("rl-accel: tail batching waits for responses of %d prompts", len(self.supply.payloads))
            for event in events:
                self._pass_on(event)
                self._carry_out()
            self._discard_results()

    # Decisions

    def _carry_out(self) -> None:
        while self._todo:
            decision = self._todo.popleft()
            match decision:
                case Launch():
                    payload = self.supply.payloads[decision.prompt_id]
                    self._workers.launch(Job(decision.prompt_id, payload, decision.response_ids, self._step))
                case Cancel():
                    self._cancel(decision)
                case RequestPrompts():
                    self._todo.extend(self.supply.answer(decision, self._now()))
                case CheckGroup():
                    self._check(decision)
                case TrainBatch():
                    self._result.batch = decision
                    for group in decision.groups:
                        self._result.trained[group.prompt_id] = self.supply.settle(group.prompt_id)
                case RoundEnded():
                    self._round_is_over = True
                    self._result.rounds.append(decision.metrics)
                case PromptFailed():
                    self._give_up(decision.prompt_id)
                case Finished():
                    # Training goes on: as in verl, the data begins anew.
                    self._round_is_over = True
                    self._todo.extend(self.supply.complete_batch(self._now()))
                case RoundStarted(number, kind, prompts, responses):
                    logger.info(
                        "rl-accel: round %d is %s: %d prompts with %d responses each", number, kind, prompts, responses
                    )
                case EpochSettled(epoch, trained, rejected, failed):
                    counts = f"{trained} prompts trained, {rejected} rejected, {failed} failed"
                    logger.info("rl-accel: epoch %d is settled: %s", epoch, counts)

    def _cancel(self, decision: Cancel) -> None:
        over = [self._scored.pop(i) for i in decision.response_ids if i in self._scored]
        done = {event.response_id for event in over}
        running = [i for i in decision.response_ids if i not in done]
        self._cancelled.update(running)
        self._workers.cancel(running)
        self._to_discard += [event.result for event in over]
        for event in over:
            self._todo.extend(self.core.response_aborted(event.response_id, event.tokens, self._now()))

    def _check(self, decision: CheckGroup) -> None:
        group = decision.group
        if any(response_id not in self._scored for response_id in group.response_ids):
            return  # cut off meanwhile
        results = [self._scored[response_id].result for response_id in group.response_ids]
        if self._passes is None or self._passes(group.prompt_id, results):
            self._todo.extend(self.core.group_kept(group, self._now()))
            return
        self._todo.extend(self.supply.replace(group.prompt_id, self._now()))  # else a final round would lack a prompt
        self._result.rejected[group.prompt_id] = self.supply.settle(group.prompt_id)
        self._todo.extend(self.core.group_rejected(group, self._now()))

    def _give_up(self, prompt_id: str) -> None:
        self._result.failed[prompt_id] = self.supply.settle(prompt_id)
        self._result.errors[prompt_id] = self._last_error
        self._failed_in_a_row += 1
        logger.error(
            "rl-accel: prompt %s failed after its last retry and is not trained: %s", prompt_id, self._last_error
        )
        if self._failed_in_a_row >= self.core.run.prompts_per_step:
            raise RuntimeError(
                f"rl_accel.tail_batching: {self._failed_in_a_row} prompts failed one after the other; "
                f"last error: {self._last_error}"
            )

    # Events

    def _pass_on(self, event: Event) -> None:
        now = self._now()
        response_id = event.response_id
        match event.kind:
            case "generated":
                self._todo.extend(self.core.response_generated(response_id, event.tokens, now))
            case "scored" if response_id in self._cancelled:  # it was over before the worker heard of it
                self._cancelled.discard(response_id)
                self._to_discard.append(event.result)
                self._todo.extend(self.core.response_aborted(response_id, event.tokens, now))
            case "scored":
                self._failed_in_a_row = 0
                self._scored[response_id] = event
                self._todo.extend(self.core.response_scored(response_id, now))
            case "failed":
                self._cancelled.discard(response_id)
                self._last_error = event.error
                self._todo.extend(self.core.response_failed(response_id, event.tokens, now))
            case "aborted":
                self._cancelled.discard(response_id)
                self._todo.extend(self.core.response_aborted(response_id, event.tokens, now))

    def _discard_results(self) -> None:
        # In bulk: the end of a round leaves hundreds of them, and a call for each prompt would take a second or more.
        if self._to_discard:
            self._discard(self._to_discard)
            self._to_discard = []
