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
"""After so long without an event one line says what the round waits for."""

REPORT_PROMPTS = 8
"""That line names so many prompts of a kind at most, the oldest."""

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
    """What happened to a response.

    ``generated``, then ``scored``; or ``failed`` or ``aborted``, which a response can become at any time before it is scored.
    Nothing of a failed or aborted response runs any more.

    Attributes:
        tokens: generated so far.
        result: what the response is to the workers' framework, or has left there before it failed or was aborted; None if
            nothing. The driver only hands it on.
        error: one line (failed only).
        lost: a server or a worker died under it, which says nothing of the response (failed only).
    """

    kind: Literal["generated", "scored", "failed", "aborted"]
    response_id: int
    tokens: int = 0
    result: Any = None
    error: str = ""
    lost: bool = False


class ResponseLost(RuntimeError):
    """What a response was made with has died. It is made again, however often that happens."""


@contextlib.asynccontextmanager
async def agent_loop_limit(seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Cancels what is awaited within after ``seconds``; None: never. What is yielded can be rescheduled.

    Raises:
        TimeoutError: the time is over, in one line that names the flag.
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

    # Workers may also have ``outside_engines()``: the ids of responses that are neither generated nor scored right now.


@dataclass
class _Open:
    """A response that is not over: of which prompt, and since when, on the driver's clock, it has been ``doing`` what."""

    prompt_id: str
    since: float
    doing: str = "generated"


@dataclass
class TokenRate:
    """How fast responses grow, for engines that do not tell how far a cancelled one got."""

    tokens: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Count a response that ran to its end."""
        self.tokens += tokens
        self.seconds += seconds

    def clear(self) -> None:
        """Forget all responses."""
        self.tokens, self.seconds = 0, 0.0

    def estimate(self, seconds: float) -> int:
        """Return how many tokens a response had after ``seconds``, if it ran like those; 0 if none did yet."""
        return int(seconds * self.tokens / self.seconds) if self.seconds else 0


class FailureLog:
    """Logs failed responses in one line each, and the traceback of the first failure of each kind."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def event_of(
        self, response_id: int, task: "asyncio.Task[None]", tokens: int, result: Any, cancelled: bool
    ) -> Event:
        """Return how a response ended whose ``task`` is done; log it if it failed."""
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
    """The prompts of a run, by ids ``"epoch:row"`` (both from 1, the row in the order of the data).

    Args:
        run: its quotas are looked at.
        fetch: returns the next row; after the last one of an epoch it begins the next.
        rows_per_epoch: how many rows an epoch has.
        domain_key: the column that names a row's domain; rows without it are of domain ``""``.

    Attributes:
        fetched: rows so far, over all epochs.
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
        """Fetch rows until there are ``counts[domain]`` of each domain; return the domains of the new prompts by id.

        Rows come mixed, so of domains that are not short it can be more. Without quotas all count for ``""``.

        Raises:
            ConfigError: a row is of a domain without a quota, or there are no rows of a domain that has one.
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
        """Forget a prompt; return the data set's own index of its row."""
        return self.payloads.pop(prompt_id).get("index")

    def restore(self, fetched: int, payloads: Mapping[str, dict[str, Any]]) -> None:
        """Go on where a saved run was."""
        self.fetched, self.payloads = fetched, dict(payloads)


@dataclass
class StepResult:
    """The batch of a training step and how it came about.

    Attributes:
        batch: what to train on.
        results: of its responses, group by group, in the order they were generated.
        round: its numbers.
        trained, rejected, failed: the prompts settled in the step, id to the data set's own index of the row.
        errors: the last error of each failed prompt.
    """

    batch: TrainBatch = field(default_factory=lambda: TrainBatch(0, "short", ()))
    results: tuple[Any, ...] = ()
    round: RoundMetrics = field(default_factory=lambda: RoundMetrics(0, "short", 1.0))
    trained: dict[str, Any] = field(default_factory=dict)
    rejected: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Return ``rl_accel/tail_batching/<name>``: every known field of the round's metrics, the kind as 0 or 1.

        No name holds ``max``, ``min``, ``sum`` or ``total``, by which verl would choose another reduction.
        """
        values = asdict(self.round)
        number, kind = values.pop("number"), values.pop("kind")
        values |= {f"{name}_round": name == kind for name in get_args(RoundKind)}
        values |= {"round": number, "rounds": 1}
        return {METRICS_PREFIX + name: float(value) for name, value in values.items() if value is not None}


class RolloutDriver:
    """Carries out what ``core`` decides and tells it what happens, one call of :meth:`play` a training step.

    Args:
        core: the state machine.
        supply: where new prompts come from.
        workers: runs responses.
        discard: takes the results of all responses that are not trained on, once a round, when nothing runs any more.
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
        self._results: dict[int, Any] = {}
        self._open: dict[int, _Open] = {}
        self._result = StepResult()
        self._failed_in_a_row = 0
        self._last_error = ""
        self._step = 0
        for rounded in core.run.rounded_ratios:
            logger.warning("rl-accel: tail_batching.%s", rounded)

    def play(self, step: int, steps_left: int) -> StepResult:
        """Return the batch of training step ``step``, with everything else of its round settled and cleared.

        ``steps_left`` counts this step too: no prompt is begun that they could not train.

        Raises:
            RuntimeError: so many prompts failed one after the other that something must be broken.
            ConfigError: quotas and the domains of the data do not fit.
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
        if self._results:  # in bulk: there can be thousands, and a call for each would take milliseconds
            self._discard(list(self._results.values()))
            self._results.clear()
        return self._result

    def _waits_for(self) -> str:
        """Return in words what is not over: what it does, of which prompts, and for how long."""
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
