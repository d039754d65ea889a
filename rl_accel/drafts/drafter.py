"""vLLM's side of drafts: ``speculative_config={"method": "custom_class", "model": "rl_accel.drafts.drafter.Drafter", ...}``."""

import itertools
import logging
import operator
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from rl_accel.drafts.index import CONTEXT, OTHER, PROMPT, SOURCES, Match, TokenIndex, TokenSequence, key_of
from rl_accel.features import DraftsFlags

SETTINGS = "rl_accel_drafts"
"""The key of vLLM's ``additional_config`` that the settings are under; that dict reaches every worker process."""
FLOOR = 0.2
"""A token is drafted while the chance that all tokens up to it are accepted is at least this."""
FIRST_RATES = ((4, 0.5), (8, 0.6), (16, 0.7), (CONTEXT, 0.8))
"""By the tokens that a match shares at most, the chance that a token is accepted, before anything was seen."""
PRIOR = 4.0
"""How many tries of its own weigh as much, for a prompt, as what holds for all prompts."""
REMEMBERED = 4096
"""Requests that have left the batch that are remembered, as they may come back or be taken."""
_BY_LENGTH = [(f"tokens_from_{2**bits // 2}", f"row_steps_from_{2**bits // 2}") for bits in range(32)]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Rate:
    """How many guesses were right lately."""

    hits: float = 0.0
    tries: float = 0.0

    def add(self, hits: float, tries: float, kept: float) -> None:
        self.hits, self.tries = kept * self.hits + hits, kept * self.tries + tries


@dataclass(slots=True, kw_only=True)
class _Prompt(TokenSequence):
    visits: deque[int]  # versions of the weights that it was answered with, the last one last
    rates: tuple[_Rate, _Rate] = field(default_factory=lambda: (_Rate(), _Rate()))  # of matches at it, and at others


@dataclass(slots=True, kw_only=True)
class _Request(TokenSequence):
    prompt: _Prompt
    tail: bytes = b""  # the last CONTEXT tokens
    taken: bool = False
    match: Match | None = None
    worth: int = 0  # how many tokens of the match are proposed


class Drafter:
    """Proposes what responses to the same prompt, running ones among them, or else to others have after a request's last tokens.

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
        self._prompts: LRUCache[int, _Prompt] = LRUCache(len(self._index.pool.blocks) // 8)  # one for 256 tokens
        self._rows: dict[int, _Request] = {}
        self._gone: LRUCache[tuple[int, bytes], _Request] = LRUCache(REMEMBERED)
        self._version = 0
        self._rates = [[(most, _Rate(8 * rate, 8)) for most, rate in FIRST_RATES] for _ in range(2)]
        self._worth = _Worth()
        self._called: float | None = None
        self.counts: Counter[str] = Counter()
        """What happened. ``steps``: calls of :meth:`propose`. ``tokens``: sampled in them. ``drafted``, ``accepted``: tokens of
        drafts that were verified, also by where they came from (``drafted_own``, ``_sibling``, ``_earlier``, ``_other``).
        ``tokens_from_L`` and ``row_steps_from_L``: tokens, and steps of a request, in which its response had from L to less than
        2 L tokens then. ``stopped``: how often drafting was stopped because it cost more than it gave."""
        # compile before the first request waits for it
        warm, sequence = TokenIndex(1), TokenSequence(0, 0)
        warm.extend(sequence, np.zeros(9, np.int32), 8)
        warm.lookup(sequence, np.zeros(10, np.int32), 1)
        warm.read(sequence)

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
        now, running = self._clock(), len(sampled_token_ids)
        drafts: list[list[int]] = [[] for _ in range(running)]
        if self._idle or not running:
            return drafts
        ends: list[int] = num_tokens_no_spec[:running].tolist()
        went_on = self._follow(sampled_token_ids, ends, token_ids_cpu)
        verified = self._learn(sampled_token_ids, ends, token_ids_cpu)
        if self._called is not None and went_on:
            tokens = sum(map(len, sampled_token_ids))
            self.counts["stopped"] += self._worth.add(running, verified, now - self._called, tokens)
        self._called = now
        for row, request in self._rows.items():
            self._index.extend(request, token_ids_cpu[row], ends[row])
            request.tail = _tail(token_ids_cpu[row], ends[row])
        if running > self.settings.batch_limit or not self._worth.allows(running):
            return drafts
        expected = 0.0
        for row, request in self._rows.items():
            request.match = self._index.lookup(request, token_ids_cpu[row], self._longest)
            if request.match is not None:
                expected += self._choose(request, request.match)
        pays = self._worth.pays(running, expected)
        for row, request in self._rows.items():
            request.worth *= pays
            if request.match is not None:
                drafts[row] = request.match.tokens[: request.worth]
        return drafts

    def new_weights(self) -> None:
        """Note that the weights have changed: who runs is as good as finished, but may come back, in any row."""
        self._gone.update({(request.length, request.tail): request for request in self._rows.values()})
        self._rows, self._called = {}, None
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
            numbers = np.array(
                np.frombuffer(response, np.int32)
            )  # a copy: kernels are compiled for arrays that can be written
            (version, length), tokens = numbers[:2].tolist(), numbers[2:]
            self._version = max(self._version, version)
            self._index.extend(self._request(tokens, length, version), tokens, len(tokens))

    def _follow(self, sampled: Sequence[Sequence[int]], ends: list[int], matrix: NDArray[np.int32]) -> bool:
        """Find the request of each row that has sampled; return whether all rows just went on from the last call."""
        before, found, went_on = self._rows, {}, True
        begins = {row: ends[row] - len(new) for row, new in enumerate(sampled) if new}
        for row, begin in begins.items():
            request = before.get(row)
            # shorter than at the beginning of the step, if vLLM did not call after some steps
            if request and request.length <= begin and request.tail == _tail(matrix[row], request.length):
                found[row] = before.pop(row)
                went_on &= request.length == begin
        went_on &= len(found) == len(ends)
        self._gone.update({(request.length, request.tail): request for request in before.values()})
        for row, begin in begins.items():
            if row not in found:
                gone = self._gone.pop((begin, _tail(matrix[row], begin)), None)
                found[row] = gone or self._request(matrix[row], begin, self._version)
        self._rows = dict(sorted(found.items()))
        return went_on

    def _request(self, tokens: NDArray[np.int32], length: int, version: int) -> _Request:
        """Return a new request with the prompt ``tokens[:length]``, which the index then has."""
        key = key_of(tokens[:length])
        prompt = self._prompts.get(key)
        if prompt is None:
            visits = deque([version], maxlen=self.settings.epochs + 1)
            prompt = self._prompts[key] = _Prompt(key=key, visit=PROMPT, visits=visits)
        if prompt.visits[-1] < version:
            prompt.visits.append(version)
        if not self._index.holds(prompt.last):
            prompt.last, prompt.length = -1, 0
            self._index.extend(prompt, tokens, length)
        # of a prompt in its first epochs nothing is too old, so that responses to others count
        oldest = prompt.visits[0] if len(prompt.visits) == prompt.visits.maxlen else 0
        return _Request(key=key, visit=version, oldest=oldest, last=prompt.last, length=length, prompt=prompt)

    def _learn(self, sampled: Sequence[Sequence[int]], ends: list[int], matrix: NDArray[np.int32]) -> bool:
        """Compare matches with what came; return whether drafts were verified.

        A match that was not proposed counts, too: the chance that a token is sampled is the chance that it would have been
        accepted. So it is seen without a draft when acceptance becomes better.
        """
        counts, verified = self.counts, False
        for row, request in self._rows.items():
            new, match, worth = len(sampled[row]), request.match, request.worth
            if match is not None:
                came = matrix[row, request.length : ends[row]].tolist()
                hits = sum(itertools.takewhile(bool, map(operator.eq, match.tokens, came)))
                tries = sum(match.shares[: min(hits + 1, len(came))])
                request.prompt.rates[match.source == OTHER].add(hits, tries, kept=0.95)
                self._rate(match).add(hits, tries, kept=0.99)
                if worth and len(came) == new:
                    verified = True
                    for name, value in (("drafted", worth), ("accepted", new - 1)):
                        counts[name] += value
                        counts[f"{name}_{SOURCES[match.source]}"] += value
                request.match, request.worth = None, 0
            tokens, steps = _BY_LENGTH[(ends[row] - request.prompt.length).bit_length()]
            counts[tokens] += new
            counts[steps] += 1
        counts["steps"] += 1
        counts["tokens"] += sum(map(len, sampled))
        return verified

    def _rate(self, match: Match) -> _Rate:
        return next(rate for most, rate in self._rates[match.source == OTHER] if match.matched <= most)

    def _choose(self, request: _Request, match: Match) -> float:
        """Set how many tokens of a match are worth proposing; return how many of them will be accepted, on average."""
        own, of_all, chance, expected = request.prompt.rates[match.source == OTHER], self._rate(match), 1.0, 0.0
        rate = min(1.0, (own.hits + PRIOR * of_all.hits / of_all.tries) / (own.tries + PRIOR))
        for share in match.shares:
            chance *= rate * share
            if chance < FLOOR:
                break
            request.worth += 1
            expected += chance
        return expected


class _Worth:
    """Whether drafting pays: seconds a token of steps that verified drafts, and of steps that did not, at about equal batch size.

    Sizes are equal up to an eighth; older steps than WINDOW hardly count. Of WITHOUT steps at least one has no drafts, so that
    there is something to compare with. LEAST steps without drafts and TRIED with them are enough to compare.
    """

    WITHOUT, LEAST, TRIED, WINDOW, PAUSE = 32, 8, 32, 512, 512

    def __init__(self) -> None:
        # [without, with] x [steps, seconds, tokens]
        self._sizes: defaultdict[int, NDArray[np.float64]] = defaultdict(lambda: np.zeros((2, 3)))
        self._paused: Counter[int] = Counter()
        self._told = False

    def allows(self, rows: int) -> bool:
        """Return whether the next step may verify drafts."""
        size = _about(rows)
        if self._paused[size] > 0:
            self._paused[size] -= 1
            return False
        without, verified = self._sizes[size][:, 0]
        return bool(without >= self.LEAST and without * self.WITHOUT >= verified)

    def pays(self, rows: int, expected: float) -> bool:
        """Return whether ``expected`` tokens more are worth what verifying adds to a step; they are until enough was tried."""
        (plain_steps, plain, _), (steps, spent, _) = self._sizes[_about(rows)]
        return bool(steps < self.TRIED or spent / steps * rows <= plain / plain_steps * (rows + expected))

    def add(self, rows: int, verified: bool, seconds: float, tokens: int) -> bool:
        """Add a step in which all ``rows`` went on; return whether drafting is stopped from now on."""
        size = _about(rows)
        seen = self._sizes[size]
        steps, spent, _ = seen[int(verified)]
        if steps >= self.LEAST:
            seconds = min(seconds, 4 * spent / steps)  # the engine stood still meanwhile
        seen *= 1 - 1 / self.WINDOW
        seen[int(verified)] += (1, seconds, tokens)
        (plain_steps, plain, plain_tokens), (steps, spent, gained) = seen
        if plain_steps < self.LEAST or steps < self.TRIED or spent / gained <= plain / plain_tokens:
            return False
        if not self._told:
            logger.info(
                "no drafts for %d steps with %d requests: %.3g ms a token with drafts, %.3g without (said once)",
                *(self.PAUSE, rows, 1000 * spent / gained, 1000 * plain / plain_tokens),
            )
        self._told = True
        self._paused[size] = self.PAUSE
        seen[1] = 0
        return True


def _about(rows: int) -> int:
    shift = max(0, rows.bit_length() - 4)
    return rows >> shift << shift


def _tail(tokens: NDArray[np.int32], length: int) -> bytes:
    return tokens[max(0, length - CONTEXT) : length].tobytes()
