"""vLLM's side of drafts: ``speculative_config={"method": "custom_class", "model": "rl_accel.drafts.drafter.Drafter", ...}``."""

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_accel.drafts.index import CONTEXT, PROMPT, SOURCES, Match, TokenIndex, TokenSequence, class_of
from rl_accel.features import DraftsFlags

SETTINGS = "rl_accel_drafts"
"""The key of vLLM's ``additional_config`` that the settings are under; that dict reaches every worker process."""
FLOOR = 0.2
"""A token is drafted while the chance that all tokens up to it are accepted is at least this."""
FIRST_RATES = (0.5, 0.6, 0.7, 0.8)
"""Chance of acceptance by class of match length, before anything was seen."""
REMEMBERED = 4096
"""Requests that have left the batch that are remembered, as they may come back or be taken."""
_BY_LENGTH = [(f"tokens_from_{2**bits // 2}", f"row_steps_from_{2**bits // 2}") for bits in range(32)]

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Prompt(TokenSequence):
    visits: deque[int]
    """Versions of the weights that it was answered with, the last one last."""
    hits: float = 0.0
    tries: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Request(TokenSequence):
    prompt: _Prompt
    tail: bytes = b""
    """The last CONTEXT tokens."""
    taken: bool = False
    match: Match | None = None


class Drafter:
    """Proposes what other responses to the same prompt, running ones among them, have after the last tokens of a request.

    vLLM verifies a draft with rejection sampling: a wrong draft costs time, never correctness. vLLM 0.29.0 calls :meth:`propose`
    after each step, but not while a request is within ``num_speculative_tokens`` of ``max_model_len``. It tells no ids of
    requests: a row is known again by its length and its last tokens.

    Of a tensor-parallel group the scheduler takes the drafts of the first rank; the others do nothing. With "external_launcher"
    each rank schedules for itself and would need equal drafts: refused.

    Args:
        vllm_config: vLLM's; ``additional_config["rl_accel_drafts"]`` has fields of :class:`~rl_accel.features.DraftsFlags`.
        clock: seconds.

    Raises:
        TypeError: there is no such setting.
        ValueError: the executor is "external_launcher", or memory_mb less than 1.
    """

    def __init__(self, vllm_config: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        parallel = vllm_config.parallel_config
        if parallel.distributed_executor_backend == "external_launcher":
            raise ValueError("drafts need distributed_executor_backend 'mp', 'uni' or 'ray', found 'external_launcher'")
        self.settings = DraftsFlags(**vllm_config.additional_config.get(SETTINGS, {}))
        self._longest = min(self.settings.max_tokens, vllm_config.speculative_config.num_speculative_tokens)
        self._idle = parallel.rank % (parallel.tensor_parallel_size * parallel.prefill_context_parallel_size) != 0
        self._clock = clock
        self._index = TokenIndex(1 if self._idle else self.settings.memory_mb)
        self._prompts: OrderedDict[int, _Prompt] = OrderedDict()
        self._most_prompts = len(self._index.pool.count) // 8  # one for 256 tokens
        self._rows: list[_Request | None] = []
        self._gone: OrderedDict[tuple[int, bytes], _Request] = OrderedDict()
        self._version = 0
        self._records = np.array((FIRST_RATES, (1.0,) * 4)) * 8  # hits and tries, by class of match length
        self._worth = _Worth()
        self._called: float | None = None
        self._counts = Counter({"steps": 0, "tokens": 0, "drafted": 0, "accepted": 0})
        self._warm_up()

    def load_model(self, *_: Any) -> None:
        """There is none; vLLM calls this."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[Any],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Take in the tokens of the last step and return a draft, maybe an empty one, for each row.

        Args:
            sampled_token_ids: for each row what the last step accepted and sampled; empty for a prefill that is not complete.
            num_tokens_no_spec: tokens of each row, those included.
            token_ids_cpu: (rows, max_model_len), the tokens.
            slot_mappings: not used.
        """
        now, rows = self._clock(), len(sampled_token_ids)
        drafts: list[list[int]] = [[] for _ in range(rows)]
        if self._idle or not rows:
            return drafts
        ends: list[int] = num_tokens_no_spec[:rows].tolist()
        went_on = self._follow(sampled_token_ids, ends, token_ids_cpu)
        drafted = self._learn(sampled_token_ids, ends, token_ids_cpu)
        if self._called is not None and went_on:
            self._worth.add(rows, drafted, now - self._called, sum(map(len, sampled_token_ids)))
        self._called = now
        own = [row for row, request in enumerate(self._rows) if request is not None]
        requests = [request for request in self._rows if request is not None]
        if not requests:
            return drafts
        self._index.extend(token_ids_cpu, own, [ends[row] for row in own], requests)
        for row, request in zip(own, requests, strict=True):
            request.tail = _tail(token_ids_cpu, row, ends[row])
        if rows <= self.settings.batch_limit and self._worth.allows(rows):
            records = [(request.prompt.hits, request.prompt.tries) for request in requests]
            rates = self._records[0] / self._records[1]
            matches = self._index.lookup(token_ids_cpu, own, requests, self._longest, records, rates, FLOOR)
            pays = self._worth.pays(rows, sum(match.expected for match in matches if match is not None))
            for row, request, match in zip(own, requests, matches, strict=True):
                request.match = match if match is None or pays else match._replace(worth=0)
                if request.match is not None:
                    drafts[row] = request.match.tokens[: request.match.worth]
        return drafts

    def new_weights(self) -> None:
        """Note that the weights have changed: who runs is as good as finished, but may come back, in any row."""
        for request in self._rows:
            self._leave(request)
        self._rows, self._called = [], None
        self._version += 1

    def take_finished(self) -> list[bytes]:
        """Return the responses that have left the batch since the last call, each once, as :meth:`absorb` takes them.

        One that was preempted or aborted may be among them, with the tokens that it had then.
        """
        finished = []
        for request in self._gone.values():
            tokens = None if request.taken else self._index.read(request)
            if tokens is not None:
                head = np.array([request.visit, request.prompt.length], np.int32)
                finished.append(head.tobytes() + tokens.tobytes())
            request.taken = True
        return finished

    def absorb(self, responses: Iterable[bytes]) -> None:
        """Add finished responses, of another replica or an earlier run, to the history."""
        for response in responses if not self._idle else ():
            numbers = np.frombuffer(response, np.int32)
            (version, length), matrix = numbers[:2].tolist(), np.array(numbers[None, 2:])
            self._version = max(self._version, version)
            self._index.extend(matrix, [0], [matrix.shape[1]], [self._request(0, length, matrix, version)])

    def counters(self) -> dict[str, float]:
        """Return what happened since the start.

        ``steps``: calls of :meth:`propose`. ``tokens``: sampled in them. ``drafted``, ``accepted``: tokens of drafts that were
        verified, also by where they came from (``drafted_own``, ``_sibling``, ``_earlier``). ``tokens_from_L`` and
        ``row_steps_from_L``: tokens, and steps of a request, in which its response had from L to less than 2 L tokens then.
        ``stopped``: how often drafting was stopped because it cost more than it gave.
        """
        return {**self._counts, "stopped": self._worth.stopped}

    def _follow(self, sampled: Sequence[Sequence[int]], ends: list[int], matrix: NDArray[np.int32]) -> bool:
        """Find the request of each row that has sampled; return whether all rows just went on from the last call."""
        before, self._rows = self._rows, [None] * len(ends)
        before += self._rows[len(before) :]
        unknown, went_on = [], True
        for row, new in enumerate(sampled):
            request, begin = before[row], ends[row] - len(new)
            # shorter than at the beginning of the step, if vLLM did not call after some steps
            if request and new and request.length <= begin and request.tail == _tail(matrix, row, request.length):
                self._rows[row], before[row] = request, None
                went_on &= request.length == begin
            else:
                unknown.append(row)
        for request in before:
            self._leave(request)
        for row in unknown:
            if sampled[row]:
                begin = ends[row] - len(sampled[row])
                request = self._gone.pop((begin, _tail(matrix, row, begin)), None)
                self._rows[row] = request or self._request(row, begin, matrix, self._version)
        return went_on and not unknown

    def _leave(self, request: _Request | None) -> None:
        if request is not None:
            self._gone[request.length, request.tail] = request
            if len(self._gone) > REMEMBERED:
                self._gone.popitem(last=False)

    def _request(self, row: int, length: int, matrix: NDArray[np.int32], version: int) -> _Request:
        """Return a new request with the prompt ``matrix[row, :length]``, which the index then has."""
        key = hash(matrix[row, :length].tobytes())
        prompt = self._prompts.pop(key, None)
        if prompt is None:
            prompt = _Prompt(key=key, visit=PROMPT, visits=deque([version], maxlen=self.settings.epochs + 1))
        self._prompts[key] = prompt
        if len(self._prompts) > self._most_prompts:
            self._prompts.popitem(last=False)
        if prompt.visits[-1] < version:
            prompt.visits.append(version)
        if not self._index.holds(prompt.last):
            prompt.last, prompt.length = -1, 0
            self._index.extend(matrix, [row], [length], [prompt])
        return _Request(key=key, visit=version, oldest=prompt.visits[0], last=prompt.last, length=length, prompt=prompt)

    def _learn(self, sampled: Sequence[Sequence[int]], ends: list[int], matrix: NDArray[np.int32]) -> bool:
        """Compare matches with what came; return whether drafts were verified.

        A match that was not proposed counts, too: the chance that a token is sampled is the chance that it would have been
        accepted. So it is seen without a draft when acceptance becomes better.
        """
        counts, drafted = self._counts, False
        for row, request in enumerate(self._rows):
            if request is None:
                continue
            new, match, prompt = len(sampled[row]), request.match, request.prompt
            if match is not None:
                came = matrix[row, request.length : ends[row]].tolist()
                equal = [guess == token for guess, token in zip(match.tokens, came, strict=False)]
                hits = equal.index(False) if False in equal else len(equal)
                seen = hits, sum(match.shares[: min(hits + 1, len(equal))])
                prompt.hits, prompt.tries = 0.95 * prompt.hits + seen[0], 0.95 * prompt.tries + seen[1]
                records = self._records[:, class_of(match.matched)]
                records *= 0.99
                records += seen
                if match.worth and len(came) == new:
                    drafted = True
                    for name, value in (("drafted", match.worth), ("accepted", new - 1)):
                        counts[name] += value
                        counts[f"{name}_{SOURCES[match.source]}"] += value
                request.match = None
            tokens, steps = _BY_LENGTH[(ends[row] - prompt.length).bit_length()]
            counts[tokens] += new
            counts[steps] += 1
        counts["steps"] += 1
        counts["tokens"] += sum(map(len, sampled))
        return drafted

    def _warm_up(self) -> None:
        """Compile before the first request waits for it."""
        matrix, index, sequence = np.zeros((1, 8), np.int32), TokenIndex(1), TokenSequence(0, 0)
        index.extend(matrix, [0], [8], [sequence])
        index.lookup(matrix, [0], [sequence], 1, [(0.0, 0.0)], self._records[0], FLOOR)
        index.read(sequence)
        class_of(4)


class _Worth:
    """Whether drafting pays: seconds a token of steps that verified drafts, and of steps that did not, at about equal batch size.

    Sizes are equal up to an eighth. Of WITHOUT steps at least one has no drafts, so that there is something to compare with.
    LEAST steps without drafts and TRIED with them are enough to compare.
    """

    WITHOUT, LEAST, TRIED, WINDOW, PAUSE = 32, 8, 32, 512, 512

    def __init__(self) -> None:
        self._sizes: dict[int, NDArray[np.float64]] = {}  # [without, with] x [steps, seconds, tokens]
        self._paused: Counter[int] = Counter()
        self.stopped = 0

    def allows(self, rows: int) -> bool:
        """Return whether the next step may verify drafts."""
        size = _about(rows)
        if self._paused[size] > 0:
            self._paused[size] -= 1
            return False
        without, drafted = self._sizes[size][:, 0] if size in self._sizes else (0, 0)
        return bool(without >= self.LEAST and without * self.WITHOUT >= drafted)

    def pays(self, rows: int, expected: float) -> bool:
        """Return whether ``expected`` tokens more are worth what verifying adds to a step; they are until enough was tried."""
        (plain_steps, plain, _), (steps, spent, _) = self._sizes.get(_about(rows), np.zeros((2, 3)))
        return bool(steps < self.TRIED or spent / steps * rows <= plain / plain_steps * (rows + expected))

    def add(self, rows: int, drafted: bool, seconds: float, tokens: int) -> None:
        """Add a step in which all ``rows`` went on."""
        size = _about(rows)
        seen = self._sizes.setdefault(size, np.zeros((2, 3)))
        steps, spent, _ = seen[int(drafted)]
        if steps >= self.LEAST:
            seconds = min(seconds, 4 * spent / steps)  # the engine stood still meanwhile
        seen[int(drafted)] += (1, seconds, tokens)
        (plain_steps, plain, plain_tokens), (steps, spent, gained) = seen
        if plain_steps >= self.LEAST and steps >= self.TRIED and spent / gained > plain / plain_tokens:
            self._paused[size] = self.PAUSE
            self.stopped += 1
            if self.stopped == 1:
                logger.info(
                    "no drafts for %d steps with %d requests: %.3g ms a token with drafts, %.3g without (said once)",
                    *(self.PAUSE, rows, 1000 * spent / gained, 1000 * plain / plain_tokens),
                )
            seen[1] = 0
        elif max(plain_steps, steps) > self.WINDOW:
            seen /= 2


def _about(rows: int) -> int:
    shift = max(0, rows.bit_length() - 4)
    return rows >> shift << shift


def _tail(matrix: NDArray[np.int32], row: int, length: int) -> bytes:
    return matrix[row, max(0, length - CONTEXT) : length].tobytes()
