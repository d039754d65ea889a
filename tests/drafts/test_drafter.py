"""Tests the drafter as vLLM calls it: rows move, requests end, are preempted and return; drafts hold only tokens of the data."""

import random
import re
from collections import Counter, defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest

from rl_accel.drafts import index
from rl_accel.drafts.drafter import FIRST_RATES, FLOOR, PRIOR, Drafter
from rl_accel.drafts.index import BLOCK, CANDIDATES, CONTEXT, GRAM, OTHER, PROMPT, SOURCES, bucket_of, key_of, make_pool

LENGTH = 110
END = 1
STORY = [*range(100, 200)]
"""A response of 100 different tokens."""
Token = Request = Prompt = SimpleNamespace


def config(rank=0, executor="mp", **settings):
    ranks = {"rank": rank, "tensor_parallel_size": 2, "prefill_context_parallel_size": 1}
    return SimpleNamespace(
        additional_config={"rl_accel_drafts": {"memory_mb": 1, **settings}},
        speculative_config=SimpleNamespace(num_speculative_tokens=8),
        parallel_config=SimpleNamespace(distributed_executor_backend=executor, **ranks),
    )


def finished(prompt, response, version=0):
    """A response as a drafter hands it on."""
    return np.array([version, len(prompt), *prompt, *response], np.int32).tobytes()


def read(response):
    """Version, prompt and response of what :func:`finished` makes."""
    version, length, *tokens = np.frombuffer(response, np.int32).tolist()
    return version, tokens[:length], tokens[length:]


class Engine:
    """What vLLM's runner does around the drafter, with responses that are known beforehand: greedy decoding of a fixed model.

    Rows hold ids of requests, which the drafter never sees. A prefill that is not complete samples nothing.
    """

    def __init__(self, length=LENGTH, compares=False, **settings):
        """``compares``: with steps without drafts, now and then, so that drafting stops where it costs more than it gives."""
        self.now = 0.0
        self.drafter = Drafter(config(**settings), lambda: self.now)
        if not compares:
            self.drafter._costs.allows = self.drafter._costs.pays = lambda *_: True
        self.matrix = np.zeros((64, length), np.int32)
        self.ends = np.zeros(64, np.int64)
        self.rows: list[int] = []
        self.tokens: dict[int, list[int]] = {}
        self.truth: dict[int, list[int]] = {}
        self.drafts: dict[int, list[int]] = {}
        self.sampled: list[list[int]] = []

    def start(self, prompt, response):
        number = len(self.tokens)
        self.tokens[number], self.truth[number] = list(prompt), list(prompt) + list(response)
        self.rows.append(number)
        return number

    def finished(self):
        return [number for number in self.rows if len(self.tokens[number]) == len(self.truth[number])]

    def step(self, seconds=1.0, prefilling=(), unseen=False):
        """One step of all rows. ``unseen``: vLLM does not call the drafter, as near max_model_len."""
        self.sampled = []
        for row, number in enumerate(self.rows):
            at, draft = len(self.tokens[number]), self.drafts.pop(number, [])
            left = self.truth[number][at:]
            equal = [guess == token for guess, token in zip(draft, left[:-1], strict=False)]
            new = [] if row in prefilling else left[: 1 + (equal.index(False) if False in equal else len(equal))]
            self.tokens[number] += new
            self.matrix[row] = -7  # what lies behind the end means nothing
            self.matrix[row, : len(self.tokens[number])] = self.tokens[number]
            self.ends[row] = len(self.tokens[number])
            self.sampled.append(new)
        self.now += seconds
        if unseen:
            return []
        drafts = self.drafter.propose(self.sampled, self.ends, self.matrix, slot_mappings=None)
        assert len(drafts) == len(self.rows)
        for number, new, draft in zip(self.rows, self.sampled, drafts, strict=True):
            assert new or not draft
            assert not draft or len(self.tokens[number]) + len(draft) < self.matrix.shape[1]
            self.drafts[number] = draft
        return drafts

    def play(self, seconds=lambda verifies: 1.0, to_first=False):
        """Step until all, or the first, are finished; return the number of draft tokens that each step verified."""
        verified = []
        while self.rows:
            verified.append(sum(len(self.drafts.get(number, [])) for number in self.rows))
            self.step(seconds(verified[-1] > 0))
            finished = self.finished()
            self.rows = [] if to_first and finished else [number for number in self.rows if number not in finished]
        return verified

    def respond(self, prompt, response, **how):
        self.start(prompt, response)
        return self.play(**how)


def sequence(key, visit, oldest=0, last=None, length=0):
    return SimpleNamespace(key=key, visit=visit, oldest=oldest, last=last, length=length)


class ObviousIndex:
    """What the functions of :mod:`rl_accel.drafts.index` do."""

    def __init__(self, blocks: int, buckets: int) -> None:
        self.blocks, self.buckets = blocks, buckets
        self.sizes: list[int] = []  # of all blocks ever
        self.chains: dict[tuple[int, int], list[Token]] = defaultdict(list)

    def holds(self, token):
        return token is not None and token.block >= len(self.sizes) - self.blocks

    def extend(self, text, tokens, end):
        for at in range(text.length, end):
            last = text.last
            goes_on = self.holds(last) and last.text is text
            if not goes_on or self.sizes[last.block] == BLOCK:
                self.sizes.append(0)
                block = len(self.sizes) - 1
            else:
                block = last.block
            token = Token(value=int(tokens[at]), before=last, text=text, block=block, after=None)
            self.sizes[block] += 1
            if goes_on:
                last.after = token
            if at >= GRAM:
                for chain in (0, 1):
                    self.chains[chain, bucket_of(chain, text.key, tokens, at, self.buckets)].append(token)
            text.last = token
        text.length = end

    def places(self, text, tokens, context, others):
        """The length of the longest match, and the newest places that have it."""
        places = []
        chain = self.chains[int(others), bucket_of(int(others), text.key, tokens, len(context), self.buckets)]
        for token in chain[: -CANDIDATES - 1 : -1]:
            if not self.holds(token):
                break
            length, before = 0, token.before
            while self.holds(before) and length < min(CONTEXT, len(context)) and before.value == context[-1 - length]:
                length, before = length + 1, before.before
            result = token.text
            if length >= GRAM and (result.key != text.key) == others and result.visit >= text.oldest:
                places.append((length, token))
        longest = max((length for length, _ in places), default=0)
        return longest, [token for length, token in places if length == longest]

    def lookup(self, text, tokens, limit):
        """Tokens, shares, how many are the same, and the source; None if nothing is."""
        context, limit = tokens[: text.length].tolist(), min(limit, len(tokens) - 1 - text.length)
        if len(context) < GRAM or limit < 1:
            return None
        results = [self.places(text, tokens, context, others) for others in (False, True)]
        others = results[1][0] > results[0][0]
        longest, voters = results[others]
        if not voters:
            return None
        newest = voters[0].text
        own = newest is text or newest.visit == PROMPT
        source = OTHER if others else 0 if own else 1 if newest.visit == text.visit else 2
        voters = [(1 / (1 + rank), token) for rank, token in enumerate(voters)]
        results, shares = [], []
        while voters and len(results) < limit:
            votes = defaultdict(float)
            for weight, token in voters:
                votes[token.value] += weight
            chosen = max(votes, key=votes.get)
            results.append(chosen)
            shares.append(votes[chosen] / sum(weight for weight, _ in voters))
            voters = [(w, t.after) for w, t in voters if t.value == chosen and self.holds(t.after)]
        return results, shares, longest, source


class ObviousDrafter:
    """The slow, obvious one: it is told which request is in which row, and looks things up in linked Python objects."""

    def __init__(self, settings, obvious_index):
        self.index, self.settings = obvious_index, settings
        self.requests, self.prompts, self.version, self.counts = {}, {}, 0, Counter()
        self.rates = [[[most, 8 * rate, 8] for most, rate in FIRST_RATES] for _ in range(2)]

    def begin(self, tokens, begin):
        key = key_of(tokens[:begin])
        prompt = self.prompts.get(key)
        if prompt is None:
            versions = deque([self.version], self.settings["epochs"] + 1)
            rates = [[0.0, 0.0], [0.0, 0.0]]
            prompt = self.prompts[key] = Prompt(text=sequence(key, PROMPT), versions=versions, rates=rates)
        if prompt.versions[-1] < self.version:
            prompt.versions.append(self.version)
        if not self.index.holds(prompt.text.last):
            prompt.text.last, prompt.text.length = None, 0
            self.index.extend(prompt.text, tokens, begin)
        oldest = prompt.versions[0] if len(prompt.versions) == prompt.versions.maxlen else 0
        text = sequence(key, self.version, oldest, prompt.text.last, begin)
        return Request(text=text, prompt=prompt, head=begin, match=None, proposed=0)

    def all_rates(self, match):
        return next(rate for rate in self.rates[match[3] == OTHER] if match[2] <= rate[0])

    def propose(self, ids, sampled, ends, matrix):
        rows = [row for row, new in enumerate(sampled) if new]
        for number in self.requests.keys() - {ids[row] for row in rows} if sampled else ():
            self.requests[number].proposed = 0  # vLLM drops the draft of a request that it preempts
        for row in rows:
            if ids[row] not in self.requests:
                self.requests[ids[row]] = self.begin(matrix[row], int(ends[row]) - len(sampled[row]))
        for row in rows:
            self.learn(self.requests[ids[row]], sampled[row], matrix[row])
        for row in rows:
            self.index.extend(self.requests[ids[row]].text, matrix[row], int(ends[row]))
        self.counts["steps"] += bool(sampled)
        drafts = [[] for _ in sampled]
        for row in rows if len(sampled) <= self.settings["batch_limit"] else ():
            request = self.requests[ids[row]]
            request.match = self.index.lookup(request.text, matrix[row], 8)
            if request.match is not None:
                request.proposed = self.choose(request, request.match)
                drafts[row] = request.match[0][: request.proposed]
        return drafts

    def learn(self, request, new, tokens):
        if request.match is not None:
            guesses, shares, _, source = request.match
            came = tokens[request.text.length :][: len(new)].tolist()
            hits = next((at for at, (a, b) in enumerate(zip(guesses, came, strict=False)) if a != b), None)
            hits = min(len(guesses), len(came)) if hits is None else hits
            tries = 0.0
            for share in shares[: min(hits + 1, len(came))]:
                tries += share
            for rates, kept in ((request.prompt.rates[source == OTHER], 0.95), (self.all_rates(request.match), 0.99)):
                rates[-2:] = kept * rates[-2] + hits, kept * rates[-1] + tries
            if request.proposed:
                for name, value in (("drafted", request.proposed), ("accepted", len(new) - 1)):
                    self.counts[name] += value
                    self.counts[f"{name}_{SOURCES[source]}"] += value
            request.match, request.proposed = None, 0
        since = 1 << ((request.text.length + len(new) - request.head).bit_length() - 1)
        self.counts["tokens"] += len(new)
        self.counts[f"tokens_from_{since}"] += len(new)
        self.counts[f"row_steps_from_{since}"] += 1

    def choose(self, request, match):
        (own_hits, own_tries), (_, hits, tries) = request.prompt.rates[match[3] == OTHER], self.all_rates(match)
        rate, chance = min(1.0, (own_hits + PRIOR * hits / tries) / (own_tries + PRIOR)), 1.0
        for count, share in enumerate(match[1]):
            chance *= rate * share
            if chance < FLOOR:
                return count
        return len(match[1])


def response(rng, alike, length):
    """A response that has stretches of ``alike``."""
    tokens = []
    while len(tokens) < length:
        at = rng.randrange(len(alike))
        tokens += alike[at : at + rng.randrange(20)] or [rng.randrange(2, 9)]
        tokens.append(rng.randrange(2, 9))
    return tokens[:length]


@pytest.mark.parametrize("seed", [*range(9), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(9, 20))])
def test_random_interleavings_draft_as_the_obvious_drafter_and_only_what_is_in_the_data(seed):
    """500 steps, each with requests that come, end, are aborted, are preempted, come back or move, and new weights."""
    rng = random.Random(seed)
    blocks, pool = (15, 60, 400)[seed % 3], make_pool(1)  # so few that they are used again and again
    pool = pool._replace(tokens=pool.tokens[: blocks * BLOCK].copy(), blocks=pool.blocks[:blocks].copy())
    settings = {"batch_limit": 10, "epochs": seed // 3 % 3}
    engine = Engine(**settings)
    drafter = engine.drafter
    drafter._pool = pool
    obvious = ObviousDrafter(settings, ObviousIndex(blocks, pool.buckets.shape[1]))
    prompts = [[rng.randrange(2, 9) for _ in range(rng.randrange(1, 50))] for _ in range(4)]
    alike = [[rng.randrange(2, 9) for _ in range(90)] for _ in prompts]
    waiting, happened = [], Counter()
    for _ in range(500):
        event = rng.choice(("start", "start", "abort", "preempt", "resume", "move", "weights", ""))
        if event == "start" and len(engine.rows) < 14:
            which = rng.randrange(4)
            new = [rng.randrange(10, 10**6), *response(rng, alike[which], rng.randrange(1, 90)), END]
            engine.start(prompts[which], new[: LENGTH - len(prompts[which])])  # some end where the matrix does
        elif event == "abort" and engine.rows:
            engine.rows.pop(rng.randrange(len(engine.rows)))
        elif event == "preempt" and engine.rows:
            waiting.append(engine.rows.pop(rng.randrange(len(engine.rows))))
            engine.drafts.pop(waiting[-1], None)
        elif event == "resume" and waiting:
            engine.rows.append(waiting.pop(rng.randrange(len(waiting))))
        elif event == "move":
            rng.shuffle(engine.rows)
        elif event == "weights" and rng.random() < 0.2:
            drafter.new_weights()
            obvious.version += 1
        ready = [row for row, number in enumerate(engine.rows) if engine.drafts.get(number) == []]
        drafts = engine.step(prefilling=rng.sample(ready, min(1, len(ready))))
        assert drafts == obvious.propose(engine.rows, engine.sampled, engine.ends, engine.matrix)
        for number, draft in zip(engine.rows, drafts, strict=True):
            if draft:
                happened["draft"] += 1
                wanted = engine.tokens[number][-GRAM:] + draft
                assert any(contains(tokens, wanted) for tokens in engine.tokens.values())
        assert not any(drafts) or len(engine.rows) <= 10
        happened["crowd"] += len(engine.rows) > 10
        for number in engine.finished():
            engine.rows.remove(number)
    assert happened["draft"] > 100
    assert happened["crowd"] > 0
    counts = drafter.take_counts()
    assert counts == obvious.counts  # of Counters, what is 0 may be missing
    assert all(counts[f"accepted_{source}"] for source in SOURCES)
    taken = [prompt + tokens for _, prompt, tokens in map(read, drafter.take_finished())]
    assert taken or blocks == 15, "in so few a response is hardly ever whole"
    assert all(any(tokens[: len(one)] == one for tokens in engine.tokens.values()) for one in taken)


def contains(tokens, wanted):
    return any(tokens[at : at + len(wanted)] == wanted for at in range(len(tokens) - len(wanted) + 1))


def test_drafts_that_are_always_wrong_shrink_to_nothing_and_come_back_when_they_would_be_right():
    rng, engine = random.Random(0), Engine(length=2100)
    words = [[rng.randrange(2, 50) for _ in range(3)] for _ in range(500)]
    # each word was seen once, and what follows it is never what followed it then
    first, second = ([token for word in words for token in (*word, 100 + rng.randrange(10**6))] for _ in range(2))
    engine.respond([5, 6, 7], first)
    wrong = engine.respond([5, 6, 7], second)
    assert 0 < sum(wrong) < 40
    assert sum(wrong[200:]) == 0
    assert len(engine.respond([5, 6, 7], second)) < 1000


def test_responses_of_an_earlier_run_are_of_their_epochs_and_help_the_first_rank_of_a_group():
    other = [1000 + n for n in range(100)]
    helped = []
    for settings in (*({"epochs": epochs} for epochs in range(3)), *({"rank": rank} for rank in range(4))):
        engine = Engine(**settings)
        engine.drafter.absorb([finished([5, 6, 7], STORY, version=8), finished([5, 6, 7], other, version=9)])
        engine.drafter.new_weights()
        helped.append(len(engine.respond([5, 6, 7], STORY)) < 40)
    assert helped == [False, False, True, True, False, True, False]


@pytest.mark.parametrize(
    ("rows", "followed", "dear", "pays"),
    [(1, 1, 1.5, True), (1, 1, 20.0, False), (8, 1, 1.05, True), (8, 8, 3.0, True), (8, 1, 3.0, False)],
)
def test_drafting_stops_with_a_line_where_it_does_not_pay_for_the_whole_step(caplog, rows, followed, dear, pays):
    """Of one or eight requests so many have a response to follow. If verifying takes two steps more, that is too much for one."""
    caplog.set_level("INFO")
    rng, engine = random.Random(0), Engine(compares=True, batch_limit=8)
    verified = []
    while len(verified) < 3000:
        for row in range(rows):
            other = [rng.randrange(1000, 10**6) for _ in STORY]
            engine.start([5, 6, 7], STORY if row < followed else other)
        verified += engine.play(lambda verifies: dear if verifies else 1.0, to_first=True)
    share = sum(tokens > 0 for tokens in verified[200:]) / len(verified[200:])
    said = sum("no drafts for" in record.message for record in caplog.records)
    stopped = engine.drafter.take_counts()["stopped"]
    if pays:
        # each response's first two steps cannot have drafts
        assert (share > 0.75, stopped, said) == (True, 0, 0)
    else:
        assert (0.01 < share < 0.1, stopped >= 2, said) == (True, True, 1)


def test_rows_that_went_on_unseen_are_known_again():
    engine = Engine()
    engine.start([5, 6, 7], STORY)
    for at in range(100):
        engine.step(unseen=at % 3 == 1)
    engine.rows = []
    engine.drafter.new_weights()
    _, prompt, tokens = read(*engine.drafter.take_finished())
    assert (prompt, tokens) == ([5, 6, 7], STORY[: len(tokens)])
    assert len(tokens) >= 99


def test_finished_responses_are_taken_once_and_help_elsewhere():
    engine, elsewhere = Engine(), Engine()
    here, first = engine.drafter, engine.start([5, 6, 7], STORY)
    engine.start([5, 6, 7], STORY[50:])
    for _ in range(20):
        engine.step()
    engine.rows.remove(first)
    engine.step()
    (taken,) = here.take_finished()
    version, prompt, tokens = read(taken)
    assert (version, prompt, tokens) == (0, [5, 6, 7], STORY[: len(tokens)])
    assert here.take_finished() == []
    engine.rows.append(first)  # it was preempted
    engine.play()
    here.new_weights()
    (left,) = here.take_finished()  # the other one has been taken
    assert read(left) == (0, [5, 6, 7], STORY[50:])
    elsewhere.drafter.absorb([taken])
    assert len(elsewhere.respond([5, 6, 7], STORY[: len(tokens)])) < len(tokens) / 3


def test_prompts_that_are_long_gone_are_forgotten():
    engine = Engine()
    for number in range(5000):
        engine.drafter.absorb([finished([number] * 30, [1] * 30), finished([5, 6, 7], STORY[:4])])
    assert len(engine.drafter._prompts) < 500
    engine.respond([5, 6, 7], STORY)
    assert len(engine.respond([5, 6, 7], STORY)) < 25


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"memory_mb": 0.5}, ValueError, r"memory_mb must be at least 1, found 0\.5"),
        ({"memory": 3}, TypeError, "memory"),
        ({"executor": "external_launcher"}, ValueError, "found 'external_launcher'"),
    ],
)
def test_wrong_settings_and_a_wrong_matrix_are_refused(settings, error, said):
    with pytest.raises(error, match=said):
        Drafter(config(**settings))
    for wrong, found in ((np.zeros(10, np.int32), "int32[10]"), (np.zeros((2, 10), np.float32), "float32[2, 10]")):
        with pytest.raises(ValueError, match=re.escape(f"must be int32[rows, max_model_len], found {found}")):
            Drafter(config()).propose([[1]], np.array([5]), wrong)


@pytest.mark.parametrize("memory_mb", [1, 1.5, 7, 64, 200])
def test_memory_of_the_index_is_what_was_asked_for_and_does_not_grow(memory_mb):
    pool = make_pool(memory_mb)
    before = sum(array.nbytes for array in pool)
    assert 0.8 * memory_mb < before / 2**20 <= memory_mb
    tokens = np.arange(100_000, dtype=np.int32)
    sequences = [index.new_sequence(key, 0) for key in range(3)]
    for one in sequences:
        index.extend(pool, one, tokens[None], np.array([100_000]))
    assert sum(array.nbytes for array in pool) == before
    assert (index.tokens_of(pool, sequences[0][0]) is None) == (memory_mb < 7)
    assert memory_mb < 7 or index.tokens_of(pool, sequences[1][0]).tolist() == tokens.tolist()


def test_the_key_of_a_prompt_is_the_same_in_every_process():
    assert key_of(np.array([5, 6, 7], np.int32)) == 4842055968956316786
