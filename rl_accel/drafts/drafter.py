"""Drafter for speculative decoding in vLLM, which proposes tokens from other responses to the same prompt.

Use ``speculative_config={"method": "custom_class", "model": "rl_accel.drafts.drafter.Drafter", ...}``.
"""

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from cachetools import FIFOCache, LRUCache
from numpy.typing import NDArray

from rl_accel.drafts.index import (
    CONTEXT,
    LAST,
    LENGTH,
    NUMBER,
    OTHER,
    PROMPT,
    SOURCES,
    VERSION,
    Ints,
    Pool,
    extend,
    hash_of,
    is_live,
    key_of,
    make_pool,
    predict,
    sequence,
    tokens_of,
)
from rl_accel.features import DraftsFlags
from rl_accel.ops.cpu import compiled

SETTINGS = "rl_accel_drafts"
"""Key of the drafter's settings in the dict ``additional_config`` of vLLM's configuration."""
FLOOR = 0.2
"""Minimum estimated probability (0 to 1) that all tokens of a draft are accepted. A draft ends before the token that would bring
this probability below FLOOR. Chosen by hand."""
FIRST_RATES = ((4, 0.5), (8, 0.6), (16, 0.7), (CONTEXT, 0.8))
"""Assumed acceptance rates of draft tokens before any was measured: 0.5 if up to 4 of a response's last tokens were found
at another place in the index, 0.6 for up to 8, and so on. Chosen by hand: the longer two texts agree, the likelier they go on to
agree."""
PRIOR = 4.0
"""Weight of all prompts in the acceptance rate estimated for one prompt. All prompts together count as much as PRIOR
predicted tokens of this prompt, so that a new prompt has an estimate, too. Chosen by hand."""
REMEMBERED = 4096
"""Maximum number of requests that are remembered after they have left vLLM's batch: ``take_finished`` returns their responses,
and vLLM may continue them. Chosen by hand."""
TAIL, RATES, HEAD, TAKEN, FOUND, MATCHED, SOURCE, PROPOSED = range(NUMBER + 1, NUMBER + 9)
"""Columns 6 to 13 of ``_Batch.requests``, the table of running requests. Columns 0 to 5: see ``LAST`` in ``index.py``.

TAIL: hash of the request's last tokens, by which the drafter recognises the request.
RATES: row of ``_Rates.own`` with the acceptance rates of the request's prompt.
HEAD: number of prompt tokens.
TAKEN: 1 if ``take_finished`` has returned the response, else 0.
FOUND, MATCHED, SOURCE: the three return values of ``predict`` in ``index.py``. FOUND is the number of predicted tokens.
PROPOSED: number of predicted tokens that are proposed to vLLM."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Prompt:
    """A prompt whose tokens are in the index.

    Attributes:
        sequence: description of the prompt for the index, int64[6], columns: see ``LAST`` in ``index.py``.
        rates_row: row of ``_Rates.own`` with the acceptance rates of this prompt.
        versions: last versions of the weights that generated responses to the prompt, the latest version last.
    """

    sequence: Ints
    rates_row: int
    versions: deque[int]


class _Batch(NamedTuple):
    """Running requests as arrays with R rows. Each request has the same row as in vLLM; a row without a request has length -1."""

    requests: Any  # int64[R, 14], columns: see LAST and TAIL
    tokens: Any  # int32[R, L]: predicted tokens
    shares: Any  # float64[R, L]: share of the votes for each predicted token

    @classmethod
    def empty(cls, rows: int, longest: int) -> "_Batch":
        shape = rows, longest
        batch = cls(np.zeros((rows, PROPOSED + 1), np.int64), np.zeros(shape, np.int32), np.zeros(shape))
        batch.requests[:, LENGTH] = -1
        return batch


class _Rates(NamedTuple):
    """Acceptance rates of predicted tokens, from which the probability that vLLM accepts the next predicted token is estimated.

    This probability is hits / tries, times the token's share of the votes (see ``predict``). Hits: number of predicted tokens that
    were sampled. Tries: sum of the shares of all predicted tokens that were compared with sampled tokens. Older ones count less.
    Source 0: predictions from the same prompt and its responses. Source 1: predictions from other prompts.
    """

    own: Any  # float64[P, 2, 2]: prompt, source, (hits, tries)
    all: Any  # float64[2, len(FIRST_RATES), 2]: source, match length, (hits, tries)


class _Counts(NamedTuple):
    """Counters of tokens since the last call of ``take_counts``."""

    by_source: Any  # int64[len(SOURCES), 2]: drafted and accepted tokens
    by_length: Any  # int64[32, 2]: sampled tokens, row steps (see take_counts), by bit length of the response's length


class Drafter:
    """Drafter for speculative decoding in vLLM.

    Searches finished and running responses for the last tokens of each request, and proposes the tokens that followed there. vLLM
    verifies a draft with rejection sampling, so a wrong draft costs time, never correctness. vLLM passes no request ids, so the
    drafter recognises a request by its number of tokens and its last tokens.

    In a tensor-parallel group, only the first rank proposes drafts.

    Args:
        vllm_config: vLLM's configuration. ``additional_config["rl_accel_drafts"]`` has fields of
            :class:`~rl_accel.features.DraftsFlags`.
        clock: function that returns the time in seconds. Drafting pauses if steps with drafts take more time per token.

    Raises:
        TypeError: ``additional_config`` has an unknown setting.
        ValueError: the executor is "external_launcher", where each rank must propose the same drafts; or memory_mb is below 1.
    """

    def __init__(self, vllm_config: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        parallel = vllm_config.parallel_config
        if parallel.distributed_executor_backend == "external_launcher":
            raise ValueError("drafts need distributed_executor_backend 'mp', 'uni' or 'ray', found 'external_launcher'")
        self.settings = DraftsFlags(**vllm_config.additional_config.get(SETTINGS, {}))
        self._longest = min(self.settings.max_tokens, vllm_config.speculative_config.num_speculative_tokens)
        self._idle = parallel.rank % (parallel.tensor_parallel_size * parallel.prefill_context_parallel_size) != 0
        self._clock = clock
        if not self._idle:  # compile now, so that the first request does not wait
            self._begin(1)
            for end in (1, 2):
                self.propose([[0]], np.array([end]), np.zeros((1, 2 * CONTEXT), np.int32))
            tokens_of(self._pool, self._batch.requests[0])
        self._begin(1 if self._idle else self.settings.memory_mb)

    def _begin(self, memory_mb: float) -> None:
        self._pool = make_pool(memory_mb)
        prompts = len(self._pool.blocks) // 8  # one prompt per 256 tokens
        self._prompts: FIFOCache[int, _Prompt] = FIFOCache(prompts)
        self._new_prompts = 0  # number of prompts so far
        self._batch, self._running = _Batch.empty(1, self._longest), 0
        self._gone: LRUCache[tuple[int, int], tuple[Any, ...]] = LRUCache(REMEMBERED)
        self._version = 0
        first = [[8 * rate, 8] for _, rate in FIRST_RATES]
        self._rates = _Rates(np.zeros((prompts, 2, 2)), np.array([first, first]))
        self._costs = _CostModel()
        self._called: float | None = None
        self._begin_counts()

    def _begin_counts(self) -> None:
        self._steps = self._stopped = 0
        self._counts = _Counts(np.zeros((len(SOURCES), 2), np.int64), np.zeros((32, 2), np.int64))

    def load_model(self, *_: Any) -> None:
        """Does nothing: vLLM calls this method of every drafter, and this drafter has no model to load."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[Any],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Adds the tokens of the last decoding step to the index. Returns a draft, possibly empty, for each row (running request).

        Args:
            sampled_token_ids: tokens accepted or sampled in the last step, for each row; empty for an incomplete prefill.
            num_tokens_no_spec: number of prompt and response tokens of each row, including ``sampled_token_ids``.
            token_ids_cpu: prompt and response tokens of each row, int32, shape (rows, max_model_len).
            slot_mappings: unused.

        Raises:
            ValueError: ``token_ids_cpu`` has another shape or type.
        """
        now, running = self._clock(), len(sampled_token_ids)
        drafts: list[list[int]] = [[] for _ in range(running)]
        if self._idle or not running:
            return drafts
        if len(self._batch.requests) != len(token_ids_cpu):  # the first call
            if token_ids_cpu.ndim != 2 or token_ids_cpu.dtype != np.int32:
                found = f"{token_ids_cpu.dtype}{list(token_ids_cpu.shape)}"
                raise ValueError(f"token_ids_cpu must be int32[rows, max_model_len], found {found}")
            self._batch, self._running = _Batch.empty(len(token_ids_cpu), self._longest), 0
        new = np.array([len(tokens) for tokens in sampled_token_ids])
        ends = num_tokens_no_spec[:running].astype(np.int64)
        step = self._pool, self._batch, self._rates, self._counts, token_ids_cpu, new, ends
        others, went_on, verified = _advance(*step)
        if len(others) or running < self._running:
            self._follow(others.tolist(), new, ends, token_ids_cpu)
            went_on = False
        if len(others):
            *_, verified = _advance(*step)
        self._steps += 1
        if self._called is not None and went_on:
            self._stopped += self._costs.add(running, verified, now - self._called, int(new.sum()))
        self._called = now
        if running > self.settings.batch_limit or not self._costs.allows(running):
            return drafts
        if self._costs.pays(running, _choose(self._pool, self._batch, self._rates, token_ids_cpu, running)):
            for row, count in enumerate(self._batch.requests[:running, PROPOSED].tolist()):
                if count:
                    drafts[row] = self._batch.tokens[row, :count].tolist()
        else:
            self._batch.requests[:, PROPOSED] = 0
        return drafts

    def take_counts(self) -> Counter[str]:
        """Returns the counters since the last call, by name, and resets them.

        - ``steps``: calls of :meth:`propose`.
        - ``tokens``: tokens sampled in these steps.
        - ``drafted``, ``accepted``: verified draft tokens, and accepted draft tokens.
        - ``drafted_own``, ``accepted_own`` and so on: the same for one source of drafts (see ``SOURCES`` in ``index.py``).
        - ``tokens_from_256`` and other powers of two: tokens sampled in responses that then had 256 to 511 tokens.
        - ``row_steps_from_256``: number of steps with such a response. A step with three of them counts three times.
        - ``stopped``: number of pauses of drafting, which begin when drafts cost more time than they save.
        """
        by_source, by_length = self._counts
        counter = Counter(steps=self._steps, stopped=self._stopped, tokens=int(by_length[:, 0].sum()))
        counter["drafted"], counter["accepted"] = by_source.sum(axis=0).tolist()
        for source, (drafted, accepted) in zip(SOURCES, by_source.tolist(), strict=True):
            counter[f"drafted_{source}"], counter[f"accepted_{source}"] = drafted, accepted
        for bits in np.flatnonzero(by_length[:, 1]).tolist():
            counter[f"tokens_from_{2**bits // 2}"], counter[f"row_steps_from_{2**bits // 2}"] = by_length[bits].tolist()
        self._begin_counts()
        return counter

    def new_weights(self) -> None:
        """Tells the drafter that the engine has new weights. Responses that begin later count as generated with these weights.

        Running requests count as ended. If vLLM continues one of them, :meth:`propose` recognises the request by its tokens.
        """
        self._leave(range(self._running))
        self._running, self._called = 0, None
        self._version += 1

    def take_finished(self) -> list[bytes]:
        """Returns the responses that ended since the last call. Another replica, or a later run, adds them by :meth:`absorb`.

        Each response is encoded as bytes. A response that was preempted or aborted, and has not continued, counts as ended.
        """
        finished = []
        for request, *_ in self._gone.values():
            tokens = None if request[TAKEN] else tokens_of(self._pool, request)
            if tokens is not None:
                finished.append(request[[VERSION, HEAD]].astype(np.int32).tobytes() + tokens.tobytes())
            request[TAKEN] = True
        return finished

    def absorb(self, responses: Iterable[bytes]) -> None:
        """Adds ``responses`` to the index. :meth:`take_finished` has returned them in another replica or an earlier run."""
        for response in responses if not self._idle else ():
            numbers = np.array(np.frombuffer(response, np.int32))  # a copy: kernels are compiled for writable arrays
            (version, length), tokens = numbers[:2].tolist(), numbers[2:]
            self._version = max(self._version, version)
            extend(self._pool, self._request(tokens, length, version)[None], tokens[None], np.array([len(tokens)]))

    def _follow(self, others: list[int], new: Ints, ends: Ints, matrix: NDArray[np.int32]) -> None:
        """Updates ``_batch``, the drafter's copy of vLLM's batch, after requests have started, ended or changed rows.

        ``others``: rows that hold another request than in the last call. If vLLM sampled no token for such a row, as during an
        incomplete prefill, the row becomes empty.
        """
        left = self._leave([*others, *range(len(new), self._running)])
        for row in others:
            if new[row]:
                begin = int(ends[row] - new[row])
                gone = self._gone.pop((begin, _tail_of(matrix[row], begin)), None)
                if gone is None:
                    self._batch.requests[row] = self._request(matrix[row], begin, self._version)
                else:
                    for array, values in zip(self._batch, gone, strict=True):
                        array[row] = values
        for request in left:  # vLLM drops the draft of a request that it preempts
            request[PROPOSED] = 0
        self._running = len(new)

    def _leave(self, rows: Iterable[int]) -> list[Ints]:
        """Removes the requests in ``rows`` from the batch, and keeps them in ``_gone``, because vLLM may continue them.

        Returns copies of the removed rows of ``_Batch.requests``.
        """
        left = []
        for row in rows:
            request = self._batch.requests[row]
            if request[LENGTH] >= 0:
                gone = tuple(array[row].copy() for array in self._batch)
                self._gone[int(request[LENGTH]), int(request[TAIL])] = gone
                left.append(gone[0])
                request[LENGTH], request[FOUND:] = -1, 0
        return left

    def _request(self, tokens: NDArray[np.int32], length: int, version: int) -> Ints:
        """Returns a new row of ``_Batch.requests``, int64[14], for a request with the prompt ``tokens[:length]``.

        Adds the prompt to the index if it is not there. ``version``: version of the weights that generate the response.
        """
        key = key_of(tokens[:length])
        prompt = self._prompts.get(key)
        if prompt is None:
            rates_row = self._new_prompts % len(self._rates.own)  # reuses the index of the evicted prompt
            self._rates.own[rates_row] = 0
            self._new_prompts += 1
            versions = deque([version], maxlen=self.settings.epochs + 1)
            prompt = self._prompts[key] = _Prompt(sequence(key, PROMPT), rates_row, versions)
        if prompt.versions[-1] < version:
            prompt.versions.append(version)
        if not is_live(self._pool, prompt.sequence[LAST]):
            prompt.sequence[LAST], prompt.sequence[LENGTH] = -1, 0
            extend(self._pool, prompt.sequence[None], tokens[None], np.array([length]))
        # in the first epochs of a prompt no response is too old, so that responses to other prompts are used
        oldest = prompt.versions[0] if len(prompt.versions) == prompt.versions.maxlen else 0
        begun = sequence(key, version, oldest, int(prompt.sequence[LAST]), length)
        return np.array([*begun, _tail_of(tokens, length), prompt.rates_row, length, False, 0, 0, 0, 0])


@compiled
def _tail_of(tokens: Any, end: int) -> Any:
    """Returns a hash of the last CONTEXT tokens of ``tokens[:end]``. Hash and length together identify a request."""
    return hash_of(tokens, max(0, end - CONTEXT), end, 0)


@compiled
def _rates_of(rates: _Rates, request: Any) -> tuple[Any, Any]:
    """Returns two writable pairs (hits, tries) for the acceptance rate of the tokens predicted for ``request``, see ``_Rates``.

    The first pair is for the prompt of ``request``; the second for all prompts, at a similar number of equal tokens. Both count
    only predictions from the same source as these tokens.
    """
    other, at = int(request[SOURCE] == OTHER), 0
    while request[MATCHED] > FIRST_RATES[at][0]:
        at += 1
    return rates.own[request[RATES], other], rates.all[other, at]


@compiled
def _advance(
    pool: Pool, batch: _Batch, rates: _Rates, counts: _Counts, matrix: Any, new: Any, ends: Any
) -> tuple[Any, bool, bool]:
    """Compares the predicted tokens with the tokens that vLLM has sampled, updates the acceptance rates, and extends the index.

    Returns ``(others, went_on, verified)``:
        others: rows that have another request in ``batch`` than in vLLM. If there are any, nothing else was done.
        went_on: whether all new tokens are from one step, so that its duration is the time since the last call.
        verified: whether at least one draft was verified in the last step.
    """
    others, went_on, verified, rows = np.zeros(len(new), np.bool_), True, False, len(new)
    for row in range(rows):
        length, begin = batch.requests[row, LENGTH], ends[row] - new[row]
        went_on = went_on and new[row] > 0 and length == begin
        # the known length is below ``begin`` if vLLM did not call ``propose`` after some steps; 0.29.0 does not call it while
        # a request is within num_speculative_tokens of max_model_len
        if new[row] > 0 and 0 <= length <= begin:
            others[row] = batch.requests[row, TAIL] != _tail_of(matrix[row], length)
        else:
            others[row] = new[row] > 0 or length >= 0
    if others.any():
        return np.flatnonzero(others), False, False
    for row in range(rows):
        request, end = batch.requests[row], ends[row]
        length, found = request[LENGTH], request[FOUND]
        if length < 0:
            continue
        # tokens that were not proposed count too: they are sampled as often as they would be accepted in a draft, and a
        # rising acceptance rate must be noticed while drafting pauses
        if found > 0:
            came, hits = end - length, 0
            while hits < min(found, came) and batch.tokens[row, hits] == matrix[row, length + hits]:
                hits += 1
            tries = batch.shares[row, : min(hits + 1, came, found)].sum()
            own, of_all = _rates_of(rates, request)
            for rate, kept in ((own, 0.95), (of_all, 0.99)):
                rate[0], rate[1] = kept * rate[0] + hits, kept * rate[1] + tries
            if request[PROPOSED] and came == new[row]:
                verified = True
                counts.by_source[request[SOURCE], 0] += request[PROPOSED]
                counts.by_source[request[SOURCE], 1] += new[row] - 1
        request[FOUND] = request[PROPOSED] = 0
        bits, left = 0, end - request[HEAD]
        while left > 0:
            bits, left = bits + 1, left >> 1
        counts.by_length[bits, 0] += new[row]
        counts.by_length[bits, 1] += 1
        request[TAIL] = _tail_of(matrix[row], end)
    extend(pool, batch.requests[:rows], matrix, ends)
    return np.flatnonzero(others), went_on, verified


@compiled
def _choose(pool: Pool, batch: _Batch, rates: _Rates, matrix: Any, rows: int) -> float:
    """Predicts the next tokens of each request, and writes the number of tokens to propose into the column ``PROPOSED``.

    Returns the number of draft tokens that are expected to be accepted in the next step, summed over requests.
    """
    expected = 0.0
    for row in range(rows):
        request, shares = batch.requests[row], batch.shares[row]
        request[FOUND], request[MATCHED], request[SOURCE] = predict(
            pool, request, matrix[row], batch.tokens[row], shares
        )
        if request[FOUND] > 0:
            own, of_all = _rates_of(rates, request)
            rate, chance = min(1.0, (own[0] + PRIOR * of_all[0] / of_all[1]) / (own[1] + PRIOR)), 1.0
            for share in shares[: request[FOUND]]:
                chance *= rate * share
                if chance < FLOOR:
                    break
                request[PROPOSED] += 1
                expected += chance
    return expected


class _CostModel:
    """Decides whether drafting saves time. Compares the seconds per token of steps with and without drafts, at similar batch sizes.

    The constants are chosen by hand:

    - ``WITHOUT``: one step in WITHOUT steps has no drafts, only for the comparison. This costs about 3% of the drafts.
    - ``LEAST``, ``TRIED``: minimum numbers of steps without drafts, and with drafts, for a comparison.
    - ``WINDOW``: the weight of a measured step falls to 1 / e after WINDOW further steps.
    - ``PAUSE``: number of steps without drafts after a comparison in which drafting did not save time.
    """

    WITHOUT, LEAST, TRIED, WINDOW, PAUSE = 32, 8, 32, 512, 512

    def __init__(self) -> None:
        # by batch size: numbers of steps, seconds and tokens, without drafts and with drafts
        self._sizes: defaultdict[int, list[list[float]]] = defaultdict(lambda: [[0.0] * 3, [0.0] * 3])
        self._paused: Counter[int] = Counter()
        self._told = False

    def allows(self, rows: int) -> bool:
        """Returns whether the next step, with ``rows`` requests, may have drafts.

        Returns False during a pause, which each call shortens by one step, and for steps that must be measured without drafts.
        """
        size = _about(rows)
        if self._paused[size] > 0:
            self._paused[size] -= 1
            return False
        (without, *_), (verified, *_) = self._sizes[size]
        return without >= self.LEAST and without * self.WITHOUT >= verified

    def pays(self, rows: int, expected: float) -> bool:
        """Returns whether the next step, with ``rows`` requests, should take no more seconds per token with drafts than without.

        Returns True until TRIED steps with drafts were measured. ``expected``: expected number of accepted draft tokens in the
        step.
        """
        (plain_steps, plain, _), (steps, spent, _) = self._sizes[_about(rows)]
        return steps < self.TRIED or spent / steps * rows <= plain / plain_steps * (rows + expected)

    def add(self, rows: int, verified: bool, seconds: float, tokens: int) -> bool:
        """Adds the duration of a step of ``rows`` requests. Returns True if drafting costs time, so that a pause begins now.

        ``verified``: whether the step had drafts. ``seconds``: duration of the step. ``tokens``: number of tokens sampled in it.
        """
        size = _about(rows)
        seen = self._sizes[size]
        steps, spent, _ = seen[verified]
        if steps >= self.LEAST:
            seconds = min(seconds, 4 * spent / steps)  # a longer time means that the engine was idle
        seen[:] = [[value * (1 - 1 / self.WINDOW) for value in sums] for sums in seen]
        seen[verified] = [before + more for before, more in zip(seen[verified], (1, seconds, tokens), strict=True)]
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
        seen[True] = [0.0] * 3
        return True


def _about(rows: int) -> int:
    """Returns the batch size ``rows`` with all but its four highest binary digits set to 0, so that similar sizes count as one."""
    shift = max(0, rows.bit_length() - 4)
    return rows >> shift << shift
