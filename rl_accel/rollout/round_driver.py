"""Runs the rounds of tail batching in any framework whose workers can run, cancel and report single responses."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args

from rl_accel.errors import ConfigError, RlAccelError, first_line, root_cause, typed_line
from rl_accel.rollout.tail_batching import Phase, TailBatching
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

logger = logging.getLogger("rl_accel")

REPORT_SECONDS = 60.0
"""Seconds without an event after which a log line says which responses the driver waits for."""
REPORT_PROMPTS = 8
"""Maximum number of prompts named for each state of a response in the log line about what the driver waits for."""
METRICS_PREFIX = "rl_accel/tail_batching/"


@dataclass(frozen=True, slots=True)
class Job:
    """Order to a worker to generate responses to a prompt. ``payload`` is the prompt's data row, ``step`` the training step."""

    prompt_id: str
    payload: dict[str, Any]
    response_ids: tuple[int, ...]
    step: int


@dataclass(frozen=True, slots=True)
class Event:
    """Change of the state of a response, reported by a worker to the driver of tail batching.

    A response becomes ``generated``, then ``scored``. Instead of ``scored``, its last state may be ``failed`` or, if it was
    cancelled, ``aborted``. In a last state, nothing of the response runs any more.

    Attributes:
        kind: new state of the response.
        tokens: number of tokens generated so far.
        result: data of the response in the framework's format; None if there is none.
        error: error message of one line; empty unless the response failed.
        lost: True if the response failed because a server or worker died.
        ends_run: True if the response failed because of the run's configuration, so that every other response would fail, too.
    """

    kind: Literal["generated", "scored", "failed", "aborted"]
    response_id: int
    tokens: int = 0
    result: Any = None
    error: str = ""
    lost: bool = False
    ends_run: bool = False


class ResponseLost(RuntimeError):
    """Error of a response whose server or worker has died. The response is generated again, beyond ``max_retries`` if needed."""


class ResponseWorkers(Protocol):
    """Interface of the driver of tail batching to the workers that generate and score responses."""

    def launch(self, job: Job) -> None:
        """Starts to generate the responses of ``job`` with the current weights."""

    def cancel(self, response_ids: Iterable[int]) -> None:
        """Stops responses in any state. Then reports ``aborted`` for each response that had not ended."""

    def begin_round(self) -> None:
        """Prepares the workers for the rollout of a training step. The engines already have the new weights."""

    def end_round(self) -> None:
        """Stops all unfinished responses as fast as possible. All of them were cancelled before."""

    def wait(self, seconds: float) -> list[Event]:
        """Returns the events since the last call. If there are none, waits up to ``seconds`` for the first."""

    def outside_engines(self) -> Collection[int]:
        """Returns the ids of responses that are neither in an engine nor being scored, for example in a tool call."""


@dataclass
class _Open:
    """A response that was launched and has not ended.

    Attributes:
        since: time in seconds of the launch or, if the response is being scored, of the end of generation.
        state: what happens to the response, as text for the log.
    """

    prompt_id: str
    since: float
    state: Literal["being generated", "being scored", "being stopped"] = "being generated"


@dataclass
class TokenRate:
    """Tokens and seconds of complete responses, from which the tokens of cancelled responses are estimated."""

    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds

    def estimate(self, seconds: float) -> int:
        """Returns the estimated number of tokens after ``seconds`` of generation; 0 without a complete response."""
        return int(seconds * self.tokens / self.seconds) if self.seconds else 0


class FailureLog:
    """Logs one line for each failed response, with a traceback for the first failure of each exception type."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def event_of(
        self, response_id: int, task: "asyncio.Task[None]", tokens: int, result: Any, cancelled: bool
    ) -> Event:
        """Returns the last event of a response whose ``task`` is done, and logs a failure.

        If the response was ``cancelled``, the event is ``aborted``, whatever the outcome of the task.

        ``tokens`` and ``result`` are as in :class:`Event`.
        """
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if cancelled:
            return Event("aborted", response_id, tokens, result)
        if error is None:
            return Event("scored", response_id, tokens, result)
        if isinstance(root_cause(error), ConfigError):
            return Event("failed", response_id, tokens, result, first_line(error), ends_run=True)
        kind = type(root_cause(error)).__name__
        line = typed_line(error)
        logger.error(
            "rl-accel: response %d failed: %s", response_id, line, exc_info=None if kind in self._kinds else error
        )
        self._kinds.add(kind)
        return Event("failed", response_id, tokens, result, line, lost=isinstance(error, ResponseLost))


class PromptSupply:
    """Source of new prompts for a training run. Reads data rows and names them ``"epoch:row"``; both numbers count from 1.

    Args:
        fetch: function that returns the next data row. After the last row of an epoch, it returns the first of the next.
        rows_per_epoch: number of rows in an epoch.

    Attributes:
        rows_per_epoch: number of rows in an epoch.
        fetched: number of rows fetched so far, over all epochs.
        payloads: data rows of the prompts that are not yet trained, rejected or given up, by prompt id.
    """

    def __init__(self, fetch: Callable[[], dict[str, Any]], rows_per_epoch: int) -> None:
        self._fetch = fetch
        self.rows_per_epoch = rows_per_epoch
        self.fetched = 0
        self.payloads: dict[str, dict[str, Any]] = {}

    def take(self, count: int) -> list[str]:
        """Fetches ``count`` data rows. Returns the ids of the new prompts."""
        prompt_ids = []
        for _ in range(count):
            epoch, row = divmod(self.fetched, self.rows_per_epoch)
            prompt_id = f"{epoch + 1}:{row + 1}"
            self.payloads[prompt_id] = self._fetch()
            self.fetched += 1
            prompt_ids.append(prompt_id)
        return prompt_ids

    def settle(self, prompt_id: str) -> Any:
        """Forgets a prompt that was trained, rejected or given up.

        Returns the content of the column ``index`` in its data row; None without such a column.
        """
        return self.payloads.pop(prompt_id).get("index")

    def has_fetched(self, prompt_id: str, fetched: int) -> bool:
        """Returns True if ``prompt_id`` names one of the first ``fetched`` rows, counted over all epochs."""
        numbers = prompt_id.split(":")
        if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
            return False
        epoch, row = map(int, numbers)
        return 1 <= row <= self.rows_per_epoch and 0 <= (epoch - 1) * self.rows_per_epoch + row - 1 < fetched

    def restore(self, fetched: int, payloads: Mapping[str, dict[str, Any]]) -> None:
        """Continues from a saved run, whose attributes had the values ``fetched`` and ``payloads``."""
        self.fetched = fetched
        self.payloads = dict(payloads)


@dataclass
class StepResult:
    """Batch of a training step, and a record of the round of tail batching that produced it.

    Attributes:
        batch: batch to train on.
        results: data of the responses (see ``Event.result``), in the order of ``batch``.
        round: metrics of the round.
        trained, rejected, failed: prompts of the batch, prompts that the group filter rejected, and prompts that were given up.
            Each is a mapping from prompt id to the content of the column ``index`` in its data row.
        errors: last error message of each failed prompt, by prompt id.
    """

    batch: TrainBatch = field(default_factory=lambda: TrainBatch(0, "short", ()))
    results: tuple[Any, ...] = ()
    round: RoundMetrics = field(default_factory=RoundMetrics)
    trained: dict[str, Any] = field(default_factory=dict)
    rejected: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the round that are known so far, by log name ``rl_accel/tail_batching/<name>``.

        ``short_round``, ``long_round`` and ``final_round`` are 1 for the kind of this round and 0 otherwise.
        """
        values = asdict(self.round)
        number = values.pop("number")
        kind = values.pop("kind")
        values |= {f"{name}_round": name == kind for name in get_args(RoundKind)}
        values |= {"round": number, "rounds": 1}
        return {METRICS_PREFIX + name: float(value) for name, value in values.items() if value is not None}


class FilterLimit(NamedTuple):
    """Limit on the prompts that the group filter may check in a step.

    Attributes:
        prompts: maximum number of checked prompts.
        setting: text that names the setting and its value, for the error message.
    """

    prompts: int
    setting: str


class FilterRejectsAll(RlAccelError, RuntimeError):
    """Error for a run whose group filter leaves too few prompts to fill a batch."""


class RolloutDriver:
    """Runs the rounds of tail batching: carries out the decisions of the state machine and reports events to it.

    Args:
        core: state machine of tail batching.
        supply: source of new prompts.
        workers: interface to the workers that generate and score responses.
        discard: function that removes the data of untrained responses from the framework. Gets their ``Event.result``.
        passes: group filter: from a prompt id and the ``Event.result`` of each response, returns whether to train the prompt. Used
            only if ``core.run.filter_groups`` is True. None: every prompt is trained.
        now: function that returns the time in seconds.
        filter_limit: limit on the prompts that the group filter may check in a step; None: no limit.
    """

    def __init__(
        self,
        core: TailBatching,
        supply: PromptSupply,
        workers: ResponseWorkers,
        discard: Callable[[Sequence[Any]], None],
        passes: Callable[[str, Sequence[Any]], bool] | None = None,
        now: Callable[[], float] = time.monotonic,
        filter_limit: FilterLimit | None = None,
    ) -> None:
        self.core = core
        self.supply = supply
        self._workers = workers
        self._discard = discard
        self._passes = passes
        self._now = now
        self._results: dict[int, Any] = {}
        self._open: dict[int, _Open] = {}
        self._result = StepResult()
        self._filter_limit = filter_limit
        self._failed_in_a_row = 0
        self._rejected_in_a_row = 0
        self._checked_in_step = 0
        self._last_error = ""
        self._step = 0
        for rounded in core.run.rounding_warnings:
            logger.warning("rl-accel: tail_batching.%s", rounded)

    def begin_early(self, step: int, steps_left: int) -> None:
        """Begins the round of training step ``step`` while a validation runs. :meth:`play` continues this round.

        The round is a long one: nothing of it must be stopped before :meth:`play` is called. Arguments as in :meth:`play`.
        """
        self._begin(step, steps_left, during_validation=True)
        for event in self._workers.wait(0.0):
            self._carry_out(self._pass_on(event))

    def _begin(self, step: int, steps_left: int, during_validation: bool) -> None:
        self._step = step
        self._result = StepResult()
        self._checked_in_step = 0
        self._workers.begin_round()
        self._carry_out(self.core.begin_round(steps_left, self._now(), during_validation))

    def play(self, step: int, steps_left: int) -> StepResult:
        """Runs the round of training step ``step`` and returns its batch. When it returns, no response is running.

        ``steps_left`` is the number of remaining training steps, including this one.

        Raises:
            RuntimeError: as many prompts as a batch holds were given up, and no response was scored in between.
            FilterRejectsAll: see ``filter_limit``; or the filter rejected all prompts of two epochs, one after the other.
            ConfigError: a response failed with a ConfigError.
        """
        if self.core.phase is Phase.BETWEEN_ROUNDS:
            self._begin(step, steps_left, during_validation=False)
        ending = False
        while self.core.phase is not Phase.BETWEEN_ROUNDS:
            if self.core.phase is Phase.STOPPING and not ending:
                ending = True
                self._workers.end_round()
            events = self._workers.wait(REPORT_SECONDS)
            if not events:
                logger.info("rl-accel: tail batching waits for %s", self._waits_for())
            for event in events:
                self._carry_out(self._pass_on(event))
        groups = self._result.batch.groups
        self._result.results = tuple(self._results.pop(i) for group in groups for i in group.response_ids)
        if self._results:  # in bulk: there can be thousands, and a call for each result would take milliseconds
            self._discard(list(self._results.values()))
            self._results.clear()
        return self._result

    def _waits_for(self) -> str:
        """Returns a text for the log: in which states the unfinished responses are, for how long, and which prompts they answer."""
        without_request = set(self._workers.outside_engines())
        by_state = defaultdict(list)
        for response_id, response in sorted(self._open.items(), key=lambda item: item[1].since):
            state: str = response.state
            if state == "being generated" and response_id in without_request:
                state = "in a tool or another part of the agent loop"
            by_state[state].append(response)
        texts = []
        for state, responses in by_state.items():
            prompts = list(dict.fromkeys(response.prompt_id for response in responses))
            more = f" and {len(prompts) - REPORT_PROMPTS} more" if len(prompts) > REPORT_PROMPTS else ""
            texts.append(
                f"{len(responses)} responses {state}, of prompts {', '.join(prompts[:REPORT_PROMPTS])}{more}, "
                f"the oldest for {self._now() - responses[0].since:.0f} s"
            )
        return "; ".join(texts) or "its workers"

    def _pass_on(self, event: Event) -> list[Decision]:
        response_id = event.response_id
        now = self._now()
        logger.debug("rl-accel: response %d: %s, %d tokens %s", response_id, event.kind, event.tokens, event.error)
        if event.result is not None:
            self._results[response_id] = event.result
        if event.kind != "generated":
            self._open.pop(response_id, None)
        elif (known := self._open.get(response_id)) and known.state == "being generated":
            self._open[response_id] = _Open(known.prompt_id, now, "being scored")
        match event.kind:
            case "generated":
                return self.core.response_generated(response_id, event.tokens)
            case "scored":
                self._failed_in_a_row = 0
                return self.core.response_scored(response_id, now)
            case "failed":
                if event.ends_run:
                    raise ConfigError(event.error)
                self._last_error = event.error
                return self.core.response_failed(response_id, event.tokens, now, event.lost)
            case "aborted":
                return self.core.response_aborted(response_id, event.tokens)

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            logger.debug("rl-accel: step %d: %.200s", self._step, decision)
            match decision:
                case Launch(prompt_id, response_ids):
                    now = self._now()
                    self._open |= {response_id: _Open(prompt_id, now) for response_id in response_ids}
                    self._workers.launch(Job(prompt_id, self.supply.payloads[prompt_id], response_ids, self._step))
                case Cancel(_, response_ids):
                    for response_id in self._open.keys() & set(response_ids):
                        self._open[response_id].state = "being stopped"
                    self._workers.cancel(response_ids)
                case RequestPrompts(count):
                    self._carry_out(self.core.offer(self.supply.take(count), self._now()))
                case CheckGroup(group):
                    passes = self._passes_filter(group)
                    self._carry_out(self.core.group_checked(group.prompt_id, passes, self._now()))
                case TrainBatch():
                    self._result.batch = decision
                    for group in decision.groups:
                        self._result.trained[group.prompt_id] = self.supply.settle(group.prompt_id)
                case RoundEnded(metrics):
                    self._result.round = metrics
                case PromptFailed(prompt_id):
                    self._give_up(prompt_id)
                case RoundStarted(number, kind, prompts, responses):
                    logger.info(
                        "rl-accel: round %d is %s: %d prompts with %d responses each", number, kind, prompts, responses
                    )

    def _passes_filter(self, group: Group) -> bool:
        """Returns True if the group filter accepts ``group``. Forgets the prompt otherwise.

        Raises:
            FilterRejectsAll: the filter has rejected all groups of two epochs, or more than ``filter_limit`` allows in a step.
        """
        results = [self._results[response_id] for response_id in group.response_ids]
        self._checked_in_step += 1
        if self._passes is None or self._passes(group.prompt_id, results):
            self._rejected_in_a_row = 0
            return True
        self._result.rejected[group.prompt_id] = self.supply.settle(group.prompt_id)
        self._rejected_in_a_row += 1
        if self._filter_limit is not None and self._checked_in_step >= self._filter_limit.prompts:
            passed = self._checked_in_step - len(self._result.rejected)
            raise FilterRejectsAll(
                f"rl_accel.tail_batching: {passed} of {self._checked_in_step} prompts of this step passed the group filter, "
                f"a batch needs {self.core.run.prompts_per_step}, and {self._filter_limit.setting} allows no more. The "
                "prompts may be too hard or too easy for the model"
            )
        in_a_row = self._rejected_in_a_row
        epoch = self.supply.rows_per_epoch
        if in_a_row == epoch:
            logger.warning(
                "rl-accel: the group filter has rejected %d prompts one after the other, a whole epoch of the data; after "
                "another epoch the run ends",
                in_a_row,
            )
        if in_a_row >= 2 * epoch:
            raise FilterRejectsAll(
                f"rl_accel.tail_batching: the group filter has rejected {in_a_row} prompts one after the other, two epochs of "
                "the data. All responses to a prompt get the same reward: the prompts are too hard or too easy for the "
                "model, or the reward is wrong"
            )
        return False

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
