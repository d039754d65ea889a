"""Tests rewards under adaptive time limits in slime's own reward functions and rollouts. Needs a checkout in SLIME_ROOT."""

import asyncio
import contextlib
import json
import threading
from collections import Counter
from types import SimpleNamespace

import psutil
import pytest

import rl_accel
from rl_accel.errors import ConfigError
from rl_accel.features import TAIL_BATCHING
from rl_accel.integrations.slime.custom_config import SLIME_ARGUMENTS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("end_grading")]

GRADERS = "slime_test_graders"
FAST = {"enable": True, "maximum": 3.0, "minimum": 0.5, "slack": 0.2, "min_correct": 2, "probe_share": 0.0}


@pytest.fixture
def sample_of(slime_root):
    """``sample_of(**metadata)``: a complete sample; those of the same prompt differ in index alone."""
    from slime.utils.types import Sample

    numbers = iter(range(10_000))

    def make(prompt="a prompt", label="1", response="\\boxed{1}", **metadata):
        sample = Sample(index=next(numbers), prompt=prompt, label=label, response=response, metadata=metadata)
        sample.status = Sample.Status.COMPLETED
        return sample

    return make


@pytest.fixture
def judged(end_grading):
    """``judged(grader="plain", rm_type=None, **flags)`` returns ``judge(sample or list)``, which goes through slime's own functions
    on slime's event loop. The one before it ends."""
    from slime.rollout.rm_hub import async_rm, batched_async_rm
    from slime.utils.async_utils import run

    def make(grader=None, rm_type=None, arguments=None, **flags):
        end_grading()
        path = f"{GRADERS}.{grader}" if grader else None
        unset = dict.fromkeys(("rm_url", "reward_key", "eval_reward_key", "save"))
        args = SimpleNamespace(rm_type=rm_type, rm_note="a note", unpicklable=threading.Lock(), **unset)
        args.rl_accel = {"reward_timeout": {**FAST, "grader": path, **flags}}
        args.__dict__.update({**SLIME_ARGUMENTS["reward_timeout"], **(arguments or {})})

        def judge(given):
            return run((batched_async_rm if isinstance(given, list) else async_rm)(args, given))

        judge.args, judge.stock, judge.run = args, async_rm, run
        return judge

    return make


_counted: dict[str, dict[str, float]] = {}


def _since(anchors):
    """What was counted since the last call."""
    before = _counted.get(anchors.process, {})
    _counted[anchors.process] = dict(anchors.totals)
    found = {name: amount - before.get(name, 0.0) for name, amount in anchors.totals.items()}
    return {name: amount for name, amount in found.items() if amount}


def counts():
    from rl_accel.integrations.slime.reward_timeout.rm_hook import OPEN

    (grading,) = OPEN.values()
    return Counter({**_since(grading.anchors), "anchors": len(grading.anchors.timeout)})


@pytest.fixture
def gone(gone, wait_for):
    """``gone(folder)`` waits until the processes that graders have left word of there have ended."""

    def wait(folder):
        pids = [int(part) for file in folder.iterdir() for part in file.name.split("-")]
        assert pids, "nothing has begun to hang"
        return wait_for(lambda: all(map(gone, pids)), "the end of graders")

    return wait


def test_off_ends_what_grades_and_later_flags_begin_anew(judged, sample_of):
    judge = judged("plain")
    for _ in range(2):
        judge(sample_of(score=0.5))
        assert counts()["executions"] == 1
        rl_accel.disable()
        with pytest.raises(ValueError, match="not enough values"):
            counts()


@pytest.mark.parametrize(
    "grader",
    ["plain", "without_await", "awaiting", "instance", "returning", "comprehending", "tasks", "gathering", "as_dict"],
)
def test_a_grader_of_any_kind_gives_what_it_gives(judged, sample_of, grader):
    judge = judged(grader)
    found = {"gathering": lambda both: both[1], "as_dict": lambda reward: reward["score"]}.get(grader, float)
    assert [found(judge(sample_of(score=score))) for score in (0.0, 0.25)] == [0.0, 0.25]
    assert counts()["executions"] == 2


def test_what_a_grader_changes_in_a_sample_is_changed(judged, sample_of):
    judge, sample = judged("changing"), sample_of()
    sample.tool_call_count = 4
    sample.tokens, sample.trace = [1, 2], {"not": "sent"}
    assert judge(sample) == 1.0
    assert (sample.metadata, sample.remove_sample) == ({"raw_reward": 7.0}, True)
    assert sample.note == "a note of 4 calls", "it sees what others have put there, and slime's arguments"
    assert (sample.tokens, sample.trace) == ([1, 2], {"not": "sent"})


def test_what_cannot_be_sent_is_named_if_the_grader_uses_it_and_is_kept_if_not(judged, sample_of):
    judge, lock = judged("reading"), threading.Lock()
    sample = sample_of(lock=lock, check=lambda response: 0.5)
    sample.rollout_log_probs = [0.1, 0.2]
    assert judge(sample) == {"score": 0.5, "log_probs": 2}
    assert sample.metadata["lock"] is lock
    assert sample.metadata["parsed"] == "1"
    with pytest.raises(RuntimeError, match=r"sample\.metadata\['lock'\] cannot be sent to the process"):
        judge(sample_of(lock=lock, check=lambda response: 0.5, uses="lock"))
    with pytest.raises(RuntimeError, match=r"args\.unpicklable cannot be sent to the process"):
        judge(sample_of(check=lambda response: 0.5, uses="args"))


def test_a_session_of_a_grader_outlives_a_call_and_a_samples_class_is_kept(judged, sample_of):
    from slime_test_graders import OwnSample

    judge, scores = judged("with_session", workers=1), []
    for _ in range(3):
        sample = sample_of()
        sample.__class__ = OwnSample
        scores.append(judge(sample))
    assert scores == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("grader", ["plain", "without_await", "awaiting"])
def test_a_grader_that_fails_fails_as_in_slime_or_is_counted_and_reported_once(judged, sample_of, caplog, grader):
    judge = judged(grader)
    with pytest.raises(KeyError, match="no such answer"):
        judge(sample_of(does="raise"))
    assert judge(sample_of(does="none")) is None
    judge = judged(grader, timeout_score=-0.5, score_errors=True)
    failing = ("raise", "nan", "inf", "none", "quit")
    assert [judge(sample_of(does=does)) for does in failing] == [-0.5] * 5
    assert judge(sample_of(does="raise")) == -0.5
    assert judge(sample_of()) == 1.0
    assert counts()["errors"] == 6
    warnings = [r.getMessage() for r in caplog.records if r.name == "rl_accel" and "no reward" in r.getMessage()]
    assert len(warnings) == 5, "each kind once"
    assert sum("KeyError: 'no such answer'" in warning for warning in warnings) == 1


@pytest.mark.parametrize(
    ("grader", "does"), [("plain", "hang"), ("without_await", "spin"), ("awaiting", "hang"), ("awaiting", "refuse")]
)
def test_a_grader_that_hangs_is_killed_at_the_limit_with_its_children(judged, sample_of, gone, tmp_path, grader, does):
    judge = judged(grader, maximum=1.0)
    assert judge(sample_of()) == 1.0
    assert judge(sample_of(does=does, pids=str(tmp_path))) == 0.0
    assert counts()["timeouts"] == 1
    assert grader != "plain" or gone(tmp_path)


@pytest.mark.parametrize("grader", ["plain", "without_await"])
def test_a_blocking_grader_leaves_the_event_loop_alone(judged, sample_of, tmp_path, grader):
    """It waits for a file that a coroutine on slime's event loop writes once it has begun."""
    from slime.utils.async_utils import get_async_loop

    async def answer():
        while not (tmp_path / "began").exists():
            await asyncio.sleep(0.01)
        (tmp_path / "answer").touch()

    judge = judged(grader, maximum=120.0)
    answering = asyncio.run_coroutine_threadsafe(answer(), get_async_loop().loop)
    assert judge(sample_of(does="wait", folder=str(tmp_path))) == 1.0
    answering.result(60)


def test_rewards_that_are_dicts_keep_their_keys_and_can_be_looked_up_as_slime_does(judged, sample_of):
    keys = {"reward_key": "score", "eval_reward_key": "score"}
    judge = judged("as_dict", timeout_score=-1.0, maximum=1.0, arguments=keys, score_errors=True)
    sample = sample_of(does="raise")
    sample.reward = judge(sample)
    assert sample.get_reward_value(judge.args) == -1.0, "nothing is known yet"
    judge(sample_of())
    assert judge(sample_of(does="hang")) == {"score": -1.0, "acc": False, "pred": "", "steps": 0, "where": None}


def test_each_sample_of_a_list_is_judged_on_its_own(judged, sample_of):
    judge = judged("plain", maximum=2.0, workers=2, score_errors=True)
    judge([sample_of()] * 2)
    given = [sample_of(score=score) for score in (0.25, 0.5, 0.75, 1.0)]
    given[1].metadata["does"], given[3].metadata["does"] = "hang", "exit"
    assert judge(given) == [0.25, 0.0, 0.75, 0.0]
    counted = counts()
    assert (counted["timeouts"], counted["killed"]) == (1, 1)
    assert judge([]) == []


@pytest.mark.parametrize(
    ("grader", "scores", "rewards"),
    [
        ("together", [1, 3, 2], [0.0, 1.0, 0.0]),
        ("decorated", [1, 3, 2], [0.0, 1.0, 0.0]),
        ("without_await", [0.5, 0.25], [0.5, 0.25]),
        ("as_array", [1.0, 0.5], [1.0, 0.5]),
        ("of_lists", [[1, 2], [3]], [[1.0, 2.0], [3.0]]),  # as a generate function may make them
    ],
)
def test_a_judge_of_groups_sees_its_group_as_in_slime(judged, sample_of, grader, scores, rewards):
    def samples(score):
        return [*map(samples, score)] if isinstance(score, list) else sample_of(score=score)

    assert list(judged(grader, score_errors=True)(samples(scores))) == rewards
    assert "errors" not in counts()


def test_a_group_is_graded_and_lost_in_one_go_and_may_be_sorted(judged, sample_of):
    assert judged("without_await", score_errors=True)([sample_of(does="nan"), sample_of()]) == [0.0, 0.0]
    given = [sample_of(score=score) for score in (0.25, 1.0, 0.5)]
    assert judged("sorting")(given) == [1.0, 0.5, 0.25]
    assert [sample.metadata["score"] for sample in given] == [1.0, 0.5, 0.25]


def test_a_grader_in_a_process_sees_what_a_rollout_of_the_users_has_changed_in_slimes_arguments(judged, sample_of):
    judge = judged("by_arguments", workers=1, arguments={"schedule": {"weight": 1.0}})
    assert judge(sample_of()) == {"weight": 1.0, "step": None, "graded": 1}
    judge.args.step, judge.args.schedule["weight"] = 1, 0.5
    assert judge(sample_of()) == {"weight": 0.5, "step": 1, "graded": 2}
    other = SimpleNamespace(**{**vars(judge.args), "schedule": {"weight": 1.0}})
    del other.step
    assert judge.run(judge.stock(other, sample_of())) == {"weight": 1.0, "step": None, "graded": 3}


class CountsPickles:
    """An object as large as a tokenizer, on slime's arguments."""

    pickled = 0

    def __reduce__(self):
        CountsPickles.pickled += 1
        return dict, ({"vocabulary": 7},)


def test_an_argument_is_pickled_once_if_a_grader_reads_it_and_not_at_all_if_none_does(judged, sample_of):
    judge = judged("by_arguments", workers=1, arguments={"schedule": {"weight": 1.0}, "tokenizer": CountsPickles()})
    for graded in (1, 2, 3):
        assert judge(sample_of())["graded"] == graded
    assert CountsPickles.pickled == 0
    judge = judged("by_tokenizer", workers=1, arguments={"tokenizer": CountsPickles()})
    assert [judge(sample_of()) for _ in range(3)] == [7.0] * 3
    assert CountsPickles.pickled == 1
    judge.args.tokenizer = {"vocabulary": 8}
    assert judge(sample_of()) == 8.0


def test_a_grader_gets_the_further_arguments_of_a_rollout_of_the_users(judged, sample_of):
    judge = judged("for_evaluations")
    assert judge.run(judge.stock(judge.args, sample_of(), evaluation=True)) == 0.25
    assert judge(sample_of()) == 0.75


def test_an_evaluation_needs_its_own_key_only(judged, sample_of):
    from rl_accel.integrations.slime.reward_timeout.rm_hook import mark_evaluation

    judge = judged("with_acc", arguments={"reward_key": "score", "eval_reward_key": "acc"}, score_errors=True)

    async def evaluated(sample):
        mark_evaluation(judge.args, sample, evaluation=True)
        return await judge.stock(judge.args, sample)

    assert judge.run(evaluated(sample_of())) == {"acc": 1.0}
    assert judge(sample_of()) == {"score": 0.0, "acc": 0.0}


def test_the_graders_of_an_event_loop_that_was_closed_end(judged, sample_of, wait_for):
    """Such as one event loop for each rollout of a rollout function of the user's."""

    def workers():
        count = 0
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                count += "rl_accel/reward/grader_process" in " ".join(process.cmdline())
        return count

    judge = judged("without_await")
    assert asyncio.run(judge.stock(judge.args, sample_of())) == 1.0
    of_one_loop = workers()
    for _ in range(2):
        assert asyncio.run(judge.stock(judge.args, sample_of())) == 1.0
    assert judge(sample_of()) == 1.0
    wait_for(lambda: workers() == of_one_loop, "the end of other graders")


def test_a_list_without_a_grader_honours_the_samples_own(judged, sample_of):
    judge = judged(rm_type="math")
    own, other = sample_of(score=0.5), sample_of()
    own.custom_rm_path = f"{GRADERS}.without_await"
    assert judge([other, own]) == [1, 0.5]
    own.custom_rm_path = f"{GRADERS}.of_one"
    assert judge([own, own, other]) == [0.5, 0.5, 1]


def test_a_limit_is_learned_from_right_answers_for_a_prompt_and_not_for_its_neighbour(judged, sample_of):
    judge = judged("plain", maximum=4.0, correct_above=0.5)
    for score in (0.0, 0.5, 0.5):
        judge(sample_of("known", score=score))
    assert counts()["anchors"] == 0, "those were wrong"
    for _ in range(3):
        assert judge(sample_of("known")) == 1.0
    assert [judge(sample_of(prompt, does="hang")) for prompt in ("known", "unknown")] == [0.0, 0.0]
    counted = counts()
    assert (counted["timeouts"], counted["timeouts_full"]) == (2, 1)
    assert counted["saved_seconds"] > 2
    assert counted["anchors"] == 1


def test_each_grading_of_a_sample_has_its_own_limit(judged, sample_of):
    """A generate function may grade each turn, and the last one takes longer."""
    judge = judged("plain", min_correct=1, minimum=0.2)

    async def turns():
        sample = sample_of()
        first = await judge.stock(judge.args, sample)
        sample.metadata["seconds"] = 1.5
        return first, await judge.stock(judge.args, sample)

    assert [judge.run(turns()) for _ in range(2)] == [(1.0, 1.0)] * 2


def test_cancelling_kills(judged, sample_of, gone, wait_for, tmp_path):
    from slime.utils.async_utils import get_async_loop

    judge = judged("plain", maximum=300.0)
    judge(sample_of())
    sample = sample_of(does="hang", pids=str(tmp_path))
    waiting = asyncio.run_coroutine_threadsafe(judge.stock(judge.args, sample), get_async_loop().loop)
    wait_for(lambda: any(tmp_path.iterdir()), "the grader to hang")
    waiting.cancel()
    assert gone(tmp_path)
    assert judge(sample_of()) == 1.0
    assert counts()["cancelled"] == 1


ANSWERS = [
    ("\\boxed{\\frac{1}{2}}", "0.5"),
    ("so \\boxed{3}", "4"),
    ("</think> Answer: 7", "7"),
    ("the answer is 3", "3"),
    ("The correct option is B.", "B"),
    ("nothing", "1"),
    ("2 or 3", "2"),
]


def test_rewards_by_type_are_slimes_own_and_the_type_in_a_sample_goes_before_that_of_the_run(judged, sample_of):
    judge = judged(rm_type="math")
    stock = SimpleNamespace(**{**vars(judge.args), "custom_rm_path": None})
    for rm_type in ("math", "dapo", "deepscaler", "f1", "gpqa", "boxed_math", "boxed_dapo"):
        for response, label in ANSWERS:
            if "dapo" in rm_type and label == "B":
                continue  # it wants numbers, and in slime it would end the run
            sample = sample_of(label=label, response=response, rm_type=rm_type)
            assert judge(sample) == judge.run(judge.stock(stock, sample)), (rm_type, response)


def test_nothing_to_grade_with_and_unknown_types_are_named(judged, sample_of):
    with pytest.raises(ConfigError, match=r"wants --rm-type, or rl_accel\.reward_timeout\.grader"):
        judged()(sample_of())
    with pytest.raises(ConfigError, match="an --rm-type that slime has, found 'mats'"):
        judged()(sample_of(rm_type="mats"))
    with pytest.raises(ConfigError, match=r"the dotted path of a function, found 'slime_test_graders\.missing'"):
        judged("missing")(sample_of())


def test_a_reward_server_is_awaited_within_the_limit_and_many_at_once(judged, sample_of, web_server):
    """It answers at once, but to "together" when twelve of them have come, and to "hang" not at all."""
    release, together = threading.Event(), threading.Barrier(12)

    def score(_path, asked):
        if asked["response"] == "hang":
            release.wait(60)
        if asked["response"] == "together":
            together.wait(60)
        return json.dumps(float(asked["response"] in (asked["label"], "together")))

    try:
        remote = {"rm_type": "remote_rm", "arguments": {"rm_url": web_server(score)}, "workers": 1}
        judge = judged(**remote, maximum=50.0)
        responses = ["1", "2", *["together"] * 12]
        assert judge([sample_of(response=response) for response in responses]) == [1.0, 0.0, *[1.0] * 12]
        assert judged(**remote, maximum=1.0)(sample_of(response="hang")) == 0.0
        assert counts()["timeouts"] == 1
    finally:
        release.set()


def test_programs_are_judged_by_the_share_of_test_cases_they_pass(judged, sample_of):
    judge = judged(rm_type="code", maximum=2.0, score_errors=True)
    tests = {"inputs": ["1 2", "3 4", "0 0", "5 5"], "outputs": ["3", "7", "0", "10"]}

    def program(text):
        return sample_of(response=f"Here:\n```python\n{text}\n```\n", test_cases=tests)

    right = "print(sum(map(int, input().split())))"
    assert judge(program(right)) == 1.0
    slow = "import time\na = input()\nif a == '0 0': time.sleep(60)\nprint(sum(map(int, a.split())))"
    assert judge(program(slow)) == 0.75
    assert judge(program("print(3)")) == 0.25
    assert judge(sample_of(response="I do not know.", test_cases=tests)) == 0.0
    method = "class Solution:\n    def add(self, a, b):\n        return a + b"
    calls = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 8]}
    assert judge(sample_of(response=f"```python\n{method}\n```", test_cases=json.dumps(calls))) == 0.5
    assert judge(sample_of(response=f"```python\n{right}\n```", test_cases={"inputs": []})) == 0.0
    counted = counts()
    assert (counted["executions"], counted["timeouts"], counted["errors"]) == (14, 1, 1)


@pytest.fixture
def start(start, serve):
    """``start(flags, **changes)``: slime's own rollouts of short responses, with rewards by rows."""

    def make(flags=None, **changes):
        section = {**FAST, "grader": f"{GRADERS}.by_row", "score_errors": True, **(flags or {})}
        changes["rl_accel"] = {**changes.get("rl_accel", {}), "reward_timeout": section}
        return start(serve(), **{**SLIME_ARGUMENTS["reward_timeout"], "rollout_max_response_len": 16, **changes})

    return make


def rows_file(tmp_path, **metadata):
    file = tmp_path / "prompts.jsonl"
    rows = [{"input": f"{i}x{i}", "label": str(i), "metadata": {"row": i, **metadata}} for i in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_hanging_and_raising_graders_do_not_stall_slimes_own_rollout(start, gone, tmp_path):
    (tmp_path / "pids").mkdir()
    data = rows_file(tmp_path, pids=str(tmp_path / "pids"))
    *_, rollout = start(prompt_data=data)
    samples = {sample.index: sample for group in rollout(0).samples for sample in group}
    assert len(samples) == 32
    by_row = {row: [s.reward for s in samples.values() if s.metadata["row"] == row] for row in range(8)}
    assert by_row.pop(2) == by_row.pop(5) == [0.0] * 4
    assert all(sorted(rewards) == [0.0, 0.0, 1.0, 1.0] for rewards in by_row.values())
    assert gone(tmp_path / "pids")
    counted = counts()
    assert (counted["executions"], counted["timeouts"], counted["errors"], counted["anchors"]) == (32, 4, 4, 6)


def test_a_group_is_judged_in_slimes_own_rollout(start, tmp_path):
    *_, rollout = start(prompt_data=rows_file(tmp_path, hanging=[]), group_rm=True)
    for group in rollout(0).samples:
        wanted = 0.0 if group[0].metadata["row"] == 5 else 1.0
        assert [s.reward for s in group] == [wanted * (s.index % 2) for s in group]


@pytest.mark.parametrize("inherited", [False, True])
def test_an_evaluation_is_held_to_what_training_taught_and_teaches_nothing(start, evaluation_of, tmp_path, inherited):
    """``inherited``: --custom-rm-path is on the command line still, from where slime has put it into the evaluation's samples."""
    train, evaluated = tmp_path / "train", tmp_path / "eval"
    for folder in (train, evaluated):
        folder.mkdir()
    own = {"custom_rm_path": f"{GRADERS}.by_row"} if inherited else {}
    flags = {"min_correct": 1, "maximum": 4.0}
    evaluation = evaluation_of(rows_file(evaluated, hanging=[0]), n_samples_per_eval_prompt=2, **own)
    *_, rollout = start(prompt_data=rows_file(train, hanging=[]), flags=flags, **evaluation)
    before = rollout(0, evaluation=True)
    assert len(before.data["few"]["rewards"]) == 80
    counted = counts()
    assert counted["eval_errors"] == 2
    assert (counted["eval_executions"], counted["executions"], counted["anchors"]) == (80, 0, 0)
    rollout(0)
    assert counts()["anchors"] == 7
    after = rollout(1, evaluation=True)
    assert after.data["few"]["rewards"] == before.data["few"]["rewards"]
    counted = counts()
    assert (counted["eval_executions"], counted["executions"], counted["anchors"]) == (80, 0, 7)


def test_tail_batching_has_the_graders_of_dropped_responses_killed_at_once(start, gone, tmp_path):
    """The limit is longer than a test may take."""
    (tmp_path / "pids").mkdir()
    data = rows_file(tmp_path, hanging=[1, 4], pids=str(tmp_path / "pids"))
    ours = {**TAIL_BATCHING.slime.arguments, "rl_accel": {"tail_batching": True}, "rollout_max_response_len": 64}
    *_, rollout = start(prompt_data=data, flags={"maximum": 3000.0, "workers": 12}, **ours)
    output = rollout(0)
    assert gone(tmp_path / "pids")
    assert len(output.samples) == 8
    assert not {s.metadata["row"] for group in output.samples for s in group} & {1, 4}
    assert counts()["cancelled"] >= 1


def test_a_rollout_that_never_grades_is_named_once(end_grading, caplog):
    from rl_accel.integrations.slime.reward_timeout.rm_hook import numbers_of
    from rl_accel.integrations.slime.rollout_log import LoggedRollout

    args = SimpleNamespace(rollout_function_path="slime.rollout.sft_rollout.generate_rollout")
    rl_accel.disable()
    assert [numbers_of(LoggedRollout(number, args, {})) for number in range(2)] == [{}, {}]
    (line,) = caplog.messages
    assert "reward_timeout has nothing to do: --rollout-function-path slime.rollout.sft_rollout" in line
