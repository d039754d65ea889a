"""Tests the rollout driver with the real state machine and scheduled workers: one batch per step, no prompt lost or repeated."""

import asyncio
import heapq
import random
import re

import pytest

from rl_accel.errors import ConfigError
from rl_accel.features import TailBatchingFlags
from rl_accel.rollout.round_driver import (
    Event,
    FailureLog,
    FilterLimit,
    FilterRejectsAll,
    PromptSupply,
    ResponseLost,
    RolloutDriver,
)
from rl_accel.rollout.tail_batching import TailBatching, TailRun


class Schedule:
    """Workers whose responses take drawn times. ``stored`` is what lies in the buffer; cancelling takes time as well.

    Every other response that fails or is cancelled has written to the buffer.
    """

    def __init__(self, seed=0, fails=lambda prompt_id: False, metric=lambda prompt_id, response_id: None):
        self.random = random.Random(seed)
        self.time = 0.0
        self.fails, self.metric = fails, metric
        self.stored: set[tuple[int, float | None]] = set()
        self.launched: dict[int, tuple[str, int]] = {}
        self._due: list = []
        self._over: set[int] = set()
        self.discards = 0

    def launch(self, job):
        for response_id in job.response_ids:
            assert job.payload["row"] > 0
            self.launched[response_id] = (job.prompt_id, job.step)
            seconds = self.random.lognormvariate(0, 1)
            tokens = int(100 * seconds) + 1
            if self.fails(job.prompt_id):
                self._at(seconds, Event("failed", response_id, tokens, self._left_by(response_id), error="broken"))
                continue
            self._at(seconds, Event("generated", response_id, tokens))
            result = response_id, self.metric(job.prompt_id, response_id)
            self._at(seconds + self.random.random(), Event("scored", response_id, tokens, result))

    def cancel(self, response_ids):
        for response_id in response_ids:
            if response_id not in self._over:
                self._over.add(response_id)
                event = Event("aborted", response_id, 1, self._left_by(response_id))
                self._at(self.random.random(), event, cancelled=True)

    def begin_round(self):
        assert self.launched.keys() == self._over, "nothing of an earlier round is under way"

    def end_round(self):
        assert self.launched.keys() <= self._over, "the engines are stopped, so all that runs must have been cancelled"

    def wait(self, seconds):
        assert self._due, "the driver waits for ever"
        self.time, _, event, cancelled = heapq.heappop(self._due)
        if not cancelled:
            if event.response_id in self._over:
                return []
            if event.kind != "generated":
                self._over.add(event.response_id)
        if event.result is not None:
            self.stored.add(event.result)
        return [event]

    def outside_engines(self):
        return set()

    def _left_by(self, response_id):
        return (response_id, None) if response_id % 2 else None

    def discard(self, results):
        assert self.launched.keys() == self._over, "what still runs could write later"
        self.discards += 1
        self.stored.difference_update(results)

    def _at(self, delay, event, cancelled=False):
        heapq.heappush(self._due, (self.time + delay, len(self._due) + self.random.random(), event, cancelled))


def varies(prompt_id, group):
    return len({metric for _, metric in group}) > 1


def make(rows=1000, workers=None, filter_groups=False, **flags):
    """A driver over ``rows`` rows an epoch."""
    workers = workers or Schedule()
    core = TailBatching(TailRun(4, 2, TailBatchingFlags(**{"queue_threshold": 3, **flags}), filter_groups))

    def fetch():
        row = supply.fetched + 1
        return {"row": row, "index": (row - 1) % rows}

    supply = PromptSupply(fetch, rows)
    driver = RolloutDriver(core, supply, workers, workers.discard, varies, lambda: workers.time)
    return driver, workers


def train(driver, workers, steps, first=1):
    """Play steps ``first`` to ``steps`` as the trainer does and return the results."""
    results = []
    for step in range(first, steps + 1):
        result = driver.play(step, steps - step + 1)
        assert [i for group in result.batch.groups for i in group.response_ids] == [i for i, _ in result.results]
        assert len(result.results) == len(set(result.results)) == 8
        assert workers.stored == set(result.results), "nothing but the batch is left in the buffer"
        assert workers.discards <= step, "once a step at most"
        for group in result.batch.groups:
            for response_id in group.response_ids:
                assert workers.launched[response_id] == (group.prompt_id, step), "on-policy"
        workers.stored.clear()
        results.append(result)
    return results


def test_a_round_that_begins_early_is_played_later():
    driver, workers = make()
    results = train(driver, workers, 1)
    driver.begin_early(2, 9)
    assert {step for _, step in workers.launched.values()} == {1, 2}
    results += train(driver, workers, 2, first=2)
    assert results[1].round.kind == "long"
    assert results[1].round.responses_cancelled == 0
    assert len({*results[0].trained, *results[1].trained}) == 8


def row_of_id(prompt_id):
    return int(prompt_id.split(":")[1])


def trained(results):
    return [group.prompt_id for result in results for group in result.batch.groups]


@pytest.mark.parametrize("seed", range(5))
def test_short_and_long_rounds_train_every_row_once_an_epoch_under_its_own_id(seed):
    driver, workers = make(rows=10, workers=Schedule(seed))
    results = train(driver, workers, 10)
    assert {result.batch.kind for result in results} >= {"short", "long"}
    assert (driver.supply.fetched, driver.supply.payloads) == (40, {})
    assert sorted(trained(results)) == sorted(f"{epoch}:{row}" for epoch in (1, 2, 3, 4) for row in range(1, 11))
    for result in results:  # with the data set's own index
        assert result.trained == {group.prompt_id: row_of_id(group.prompt_id) - 1 for group in result.batch.groups}


def test_a_constant_group_is_rejected_and_replaced_until_the_batch_is_full():
    def metric(prompt_id, response_id):
        return 1.0 if row_of_id(prompt_id) % 8 == 0 else float(response_id)

    driver, workers = make(workers=Schedule(metric=metric), filter_groups=True, queue_threshold=2)
    results = train(driver, workers, 20)
    ids = trained(results)
    assert len(ids) == len(set(ids)) == 80
    assert all(row_of_id(prompt_id) % 8 for prompt_id in ids)
    rejected = [prompt_id for result in results for prompt_id in result.rejected]
    assert len(rejected) == sum(result.round.prompts_rejected for result in results) >= 9
    assert sorted(ids + rejected, key=row_of_id) == [f"1:{row}" for row in range(1, len(ids + rejected) + 1)]
    assert {result.batch.kind for result in results} >= {"short", "long"}


@pytest.mark.parametrize("row", [1, 2, 4, 22, 23, 24])
def test_a_broken_prompt_is_retried_then_given_up_and_all_batches_are_full_up_to_the_end_of_the_run(row):
    broken = f"1:{row}"
    driver, workers = make(workers=Schedule(fails=lambda prompt_id: prompt_id == broken))
    results = train(driver, workers, 6)
    assert broken not in trained(results)
    assert len(set(trained(results))) == 24
    assert sum(result.round.prompts_failed for result in results) == 1
    assert [result.failed for result in results if result.failed] == [{broken: row - 1}]
    assert [result.errors for result in results if result.errors] == [{broken: "broken"}]
    assert driver.supply.payloads == {}
    attempts = [response_id for response_id, (prompt_id, _) in workers.launched.items() if prompt_id == broken]
    assert len(attempts) <= 2 * 3 * 3, "in two rounds at most, three responses, each started again twice at most"


def rejects(rows=10, filter_limit=None, passing=()):
    """A driver whose group filter rejects all prompts but those of the rows ``passing``, and which stops after five epochs."""

    def metric(prompt_id, response_id):
        assert driver.supply.fetched < 5 * rows, "nothing ends the run"
        return float(response_id) if row_of_id(prompt_id) in passing else 1.0

    driver, _ = make(rows=rows, workers=Schedule(metric=metric), filter_groups=True)
    driver._filter_limit = filter_limit
    return driver


def test_a_filter_that_rejects_every_group_is_told_after_an_epoch_and_ends_the_run_after_two(caplog):
    driver = rejects()
    with pytest.raises(FilterRejectsAll, match="rejected 20 prompts one after the other, two epochs of the data"):
        driver.play(1, 1000)
    assert [record.levelname for record in caplog.records if "a whole epoch" in record.message] == ["WARNING"]
    assert driver.supply.fetched < 30


def test_a_filter_that_accepts_two_rows_of_the_data_goes_on(caplog):
    result = rejects(rows=40, passing={3, 23}).play(1, 1000)
    assert {row_of_id(prompt_id) for prompt_id in result.trained} == {3, 23}
    assert not [line for line in caplog.messages if "a whole epoch" in line]


def test_the_users_limit_on_prompts_that_are_filtered_in_a_step_holds(caplog):
    driver = rejects(filter_limit=FilterLimit(6, "max_num_gen_batches = 2"), passing={1, 2})
    with pytest.raises(
        FilterRejectsAll, match=r"^rl_accel.*: . of \d+ prompts .* a batch needs 4, and max_num_gen_batches = 2"
    ):
        driver.play(1, 1000)
    enough = rejects(filter_limit=FilterLimit(6, "max_num_gen_batches = 2"), passing=range(1, 11))
    assert len(enough.play(1, 1000).trained) == len(enough.play(2, 999).trained) == 4


def test_ratios_that_rounding_changes_are_said_at_the_start(caplog):
    flags = TailBatchingFlags()
    for prompts, responses in ((8, 4), (7, 1)):
        RolloutDriver(TailBatching(TailRun(prompts, responses, flags)), None, None, None)
    assert caplog.messages == ["rl-accel: tail_batching.response_ratio=1.25 launches 2 for 1, which is 2.00 times"]


def test_the_level_debug_shows_events_and_decisions_in_short_lines(caplog):
    driver, workers = make()
    train(driver, workers, 1)
    assert "response 1:" not in caplog.text, "off by default"
    caplog.set_level("DEBUG", "rl_accel")
    train(driver, workers, 2, first=2)
    assert any(re.match(r"rl-accel: response \d+: scored, \d+ tokens", line) for line in caplog.messages)
    assert any(line.startswith("rl-accel: step 2: TrainBatch(") for line in caplog.messages)
    assert max(map(len, caplog.messages)) < 250


def test_when_everything_fails_the_last_error_comes_out():
    driver, _ = make(workers=Schedule(fails=lambda prompt_id: True))
    with pytest.raises(RuntimeError, match="4 prompts failed one after the other; last error: broken"):
        driver.play(1, 3)


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_resumed_run_goes_on_without_loss_or_repetition(stop):
    driver, _ = make(rows=13)
    before = [driver.play(step, 12 - step + 1) for step in range(1, stop + 1)]
    state, payloads, fetched = driver.core.state_dict(), dict(driver.supply.payloads), driver.supply.fetched
    again, fresh = make(rows=13, workers=Schedule(seed=99))
    again.core.load_state_dict(state)
    again.supply.restore(fetched, payloads)
    ids = trained(before) + trained(train(again, fresh, 12, first=stop + 1))
    assert len(ids) == len(set(ids)) == 48
    assert again.supply.payloads == {}


def test_every_number_has_a_name_that_verl_reduces_as_meant():
    driver, workers = make()
    result = train(driver, workers, 1)[0]
    numbers = result.metrics()
    assert all(name.startswith("rl_accel/tail_batching/") for name in numbers)
    # verl chooses the reduction of a metric by these parts of its name.
    assert not [name for name in numbers for part in ("max", "min", "sum", "total") if part in name]
    assert numbers["rl_accel/tail_batching/prompts_trained"] == 4.0
    assert numbers["rl_accel/tail_batching/short_round"] + numbers["rl_accel/tail_batching/final_round"] == 1.0
    assert all(isinstance(value, float) for value in numbers.values())


def test_an_error_of_the_configuration_ends_the_run_at_once_in_one_line(caplog):
    async def fail(cause):
        task = asyncio.get_running_loop().create_future()
        task.set_exception(cause)
        return FailureLog().event_of(0, task, 7, None, cancelled=False)

    event = asyncio.run(fail(ConfigError("rl_accel.reward_timeout.grader wants a function, found 'a.b'\nand more")))
    driver, workers = make()
    workers.wait = lambda seconds: [event]
    with pytest.raises(ConfigError, match=r"^rl_accel\.reward_timeout\.grader wants a function, found 'a\.b'$"):
        driver.play(1, 3)
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]


class ServerDied(ResponseLost):
    pass


def test_a_failed_response_is_one_line_and_its_traceback_comes_once_for_each_kind(caplog):
    async def end_all(*errors):
        log = FailureLog()
        tasks = [asyncio.get_running_loop().create_future() for _ in errors]
        for task, error in zip(tasks, errors, strict=True):
            task.set_exception(error)
        return [log.event_of(number, task, 7, None, cancelled=False) for number, task in enumerate(tasks)]

    events = asyncio.run(end_all(OSError("gone"), OSError("gone again"), ServerDied("x")))
    assert [event.error for event in events] == ["OSError: gone", "OSError: gone again", "ServerDied: x"]
    assert [event.lost for event in events] == [False, False, True]
    assert {(event.kind, event.tokens) for event in events} == {("failed", 7)}
    assert [bool(record.exc_info) for record in caplog.records] == [True, False, True]
    assert "response 1 failed: OSError: gone again" in caplog.messages[1]


class Hanging(Schedule):
    """Rewards of the first prompt and the second prompt's responses do not come before the driver has waited in vain."""

    def launch(self, job):
        super().launch(job)
        row = row_of_id(job.prompt_id)
        self.late = [due for due in self._due if self.launched[due[2].response_id][0] in ("1:1", "1:2")]
        if row == 5:
            self.late = [due for due in self.late if (due[2].kind, due[2].response_id // 3) != ("generated", 0)]
            self._due = sorted(set(self._due) - set(self.late))

    def wait(self, seconds):
        while self._due:
            if events := super().wait(seconds):
                return events
        self.time, self._due = self.time + 100, self.late
        return []

    def outside_engines(self):
        return {3, 4}


def test_a_line_says_which_prompts_are_waited_for_since_when_and_for_what(caplog):
    caplog.set_level("INFO", "rl_accel")
    driver, _ = make(workers=Hanging())
    driver.play(1, 100)
    (line,) = [line for line in caplog.messages if "waits for" in line]
    assert re.fullmatch(
        r"rl-accel: tail batching waits for "
        r"2 responses in a tool or another part of the agent loop, of prompts 1:2, the oldest for 10\d s; "
        r"1 responses being generated, of prompts 1:2, the oldest for 10\d s; "
        r"2 responses being scored, of prompts 1:1, the oldest for 10\d s",
        line,
    )
