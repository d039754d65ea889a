"""Drives the rounds of tail batching for any framework whose workers can run, cancel and report single responses."""

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, get_args

from rl_accel.errors import ConfigError
from rl_accel.rollout.tail_batching import Phase, TailBatching, TailRun
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
"""Seconds without an event after which a log line names the responses that the round waits for."""

REPORT_PROMPTS = 8
"""Maximum number of prompts per state in the log line of ``REPORT_SECONDS``, the oldest first."""

METRICS_PREFIX = "rl_accel/tail_batching/"


@dataclass(frozen=True, slots=True)
class Job:
    """Responses of one prompt to start. ``payload`` is the prompt's row of the data set; ``step`` the training step."""

    prompt_id: str
    payload: dict[str, Any]
    response_ids: tuple[int, ...]
    step: int


@dataclass(frozen=True, slots=True)
class Event:
    """State change of a response.

    ``generated`` comes first, then ``scored``. Until it is scored, a response can also become ``failed`` or ``aborted``; nothing of
    a failed or aborted response runs any more.

    Attributes:
        tokens: number of tokens generated so far.
        result: the framework's data of the response; of a failed or aborted response, the data left in the framework. None if
            there is none. The driver only passes ``result`` on.
        error: error message of one line (failed only).
        lost: whether a server or worker died during the response, which is not the response's fault (failed only).
    """

    kind: Literal["generated", "scored", "failed", "aborted"]
    response_id: int
    tokens: int = 0
    result: Any = None
    error: str = ""
    lost: bool = False


class ResponseLost(RuntimeError):
    """A server or worker of a response has died. The response is generated again, without a limit on such retries."""


@contextlib.asynccontextmanager
async def agent_loop_limit(seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Cancels the block after ``seconds``; None: never. Yields the timeout, which can be rescheduled.

    Raises:
        TimeoutError: the time is over; the message is one line that names the flag.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield limit
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(f"its agent loop was not over after {seconds} s (agent_loop_limit)") from error
        raise


class ResponseWorkers(Protocol):
    """Interface of the workers that run responses."""

    def launch(self, job: Job) -> None:
        """Starts responses with the current weights."""

    def cancel(self, response_ids: Iterable[int]) -> None:
        """Stops responses wherever they are. Each response is reported as aborted unless it had ended before."""

    def begin_round(self) -> None:
        """Prepares for a round; the weights of this round are in place."""

    def end_round(self) -> None:
        """Stops all other responses as fast as possible: the batch is complete, and they are cancelled."""

    def wait(self, seconds: float) -> list[Event]:
        """Returns the events since the last call; an empty list after ``seconds`` without an event."""

    # Optional method ``outside_engines()``: ids of responses that are neither being generated nor being scored right now.


@dataclass
class _Open:
    """A response that has not ended. ``since``: when it was launched or, if it waits for its score, generated (driver's clock)."""

    prompt_id: str
    since: float
    doing: str = "generated"


@dataclass
class TokenRate:
    """Mean token rate of complete responses, for engines that do not report the tokens of cancelled responses."""

    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Adds a complete response."""
        self.tokens += tokens
        self.seconds += seconds

    def clear(self) -> None:
        """Discards all responses."""
        self.tokens, self.seconds = 0, 0.0

    def estimate(self, seconds: float) -> int:
        """Returns the estimated number of tokens of a response after ``seconds``; 0 if no response is known."""
        return int(seconds * self.tokens / self.seconds) if self.seconds else 0


class FailureLog:
    """Logs each failed response in one line, and a traceback for the first failure of each exception type."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def event_of(
        self, response_id: int, task: "asyncio.Task[None]", tokens: int, result: Any, cancelled: bool
    ) -> Event:
        """Returns the last event of a response whose ``task`` is done; logs a failed response."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if cancelled:
            return Event("aborted", response_id, tokens, result)
        if error is None:
            return Event("scored", response_id, tokens, result)
        kind = type(error).__name__
        line = f"{kind}: {error}".splitlines()[0]
        logger.error(
            "rl-accel: response %d failed: %s", response_id, line, exc_info=None if kind in self._kinds else error
        )
        self._kinds.add(kind)
        return Event("failed", response_id, tokens, result, line, lost=isinstance(error, ResponseLost))


class PromptSupply:
    """Prompts of a run, with ids ``"epoch:row"`` (both count from 1; rows in the order of the data).

    Args:
        run: run whose domain quotas apply.
        fetch: returns the next row; after the last row of an epoch, the first row of the next epoch.
        rows_per_epoch: number of rows in an epoch.
        domain_key: column with the domain of a row; rows without this column have the domain ``""``.

    Attributes:
        fetched: number of rows fetched so far, over all epochs.
        payloads: rows of the prompts that are not settled, by prompt id.
    """

    def __init__(
        self, run: TailRun, fetch: Callable[[], dict[str, Any]], rows_per_epoch: int, domain_key: str = ""
    ) -> None:
        self._quotas = run.domain_quotas
        self._fetch = fetch
        self._rows_per_epoch = rows_per_epoch
        self._domain_key = domain_key
        self.fetched = 0
        self.payloads: dict[str, dict[str, Any]] = {}

    def take(self, counts: Mapping[str, int]) -> dict[str, str]:
        """Fetches ``counts[domain]`` rows of each domain; returns the domains of the new prompts by id.

        The data mixes domains, so some domains may get more rows than requested. Without quotas, all rows count for ``""``.

        Raises:
            ConfigError: the domain of a row has no quota, or a requested domain has no rows.
        """
        short = dict(counts)
        taken: dict[str, str] = {}
        rows_in_vain = 0
        while short:
            epoch, row = divmod(self.fetched, self._rows_per_epoch)
            prompt_id = f"{epoch + 1}:{row + 1}"
            payload = self.payloads[prompt_id] = self._fetch()
            self.fetched += 1
            domain = taken[prompt_id] = str(payload.get(self._domain_key, ""))
            if self._quotas and domain not in self._quotas:
                raise ConfigError(
                    f"rl_accel.tail_batching.domain_quotas must have a quota for every {self._domain_key}, found "
                    f"{domain!r} at prompt {prompt_id} (epoch:row) and quotas for {', '.join(self._quotas)}"
                )
            counted = domain if self._quotas else ""
            if counted in short:
                rows_in_vain = 0
                short[counted] -= 1
                if not short[counted]:
                    del short[counted]
                continue
            rows_in_vain += 1
            if rows_in_vain > 2 * self._rows_per_epoch:
                raise ConfigError(
                    f"rl_accel.tail_batching.domain_quotas asks for {self._domain_key} = "
                    f"{', '.join(map(repr, short))}, which no row of the data has"
                )
        return taken

    def settle(self, prompt_id: str) -> Any:
        """Removes a prompt; returns the data set's own index of the prompt's row."""
        return self.payloads.pop(prompt_id).get("index")

    def restore(self, fetched: int, payloads: Mapping[str, dict[str, Any]]) -> None:
        """Continues at the position of a saved run."""
        self.fetched, self.payloads = fetched, dict(payloads)


@dataclass
class StepResult:
    """Batch of a training step and a record of its round.

    Attributes:
        batch: batch to train on.
        results: results of the batch's responses, group by group, each group in the order of generation.
        round: metrics of the round.
        trained, rejected, failed: prompts settled in the step: mapping from prompt id to the data set's own index of the row.
        errors: last error of each failed prompt.
    """

    batch: TrainBatch = field(default_factory=lambda: TrainBatch(0, "short", ()))
    results: tuple[Any, ...] = ()
    round: RoundMetrics = field(default_factory=lambda: RoundMetrics(0, "short", 1.0))
    trained: dict[str, Any] = field(default_factory=dict)
    rejected: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Returns the known metrics of the round as ``rl_accel/tail_batching/<name>``, with 0 or 1 for each round kind.

        No name holds ``max``, ``min``, ``sum`` or ``total``, because verl would choose another reduction for such names.
        """
        values = asdict(self.round)
        number, kind = values.pop("number"), values.pop("kind")
        values |= {f"{name}_round": name == kind for name in get_args(RoundKind)}
        values |= {"round": number, "rounds": 1}
        return {METRICS_PREFIX + name: float(value) for name, value in values.items() if value is not None}


class RolloutDriver:
    """Carries out the decisions of ``core`` and reports events to ``core``, with one call of :meth:`play` per training step.

    Args:
        core: the state machine.
        supply: source of new prompts.
        workers: run the responses.
        discard: receives the results of all untrained responses, once a round, when no response runs any more.
        passes: returns whether a group passes, from its prompt id and its results in the order of generation. If None,
            every group passes. Called only if the core's run has ``filter_groups``.
        now: clock in seconds.
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
        self._results: dict[int, Any] = {}
        self._open: dict[int, _Open] = {}
        self._result = StepResult()
        self._failed_in_a_row = 0
        self._last_error = ""
        self._step = 0
        for rounded in core.run.rounded_ratios:
            logger.warning("rl-accel: tail_batching.%s", rounded)

    def play(self, step: int, steps_left: int) -> StepResult:
        """Returns the batch of training step ``step``. Everything else of its round is settled and cleared by then.

        ``steps_left`` includes this step. No prompt is started that the remaining steps could not train.

        Raises:
            RuntimeError: a whole batch of prompts failed in a row, so something must be broken.
            ConfigError: the domains of the data do not match the quotas.
        """
        self._step, self._result = step, StepResult()
        self._workers.begin_round()
        self._carry_out(self.core.begin_round(steps_left, self._now()))
        ending = False
        while self.core.phase is not Phase.BETWEEN_ROUNDS:
            if self.core.phase is Phase.SETTLING and not ending:
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
        """Returns a text about the unfinished responses: their states, prompts and ages in seconds."""
        outside: Callable[[], Collection[int]] = getattr(self._workers, "outside_engines", tuple)
        no_request, kinds = set(outside()), defaultdict(list)
        for response_id, response in sorted(self._open.items(), key=lambda item: item[1].since):
            tool = response.doing == "generated" and response_id in no_request
            kinds["in a tool or another part of the agent loop" if tool else f"being {response.doing}"].append(response)
        told = []
        for doing, responses in kinds.items():
            prompts = list(dict.fromkeys(response.prompt_id for response in responses))
            more = f" and {len(prompts) - REPORT_PROMPTS} more" if len(prompts) > REPORT_PROMPTS else ""
            told.append(
                f"{len(responses)} responses {doing}, of prompts {', '.join(prompts[:REPORT_PROMPTS])}{more}, "
                f"the oldest for {self._now() - responses[0].since:.0f} s"
            )
        return "; ".join(told) or "its workers"

    def _pass_on(self, event: Event) -> list[Decision]:
        response_id, now = event.response_id, self._now()
        if event.result is not None:
            self._results[response_id] = event.result
        if event.kind != "generated":
            self._open.pop(response_id, None)
        elif response_id in self._open:
            self._open[response_id] = _Open(self._open[response_id].prompt_id, now, "scored")
        match event.kind:
            case "generated":
                return self.core.response_generated(response_id, event.tokens)
            case "scored":
                self._failed_in_a_row = 0
                return self.core.response_scored(response_id, now)
            case "failed":
                self._last_error = event.error
                return self.core.response_failed(response_id, event.tokens, now, event.lost)
            case "aborted":
                return self.core.response_aborted(response_id, event.tokens)

    def _carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Launch(prompt_id, response_ids):
                    now = self._now()
                    self._open |= {response_id: _Open(prompt_id, now) for response_id in response_ids}
                    self._workers.launch(Job(prompt_id, self.supply.payloads[prompt_id], response_ids, self._step))
                case Cancel(_, response_ids):
                    for response_id in self._open.keys() & set(response_ids):
                        self._open[response_id].doing = "stopped"
                    self._workers.cancel(response_ids)
                case RequestPrompts(counts):
                    self._carry_out(self.core.offer(self.supply.take(counts), self._now()))
                case CheckGroup(group):
                    self._check(group)
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

    def _check(self, group: Group) -> None:
        results = [self._results[response_id] for response_id in group.response_ids]
        passes = self._passes is None or self._passes(group.prompt_id, results)
        if not passes:
            self._result.rejected[group.prompt_id] = self.supply.settle(group.prompt_id)
        self._carry_out(self.core.group_checked(group.prompt_id, passes, self._now()))

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
