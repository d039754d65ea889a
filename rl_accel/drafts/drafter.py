"""Drafter for speculative decoding in vLLM, which proposes tokens from other responses to the same prompt.

Use ``speculative_config={"method": "custom_class", "model": "rl_accel.drafts.drafter.Drafter", ...}``.
"""

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from cachetools import FIFOCache, LRUCache
from numpy.typing import NDArray

from rl_accel.drafts.index import (
    CONTEXT,
    OTHER,
    PROMPT,
    SEQUENCE,
    SOURCES,
    Ints,
    Pool,
    Records,
    extend,
    hash_of,
    is_live,
    key_of,
    make_pool,
    new_sequence,
    predict,
    tokens_of,
)
from rl_accel.features import DraftsFlags
from rl_accel.ops.cpu import compiled

SETTINGS = "rl_accel_drafts"
"""Key of the drafter's settings in the dict ``additional_config`` of vLLM's configuration."""
FLOOR = 0.2
"""Minimum estimated probability (0 to 1) that all tokens of a draft are accepted. A draft ends before the token that would bring
this probability below FLOOR. At half of it, drafts are longer and more of their tokens are verified in vain; at double, shorter."""
FIRST_RATES = ((4, 0.5), (8, 0.6), (16, 0.7), (CONTEXT, 0.8))
"""Assumed acceptance rates of draft tokens before any was measured: 0.5 if up to 4 of a response's last tokens were found
at another place in the index, 0.6 for up to 8, and so on. The longer two texts agree, the likelier they go on to agree. Eight
predicted tokens weigh as much as these assumptions, so that a wrong one is soon corrected."""
PRIOR = 4.0
"""Weight of all prompts in the acceptance rate estimated for one prompt. All prompts together count as much as PRIOR
predicted tokens of this prompt, so that a new prompt has an estimate, too. At half of it, one rejected draft of a prompt counts for
more; at double, a prompt that is unlike the others is noticed later."""
REMEMBERED = 4096
"""Maximum number of requests that are remembered after they have left vLLM's batch: ``take_finished`` returns their responses,
and vLLM may continue them. Enough for four steps of 1,024 responses; beyond it, responses are not exchanged."""
_REQUEST_FIELDS = ("tail", "rates_row", "head", "is_taken", "found", "matched", "source", "proposed")
REQUEST = np.dtype([*SEQUENCE.descr, *((name, np.int64) for name in _REQUEST_FIELDS)])
"""Record of a running request: the fields of SEQUENCE in ``index.py``, and these.

tail: hash of the request's last tokens, by which the drafter recognises the request.
rates_row: row of ``_Rates.own`` with the acceptance rates of the request's prompt.
head: number of prompt tokens.
is_taken: 1 if ``take_finished`` has returned the response, else 0.
found, matched, source: the three return values of ``predict`` in ``index.py``. ``found`` is the number of predicted tokens.
proposed: number of predicted tokens that are proposed to vLLM."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Prompt:
    """A prompt whose tokens are in the index.

    Attributes:
        sequence: the prompt in the index, an array of one SEQUENCE.
        rates_row: row of ``_Rates.own`` with the acceptance rates of this prompt.
        versions: last versions of the weights that generated responses to the prompt, the latest version last.
    """

    sequence: Records
    rates_row: int
    versions: deque[int]


class _Batch(NamedTuple):
    """Running requests as arrays with R rows. Each request has the same row as in vLLM; a row without a request has length -1."""

    requests: Any  # REQUEST[R]
    tokens: Any  # int32[R, L]: predicted tokens
    shares: Any  # float64[R, L]: share of the votes for each predicted token

    @classmethod
    def empty(cls, rows: int, longest: int) -> "_Batch":
        requests = np.zeros(rows, REQUEST)
        requests["length"] = -1
        return cls(requests, np.zeros((rows, longest), np.int32), np.zeros((rows, longest)))


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
        self._batch = _Batch.empty(1, self._longest)
        self._running = 0
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
        now = self._clock()
        running = len(sampled_token_ids)
        drafts: list[list[int]] = [[] for _ in range(running)]
        if self._idle or not running:
            return drafts
        if len(self._batch.requests) != len(token_ids_cpu):  # the first call
            if token_ids_cpu.ndim != 2 or token_ids_cpu.dtype != np.int32:
                found = f"{token_ids_cpu.dtype}{list(token_ids_cpu.shape)}"
                raise ValueError(f"token_ids_cpu must be int32[rows, max_model_len], found {found}")
            self._batch = _Batch.empty(len(token_ids_cpu), self._longest)
            self._running = 0
        new = np.array([len(tokens) for tokens in sampled_token_ids])
        ends = num_tokens_no_spec[:running].astype(np.int64)
        changed_rows, is_one_step = _changed_rows(self._batch.requests, token_ids_cpu, new, ends)
        if len(changed_rows) or running < self._running:
            self._follow(changed_rows.tolist(), new, ends, token_ids_cpu)
            is_one_step = False
        verified = _advance(self._pool, self._batch, self._rates, self._counts, token_ids_cpu, new, ends)
        self._steps += 1
        if self._called is not None and is_one_step:
            self._stopped += self._costs.add(running, verified, now - self._called, int(new.sum()))
        self._called = now
        if running > self.settings.batch_limit or not self._costs.allows(running):
            return drafts
        if self._costs.pays(running, _choose(self._pool, self._batch, self._rates, token_ids_cpu, running)):
            for row, count in enumerate(self._batch.requests["proposed"][:running].tolist()):
                if count:
                    drafts[row] = self._batch.tokens[row, :count].tolist()
        else:
            self._batch.requests["proposed"] = 0
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
            counter[f"drafted_{source}"] = drafted
            counter[f"accepted_{source}"] = accepted
        for bits in np.flatnonzero(by_length[:, 1]).tolist():
            tokens, row_steps = by_length[bits].tolist()
            counter[f"tokens_from_{2**bits // 2}"] = tokens
            counter[f"row_steps_from_{2**bits // 2}"] = row_steps
        self._begin_counts()
        return counter

    def new_weights(self) -> None:
        """Tells the drafter that the engine has new weights. Responses that begin later count as generated with these weights.

        Running requests count as ended. If vLLM continues one of them, :meth:`propose` recognises the request by its tokens.
        """
        self._leave(range(self._running))
        self._running = 0
        self._called = None
        self._version += 1

    def take_finished(self) -> list[bytes]:
        """Returns the responses that ended since the last call. Another replica, or a later run, adds them by :meth:`absorb`.

        Each response is encoded as bytes. A response that was preempted or aborted, and has not continued, counts as ended.
        """
        finished = []
        for request, *_ in self._gone.values():
            tokens = None if request["is_taken"] else tokens_of(self._pool, request)
            if tokens is not None:
                numbers = np.array([request["version"], request["head"]], np.int32)
                finished.append(numbers.tobytes() + tokens.tobytes())
            request["is_taken"] = 1
        return finished

    def absorb(self, responses: Iterable[bytes]) -> None:
        """Adds ``responses`` to the index. :meth:`take_finished` has returned them in another replica or an earlier run."""
        if self._idle:
            return
        for response in responses:
            numbers = np.array(np.frombuffer(response, np.int32))  # a copy: kernels are compiled for writable arrays
            version, length = numbers[:2].tolist()
            tokens = numbers[2:]
            self._version = max(self._version, version)
            extend(self._pool, self._request(tokens, length, version), tokens[None], np.array([len(tokens)]))

    def _follow(self, changed_rows: list[int], new: Ints, ends: Ints, matrix: NDArray[np.int32]) -> None:
        """Updates ``_batch``, the drafter's copy of vLLM's batch, after requests have started, ended or changed rows.

        ``changed_rows``: rows that hold another request than in the last call. If vLLM sampled no token for such a row, as during
        an incomplete prefill, the row becomes empty.
        """
        left = self._leave([*changed_rows, *range(len(new), self._running)])
        for row in changed_rows:
            if new[row]:
                begin = int(ends[row] - new[row])
                gone = self._gone.pop((begin, _tail_of(matrix[row], begin)), None)
                if gone is None:
                    self._batch.requests[row] = self._request(matrix[row], begin, self._version)[0]
                else:
                    for array, values in zip(self._batch, gone, strict=True):
                        array[row] = values
        for request in left:  # vLLM drops the draft of a request that it preempts
            request["proposed"] = 0
        self._running = len(new)

    def _leave(self, rows: Iterable[int]) -> list[Any]:
        """Removes the requests in ``rows`` from the batch, and keeps them in ``_gone``, because vLLM may continue them.

        Returns copies of the removed records of ``_Batch.requests``.
        """
        left = []
        for row in rows:
            request = self._batch.requests[row]
            if request["length"] >= 0:
                gone = tuple(array[row].copy() for array in self._batch)
                self._gone[int(request["length"]), int(request["tail"])] = gone
                left.append(gone[0])
                request["length"] = -1
                request["found"] = 0
                request["proposed"] = 0
        return left

    def _request(self, tokens: NDArray[np.int32], length: int, version: int) -> Records:
        """Returns an array of one REQUEST, for a request with the prompt ``tokens[:length]``.

        Adds the prompt to the index if it is not there. ``version``: version of the weights that generate the response.
        """
        key = key_of(tokens[:length])
        prompt = self._prompts.get(key)
        if prompt is None:
            rates_row = self._new_prompts % len(self._rates.own)  # reuses the index of the evicted prompt
            self._rates.own[rates_row] = 0
            self._new_prompts += 1
            versions = deque([version], maxlen=self.settings.epochs + 1)
            prompt = _Prompt(new_sequence(key, PROMPT), rates_row, versions)
            self._prompts[key] = prompt
        if prompt.versions[-1] < version:
            prompt.versions.append(version)
        in_index = prompt.sequence[0]
        if not is_live(self._pool, in_index["last"]):
            in_index["last"] = -1
            in_index["length"] = 0
            extend(self._pool, prompt.sequence, tokens[None], np.array([length]))
        request = np.zeros(1, REQUEST)
        sequence = new_sequence(key, version)
        for name in SEQUENCE.fields or ():
            request[name] = sequence[name]
        request["last"] = in_index["last"]
        request["length"] = length
        if len(prompt.versions) == prompt.versions.maxlen:
            # in the first epochs of a prompt no response is too old, so that responses to other prompts are used
            request["oldest"] = prompt.versions[0]
        request["tail"] = _tail_of(tokens, length)
        request["rates_row"] = prompt.rates_row
        request["head"] = length
        return request


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
    other = int(request.source == OTHER)
    at = 0
    while request.matched > FIRST_RATES[at][0]:
        at += 1
    return rates.own[request.rates_row, other], rates.all[other, at]


@compiled
def _advance(pool: Pool, batch: _Batch, rates: _Rates, counts: _Counts, matrix: Any, new: Any, ends: Any) -> bool:
    """Compares the predicted tokens with the tokens that vLLM has sampled, updates the acceptance rates, and extends the index.

    The rows of ``batch`` hold the same requests as those of vLLM. Returns whether a draft was verified in the last step.
    """
    verified = False
    for row in range(len(new)):
        request = batch.requests[row]
        if request.length >= 0:
            verified |= _learn(
                request, batch.tokens[row], batch.shares[row], rates, counts, matrix[row], new[row], ends[row]
            )
    extend(pool, batch.requests[: len(new)], matrix, ends)
    return verified


@compiled
def _changed_rows(requests: Any, matrix: Any, new: Any, ends: Any) -> tuple[Any, bool]:
    """Returns the rows that hold another request in ``requests`` than in vLLM, and whether all new tokens are from one step.

    If they are, the duration of this step is the time since the last call.
    """
    is_other = np.zeros(len(new), np.bool_)
    is_one_step = True
    for row in range(len(new)):
        length = requests[row].length
        begin = ends[row] - new[row]
        is_one_step = is_one_step and new[row] > 0 and length == begin
        # the known length is below ``begin`` if vLLM did not call ``propose`` after some steps; 0.29.0 does not call it while
        # a request is within num_speculative_tokens of max_model_len
        if new[row] > 0 and 0 <= length <= begin:
            is_other[row] = requests[row].tail != _tail_of(matrix[row], length)
        else:
            is_other[row] = new[row] > 0 or length >= 0
    return np.flatnonzero(is_other), is_one_step


@compiled
def _learn(
    request: Any, predicted: Any, shares: Any, rates: _Rates, counts: _Counts, tokens: Any, new: int, end: int
) -> bool:
    """Updates rates and counts by the tokens of one request, up to the length ``end``, and forgets what was predicted for them.

    ``new`` is the number of tokens of the last step. Returns whether a draft was verified in it.
    """
    verified = False
    found = request.found
    # tokens that were not proposed count too: they are sampled as often as they would be accepted in a draft, and a
    # rising acceptance rate must be noticed while drafting pauses
    if found > 0:
        length = request.length
        came = end - length
        hits = 0
        while hits < min(found, came) and predicted[hits] == tokens[length + hits]:
            hits += 1
        tries = shares[: min(hits + 1, came, found)].sum()
        own, of_all = _rates_of(rates, request)
        for rate, kept in ((own, 0.95), (of_all, 0.99)):
            rate[0] = kept * rate[0] + hits
            rate[1] = kept * rate[1] + tries
        if request.proposed and came == new:
            verified = True
            counts.by_source[request.source, 0] += request.proposed
            counts.by_source[request.source, 1] += new - 1
    request.found = 0
    request.proposed = 0
    bits = 0
    while end - request.head >= 1 << bits:
        bits += 1
    counts.by_length[bits, 0] += new
    counts.by_length[bits, 1] += 1
    request.tail = _tail_of(tokens, end)
    return verified


@compiled
def _choose(pool: Pool, batch: _Batch, rates: _Rates, matrix: Any, rows: int) -> float:
    """Predicts the next tokens of each request, and writes the number of tokens to propose into the field ``proposed``.

    Returns the number of draft tokens that are expected to be accepted in the next step, summed over requests.
    """
    expected = 0.0
    for row in range(rows):
        request = batch.requests[row]
        shares = batch.shares[row]
        found, matched, source = predict(pool, request, matrix[row], batch.tokens[row], shares)
        request.found = found
        request.matched = matched
        request.source = source
        if found > 0:
            own, of_all = _rates_of(rates, request)
            rate = min(1.0, (own[0] + PRIOR * of_all[0] / of_all[1]) / (own[1] + PRIOR))
            chance = 1.0
            for share in shares[:found]:
                chance *= rate * share
                if chance < FLOOR:
                    break
                request.proposed += 1
                expected += chance
    return expected


@dataclass(slots=True)
class _Sums:
    """Sums over measured steps, in which older steps count less."""

    steps: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0

    def fade(self, kept: float) -> None:
        self.steps *= kept
        self.seconds *= kept
        self.tokens *= kept

    def add(self, seconds: float, tokens: int) -> None:
        self.steps += 1
        self.seconds += seconds
        self.tokens += tokens


@dataclass(slots=True)
class _Measured:
    """Measured steps of one batch size, without drafts and with drafts."""

    plain: _Sums = field(default_factory=_Sums)
    drafted: _Sums = field(default_factory=_Sums)


class _CostModel:
    """Decides whether drafting saves time. Compares the seconds per token of steps with and without drafts, at similar batch sizes.

    Its constants:

    - ``STEPS_PER_PLAIN``: one step in so many has no drafts, only for the comparison. This costs about 3% of the drafts.
    - ``LEAST_PLAIN``, ``LEAST_DRAFTED``: minimum numbers of steps without drafts, and with drafts, for a comparison.
    - ``WINDOW_STEPS``: the weight of a measured step falls to 1 / e after so many further steps.
    - ``PAUSE_STEPS``: number of steps without drafts after a comparison in which drafting did not save time.
    """

    STEPS_PER_PLAIN = 32
    LEAST_PLAIN = 8
    LEAST_DRAFTED = 32
    WINDOW_STEPS = 512
    PAUSE_STEPS = 512

    def __init__(self) -> None:
        self._measured: defaultdict[int, _Measured] = defaultdict(_Measured)  # by batch size
        self._paused: Counter[int] = Counter()
        self._was_logged = False

    def allows(self, rows: int) -> bool:
        """Returns whether the next step, with ``rows`` requests, may have drafts.

        Returns False during a pause, which each call shortens by one step, and for steps that must be measured without drafts.
        """
        size = _about(rows)
        if self._paused[size] > 0:
            self._paused[size] -= 1
            return False
        plain = self._measured[size].plain
        drafted = self._measured[size].drafted
        return plain.steps >= self.LEAST_PLAIN and plain.steps * self.STEPS_PER_PLAIN >= drafted.steps

    def pays(self, rows: int, expected: float) -> bool:
        """Returns whether the next step, with ``rows`` requests, should take no more seconds per token with drafts than without.

        Returns True until LEAST_DRAFTED steps with drafts were measured. ``expected``: expected number of accepted draft tokens in
        the step.
        """
        plain = self._measured[_about(rows)].plain
        drafted = self._measured[_about(rows)].drafted
        if drafted.steps < self.LEAST_DRAFTED:
            return True
        return drafted.seconds / drafted.steps * rows <= plain.seconds / plain.steps * (rows + expected)

    def add(self, rows: int, verified: bool, seconds: float, tokens: int) -> bool:
        """Adds the duration of a step of ``rows`` requests. Returns True if drafting costs time, so that a pause begins now.

        ``verified``: whether the step had drafts. ``seconds``: duration of the step. ``tokens``: number of tokens sampled in it.
        """
        size = _about(rows)
        plain = self._measured[size].plain
        drafted = self._measured[size].drafted
        sums = drafted if verified else plain
        if sums.steps >= self.LEAST_PLAIN:
            seconds = min(seconds, 4 * sums.seconds / sums.steps)  # a longer time means that the engine was idle
        for faded in (plain, drafted):
            faded.fade(1 - 1 / self.WINDOW_STEPS)
        sums.add(seconds, tokens)
        if plain.steps < self.LEAST_PLAIN or drafted.steps < self.LEAST_DRAFTED:
            return False
        with_drafts = drafted.seconds / drafted.tokens
        without = plain.seconds / plain.tokens
        if with_drafts <= without:
            return False
        if not self._was_logged:
            logger.info(
                "no drafts for %d steps with %d requests: %.3g ms a token with drafts, %.3g without (said once)",
                *(self.PAUSE_STEPS, rows, 1000 * with_drafts, 1000 * without),
            )
        self._was_logged = True
        self._paused[size] = self.PAUSE_STEPS
        self._measured[size].drafted = _Sums()
        return True


def _about(rows: int) -> int:
    """Returns the batch size ``rows`` with all but its four highest binary digits set to 0, so that similar sizes count as one."""
    shift = max(0, rows.bit_length() - 4)
    return rows >> shift << shift
