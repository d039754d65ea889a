"""Plays the rounds of tail batching: carries out what the core decides and tells it what happens. Knows no trainer."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rl_accel.rollout.hosting import report
from rl_accel.rollout.hosting.messages import Event, Job, ResponseWorkers
from rl_accel.rollout.hosting.outcome import Outcome, Settled
from rl_accel.rollout.hosting.prompts import Prompts
from rl_accel.rollout.hosting.supply import Supply
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


class Host:
    """Drives ``core`` with real responses, one call of :meth:`play` a training step.

    Args:
        core: the state machine.
        prompts: where new prompts come from.
        workers: runs responses.
        discard: takes the results of scored responses that are not trained on.
        passes: the verdict on a group, from its prompt id and its results, in the order they were generated. Without one
            every group passes; it is called if the core's settings have ``filter_groups``.
        now: a clock in seconds.
    """

    def __init__(
        self,
        core: TailBatching,
        prompts: Prompts,
        workers: ResponseWorkers,
        discard: Callable[[Sequence[Any]], None],
        passes: Callable[[str, Sequence[Any]], bool] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self.prompts = prompts
        self._workers = workers
        self._discard = discard
        self._passes = passes
        self._now = now
        self._todo: deque[Decision] = deque()
        self._garbage: list[Any] = []
        self._scored: dict[int, Event] = {}
        self._cancelled: set[int] = set()
        self._supply = Supply(core, prompts, now)
        self._batch: TrainBatch | None = None
        self._settled = Settled()
        self._rounds: list[RoundMetrics] = []
        self._over = False
        self._failed_in_a_row = 0
        self._last_error = ""
        self._step = 0

    def play(self, step: int, steps_left: int) -> Outcome:
        """Return the batch of training step ``step``, with everything else of its round settled and cleared.

        ``steps_left`` counts this step too; see :class:`~rl_accel.rollout.hosting.supply.Supply`.

        Raises:
            RuntimeError: so many prompts failed one after the other that something must be broken.
            ConfigError: quotas and the domains of the data do not fit.
        """
        self._step = step
        self._supply.begin_step(steps_left)
        self._batch, self._settled, self._rounds = None, Settled(), []
        while self._batch is None:
            self._play_round()
        batch = self._batch
        ids = [response_id for group in batch.groups for response_id in group.response_ids]
        results = tuple(self._scored.pop(response_id).result for response_id in ids)
        self._garbage += [event.result for event in self._scored.values()]  # of groups that the filter rejected
        self._sweep()
        self._scored.clear()
        return Outcome(batch, results, self._settled, tuple(self._rounds))

    def _play_round(self) -> None:
        self._over = ending = False
        self._workers.begin_round()
        self._todo.extend(self.core.begin_round(self._now()))
        self._carry_out()
        while not self._over:
            if self.core.is_settling and not ending:
                ending = True
                self._workers.end_round()
            events = self._workers.wait(REPORT_SECONDS)
            if not events:
                logger.info("rl-accel: tail batching waits for responses of %d prompts", len(self.prompts.payloads))
            for event in events:
                self._hear(event)
                self._carry_out()
            self._sweep()

    # Decisions

    def _carry_out(self) -> None:
        while self._todo:
            decision = self._todo.popleft()
            match decision:
                case Launch():
                    payload = self.prompts.payloads[decision.prompt_id]
                    self._workers.launch(Job(decision.prompt_id, payload, decision.response_ids, self._step))
                case Cancel():
                    self._cancel(decision)
                case RequestPrompts():
                    self._todo.extend(self._supply.answer(decision))
                case CheckGroup():
                    self._judge(decision)
                case TrainBatch():
                    self._batch = decision
                    ids = [group.prompt_id for group in decision.groups]
                    self._settled.trained = {prompt_id: self.prompts.settle(prompt_id) for prompt_id in ids}
                case RoundEnded():
                    self._over = True
                    self._rounds.append(decision.metrics)
                case PromptFailed():
                    self._give_up(decision.prompt_id)
                case Finished():
                    # Training goes on: as in verl, the data begins anew.
                    self._over = True
                    self._todo.extend(self._supply.complete_batch())
                case RoundStarted() | EpochSettled():
                    report.announce(decision)

    def _cancel(self, decision: Cancel) -> None:
        over = [self._scored.pop(i) for i in decision.response_ids if i in self._scored]
        done = {event.response_id for event in over}
        running = [i for i in decision.response_ids if i not in done]
        self._cancelled.update(running)
        self._workers.cancel(running)
        self._garbage += [event.result for event in over]
        for event in over:
            self._todo.extend(self.core.response_aborted(event.response_id, event.tokens, self._now()))

    def _judge(self, decision: CheckGroup) -> None:
        group = decision.group
        if any(response_id not in self._scored for response_id in group.response_ids):
            return  # cut off meanwhile
        results = [self._scored[response_id].result for response_id in group.response_ids]
        if self._passes is None or self._passes(group.prompt_id, results):
            self._todo.extend(self.core.group_kept(group, self._now()))
            return
        self._todo.extend(self._supply.replace(group.prompt_id))  # else a final round would lack a prompt
        self._settled.rejected[group.prompt_id] = self.prompts.settle(group.prompt_id)
        self._todo.extend(self.core.group_rejected(group, self._now()))

    def _give_up(self, prompt_id: str) -> None:
        self._settled.failed[prompt_id] = self.prompts.settle(prompt_id)
        self._settled.errors[prompt_id] = self._last_error
        self._failed_in_a_row += 1
        logger.error(
            "rl-accel: prompt %s failed after its last retry and is not trained: %s", prompt_id, self._last_error
        )
        if self._failed_in_a_row >= self.core.settings.prompts_per_step:
            raise RuntimeError(
                f"rl_accel.tail_batching: {self._failed_in_a_row} prompts failed one after the other; "
                f"last error: {self._last_error}"
            )

    # Events

    def _hear(self, event: Event) -> None:
        now = self._now()
        response_id = event.response_id
        match event.kind:
            case "generated":
                self._todo.extend(self.core.response_generated(response_id, event.tokens, now))
            case "scored" if response_id in self._cancelled:  # it was over before the worker heard of it
                self._cancelled.discard(response_id)
                self._garbage.append(event.result)
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

    def _sweep(self) -> None:
        # In bulk: the end of a round leaves hundreds of them, and a call for each prompt would take a second or more.
        if self._garbage:
            self._discard(self._garbage)
            self._garbage = []
