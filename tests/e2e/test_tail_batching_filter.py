"""Group filtering (DAPO) in short and long rounds, while some agent loops fail always, some once, and one takes its process with
it. Of every prompt that was begun the ledger says what became of it."""

import pytest

pytestmark = [pytest.mark.timeout(900)]

P0, R0, STEPS = 4, 2, 7
ALWAYS, ONCE, KILLS = (1, 10), (5, 13), 8
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    wanted = str.isdigit if ground_truth == "digits" else str.isalpha
    share = sum(map(wanted, solution_str)) / max(len(solution_str), 1)
    # What the filter looks at: as good as different for each response, except for the rows named.
    return {"score": share, "signal": 0.5 if extra_info["index"] % 5 == 2 else hash(solution_str) % 10**6 / 10**6}
"""


@pytest.fixture(scope="module")
def left(tail_run):
    loops = [
        {"name": name, "_target_": "tail_batching_loops.Fails", "folder": "{out}", "once": name == "fails_once"}
        for name in ("fails_always", "fails_once")
    ]
    loops.append({"name": "kills_worker", "_target_": "tail_batching_loops.KillsWorker", "folder": "{out}"})

    def agent_name(index):
        if index in ALWAYS:
            return "fails_always"
        if index == KILLS:
            return "kills_worker"
        return "fails_once" if index in ONCE else "single_turn_agent"

    return tail_run(
        "filtered",
        STEPS,
        (P0, R0),
        "algorithm.adv_estimator=grpo",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=signal",
        "trainer.test_freq=3",
        "data.gen_batch_size=2",
        "+rl_accel.tail_batching.prompt_ratio=1.5",
        "+rl_accel.tail_batching.queue_threshold=2",
        loops=loops,
        agent_name=agent_name,
        reward=REWARD,
    )


def test_batches_are_full_in_short_and_long_rounds(left):
    # What a worker had stored and not yet reported when it died is found and cleared.
    left.assert_sound(STEPS, P0, ghosts=True)
    assert {line["kind"] for line in left.ledger} >= {"short", "long"}


def test_of_every_prompt_begun_the_ledger_says_once_what_became_of_it(left):
    trained, rejected, failed = (left.settled(how) for how in ("trained", "rejected", "failed"))
    assert len(trained) == P0 * STEPS
    begun = len(trained) + len(rejected) + len(failed)
    lines = [prompt_id for line in left.ledger for how in ("trained", "rejected", "failed") for prompt_id in line[how]]
    # Prompts are numbered as they are taken, so without a gap none was lost.
    assert sorted(lines, key=lambda prompt_id: int(prompt_id.split(":")[1])) == [f"1:{n + 1}" for n in range(begun)]


def test_groups_without_signal_are_rejected_and_no_others(left):
    rejected = set(left.settled("rejected").values())
    assert rejected == {row for row in range(max(rejected) + 1) if row % 5 == 2}
    assert not [row for row in left.settled("trained").values() if row % 5 == 2]
    assert [len(line["rejected"]) for line in left.ledger] == left.numbers("tail_batching/prompts_rejected")


def test_a_setting_that_rounds_replace_is_named(left):
    assert left.log.count("tail_batching replaces data.gen_batch_size = 2 by 1: rounds take single prompts") == 1


def test_a_loop_that_always_fails_is_reported_after_its_retries_and_not_trained(left):
    assert set(left.settled("failed").values()) == set(ALWAYS)
    errors = {prompt_id: error for line in left.ledger for prompt_id, error in line["errors"].items()}
    assert errors == {f"1:{row + 1}": f"RuntimeError: no tool for row {row}" for row in ALWAYS}
    assert left.log.count("failed after its last retry and is not trained") == len(ALWAYS)
    assert [len(line["failed"]) for line in left.ledger] == left.numbers("tail_batching/prompts_failed")


def test_a_loop_that_fails_once_is_retried_and_trained(left):
    assert set(ONCE) <= set(left.settled("trained").values())
    for row in ONCE:
        assert left.log.count(f"no tool for row {row}\n") >= 1


def test_an_agent_loop_worker_that_dies_is_done_without_in_training_and_validation(left):
    assert left.log.count("responses are lost with it") == 1
    assert KILLS in left.settled("trained").values()
    assert left.validated == [3, 6, STEPS]
