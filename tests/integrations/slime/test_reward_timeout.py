"""Rewards within adaptive limits in slime's own code, where SLIME_ROOT names a checkout: its reward functions and its rollouts."""

import asyncio
import http.server
import json
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.slow

PACE = ("--seconds-per-step", "0.002", "--max-running-requests", "256", "--context-length", "512")
GRADERS = "slime_test_graders"
FAST = {"enable": True, "maximum": 3.0, "minimum": 0.5, "slack": 0.2, "min_correct": 2, "probe_share": 0.0}


@pytest.fixture
def hooks(slime_root):
    """What ``rl-accel slime-config --enable reward_timeout`` sets."""
    from rl_accel.integrations.slime import custom_config

    return dict(custom_config.HOOKS["reward_timeout"])


def end_all():
    from rl_accel.integrations.slime.reward_timeout.rm_hook import OPEN

    for loop, grading in list(OPEN.items()):
        asyncio.run_coroutine_threadsafe(grading.close(), loop).result(30)
    OPEN.clear()


@pytest.fixture(autouse=True)
def ends(slime_root):
    """What graded in a test ends with it."""
    yield
    end_all()


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
def judged(hooks):
    """``judged(grader="plain", rm_type=None, **flags)`` returns ``judge(sample or list)``, which goes through slime's own functions
    on slime's event loop. The one before it ends."""
    from slime.rollout.rm_hub import async_rm, batched_async_rm
    from slime.utils.async_utils import run

    def make(grader=None, rm_type=None, arguments=None, **flags):
        end_all()
        path = f"{GRADERS}.{grader}" if grader else None
        args = SimpleNamespace(
            rl_accel={"reward_timeout": {**FAST, "grader": path, **flags}},
            rm_type=rm_type,
            rm_url=None,
            rm_note="a note",
            reward_key=None,
            eval_reward_key=None,
            save=None,
            unpicklable=threading.Lock(),
        )
        args.__dict__.update(hooks | (arguments or {}))

        def judge(given):
            return run((batched_async_rm if isinstance(given, list) else async_rm)(args, given))

        judge.args = args
        return judge

    return make


def counts():
    from rl_accel.integrations.slime.reward_timeout.rm_hook import OPEN

    (grading,) = OPEN.values()
    return Counter({**grading.replica.take_delta().counts, "anchors": len(grading.replica.timeout)})


def alive(folder):
    """Processes that graders have left word of and that still run."""
    numbers = [int(part) for file in Path(folder).iterdir() for part in file.name.split("-")]

    def runs(number):
        try:
            return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    assert numbers, "nothing has begun to hang"
    return [number for number in numbers if runs(number)]


def gone(folder, within=2.0):
    end = time.monotonic() + within
    while alive(folder):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


# Graders


@pytest.mark.parametrize(
    "grader", ["plain", "without_await", "awaiting", "instance", "returning", "comprehending", "as_dict"]
)
def test_a_grader_of_any_kind_gives_what_it_gives(judged, sample_of, grader):
    judge = judged(grader)
    found = [judge(sample_of(score=score)) for score in (0.0, 0.25)]
    assert [each["score"] if isinstance(each, dict) else each for each in found] == [0.0, 0.25]
    assert counts()["executions"] == 2


def test_what_a_grader_changes_in_a_sample_is_changed(judged, sample_of):
    judge = judged("changing")
    sample = sample_of()
    sample.tool_call_count = 4
    sample.tokens, sample.trace = [1, 2], {"not": "sent"}
    assert judge(sample) == 1.0
    assert (sample.metadata, sample.remove_sample) == ({"raw_reward": 7.0}, True)
    assert sample.note == "a note of 4 calls", "it sees what others have put there, and slime's arguments"
    assert (sample.tokens, sample.trace) == ([1, 2], {"not": "sent"})


@pytest.mark.parametrize("grader", ["plain", "without_await", "awaiting"])
def test_a_grader_that_fails_is_counted_and_reported_once(judged, sample_of, caplog, grader):
    judge = judged(grader, timeout_score=-0.5)
    failing = ("raise", "nan", "inf", "none", "quit")
    assert [judge(sample_of(does=does)) for does in failing] == [-0.5] * 5
    assert judge(sample_of(does="raise")) == -0.5
    assert judge(sample_of()) == 1.0
    assert counts()["errors"] == 6
    warnings = [r.getMessage() for r in caplog.records if r.name == "rl_accel" and "no reward" in r.getMessage()]
    assert len(warnings) == 5, "each kind once"
    assert sum("KeyError: 'no such answer'" in warning for warning in warnings) == 1


def test_a_grader_that_ends_its_process_costs_its_reward_alone(judged, sample_of):
    judge = judged("plain")
    assert judge([sample_of(does="exit"), sample_of(score=0.5)]) == [0.0, 0.5]
    assert counts()["killed"] == 1


def test_a_hanging_grader_is_killed_with_all_that_it_started(judged, sample_of, tmp_path):
    judge = judged("plain", maximum=1.0)
    judge(sample_of())
    began = time.monotonic()
    assert judge(sample_of(does="hang", pids=str(tmp_path))) == 0.0
    assert time.monotonic() - began < 3
    assert gone(tmp_path)
    assert counts()["timeouts"] == 1


def test_a_grader_that_neither_awaits_nor_ends_is_killed(judged, sample_of):
    judge = judged("without_await", maximum=1.0)
    assert judge(sample_of(does="spin")) == 0.0
    assert counts()["timeouts"] == 1


@pytest.mark.parametrize("does", ["hang", "refuse"])
def test_an_awaited_grader_ends_at_the_limit_whether_it_wants_to_or_not(judged, sample_of, does):
    judge = judged("awaiting", maximum=1.0)
    began = time.monotonic()
    assert judge(sample_of(does=does)) == 0.0
    assert time.monotonic() - began < 3
    assert counts()["timeouts"] == 1


@pytest.mark.parametrize("grader", ["plain", "without_await"])
def test_a_blocking_grader_leaves_the_event_loop_alone(judged, sample_of, grader):
    from slime.utils.async_utils import get_async_loop

    judge = judged(grader)
    judge(sample_of())
    gaps, stop = [], threading.Event()

    async def beat():
        while not stop.is_set():
            began = time.monotonic()
            await asyncio.sleep(0.01)
            gaps.append(time.monotonic() - began)

    beating = asyncio.run_coroutine_threadsafe(beat(), get_async_loop().loop)
    assert judge(sample_of(does="slow")) == 1.0
    stop.set()
    beating.result()
    assert len(gaps) > 20
    assert max(gaps) < 0.5, "the grader blocks for 1.5 s"


def test_rewards_that_are_dicts_keep_their_keys(judged, sample_of):
    judge = judged("as_dict", timeout_score=-1.0, maximum=1.0)
    assert judge(sample_of(does="raise")) == -1.0, "nothing is known yet"
    judge(sample_of())
    wanted = {"score": -1.0, "acc": False, "pred": "", "steps": 0, "where": None}
    assert judge(sample_of(does="raise")) == wanted
    assert judge(sample_of(does="hang")) == wanted


def test_a_dict_can_be_looked_up_as_slime_does_from_the_first_on(judged, sample_of):
    judge = judged("as_dict", arguments={"reward_key": "score", "eval_reward_key": "score"})
    sample = sample_of(does="raise")
    sample.reward = judge(sample)
    assert sample.get_reward_value(judge.args) == 0.0


# Lists


def test_of_a_list_each_is_judged_on_its_own(judged, sample_of):
    judge = judged("plain", maximum=2.0, workers=2)
    judge([sample_of()] * 2)
    given = [sample_of(score=score) for score in (0.25, 0.5, 0.75)]
    given[1].metadata["does"] = "hang"
    began = time.monotonic()
    assert judge(given) == [0.25, 0.0, 0.75]
    assert time.monotonic() - began < 4
    assert judge([]) == []


def test_a_judge_of_groups_sees_its_group_as_in_slime(judged, sample_of):
    judge = judged("together")
    assert judge([sample_of(score=score) for score in (1, 3, 2)]) == [0.0, 1.0, 0.0]
    blocking = judged("without_await")
    assert blocking([sample_of(score=score) for score in (0.5, 0.25)]) == [0.5, 0.25]
    assert blocking([sample_of(does="nan"), sample_of()]) == [0.0, 0.0], "graded in one go, lost in one go"


def test_a_list_without_a_grader_honours_the_samples_own(judged, sample_of):
    judge = judged(rm_type="math")
    own, other = sample_of(score=0.5), sample_of()
    own.custom_rm_path = f"{GRADERS}.without_await"
    assert judge([other, own]) == [1, 0.5]


# Limits


def test_a_limit_is_learned_for_a_prompt_and_not_for_its_neighbour(judged, sample_of):
    judge = judged("plain", maximum=4.0)
    for _ in range(3):
        assert judge(sample_of("known")) == 1.0
    began = time.monotonic()
    assert judge(sample_of("known", does="hang")) == 0.0
    known = time.monotonic() - began
    assert judge(sample_of("unknown", does="hang")) == 0.0
    unknown = time.monotonic() - began - known
    assert known < 2.0 < 3.5 < unknown
    found = counts()
    assert (found["timeouts"], found["timeouts_full"]) == (2, 1)
    assert found["saved_seconds"] > 2
    assert found["anchors"] == 1


def test_wrong_answers_teach_nothing(judged, sample_of):
    judge = judged("plain", correct_above=0.5)
    for score in (0.0, 0.5, 0.5):
        judge(sample_of(score=score))
    assert counts()["anchors"] == 0


def test_cancelling_kills(judged, sample_of, tmp_path):
    from slime.rollout.rm_hub import async_rm
    from slime.utils.async_utils import get_async_loop

    judge = judged("plain")
    judge(sample_of())
    sample = sample_of(does="hang", pids=str(tmp_path))
    waiting = asyncio.run_coroutine_threadsafe(async_rm(judge.args, sample), get_async_loop().loop)
    while not any(tmp_path.iterdir()):
        time.sleep(0.01)
    waiting.cancel()
    assert gone(tmp_path, within=1.0)
    assert judge(sample_of()) == 1.0
    assert counts()["cancelled"] == 1


# slime's own graders


ANSWERS = [
    ("\\boxed{\\frac{1}{2}}", "0.5"),
    ("so \\boxed{3}", "4"),
    ("</think> Answer: 7", "7"),
    ("the answer is 3", "3"),
    ("The correct option is B.", "B"),
    ("nothing", "1"),
]


def test_rewards_by_type_are_slimes_own(judged, sample_of):
    from slime.rollout.rm_hub import async_rm
    from slime.utils.async_utils import run

    judge = judged(rm_type="math")
    stock = SimpleNamespace(**{**vars(judge.args), "custom_rm_path": None})
    for rm_type in ("math", "dapo", "deepscaler", "f1", "gpqa", "boxed_math", "boxed_dapo"):
        for response, label in ANSWERS:
            if "dapo" in rm_type and label == "B":
                continue  # it wants numbers, and in slime it would end the run
            sample = sample_of(label=label, response=response, rm_type=rm_type)
            assert judge(sample) == run(async_rm(stock, sample)), (rm_type, response)


def test_the_type_in_a_sample_goes_before_that_of_the_run(judged, sample_of):
    judge = judged(rm_type="math")
    assert judge(sample_of(label="2", rm_type="f1", response="2 or 3")) not in (0, 1)


def test_nothing_to_grade_with_and_unknown_types_are_named(judged, sample_of):
    from rl_accel.errors import ConfigError

    with pytest.raises(ConfigError, match=r"wants --rm-type, or rl_accel\.reward_timeout\.grader"):
        judged()(sample_of())
    with pytest.raises(ConfigError, match="an --rm-type that slime has, found 'mats'"):
        judged()(sample_of(rm_type="mats"))
    with pytest.raises(ConfigError, match=r"the dotted path of a function, found 'slime_test_graders\.missing'"):
        judged("missing")(sample_of())


class RewardServer(http.server.BaseHTTPRequestHandler):
    """Answers at once, but not to a response that says so."""

    release = threading.Event()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["response"] == "hang":
            self.release.wait(60)
        answer = json.dumps(float(body["response"] == body["label"])).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


def test_a_reward_server_is_awaited_within_the_limit_and_many_at_once(judged, sample_of):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), RewardServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        judge = judged(rm_type="remote_rm", arguments={"rm_url": url}, workers=1, maximum=2.0)
        began = time.monotonic()
        responses = ["1", "2", *["hang"] * 12]
        assert judge([sample_of(response=response) for response in responses]) == [1.0, 0.0, *[0.0] * 12]
        assert time.monotonic() - began < 6, "one after another they would take 24 s"
        assert counts()["timeouts"] == 12
    finally:
        RewardServer.release.set()
        server.shutdown()
        server.server_close()


def test_programs_are_judged_by_the_share_of_test_cases_they_pass(judged, sample_of):
    judge = judged(rm_type="code", maximum=2.0)
    tests = {"inputs": ["1 2", "3 4", "0 0", "5 5"], "outputs": ["3", "7", "0", "10"]}

    def program(text):
        return sample_of(response=f"Here:\n```python\n{text}\n```\n", test_cases=tests)

    right = "print(sum(map(int, input().split())))"
    assert judge(program(right)) == 1.0
    assert (
        judge(program(f"import time\na = input()\nif a == '0 0': time.sleep(60)\nprint({'sum(map(int, a.split()))'})"))
        == 0.75
    )
    assert judge(program("print(3)")) == 0.25
    assert judge(sample_of(response="I do not know.", test_cases=tests)) == 0.0
    method = "class Solution:\n    def add(self, a, b):\n        return a + b"
    calls = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 8]}
    assert judge(sample_of(response=f"```python\n{method}\n```", test_cases=json.dumps(calls))) == 0.5
    assert judge(sample_of(response=f"```python\n{right}\n```", test_cases={"inputs": []})) == 0.0
    found = counts()
    assert (found["executions"], found["timeouts"], found["errors"]) == (14, 1, 1)


# Rollouts


@pytest.fixture
def start(slime_args, serve, hooks):
    """``start(**changes)``: arguments and a function that makes rollouts as slime's RolloutManager does, by default slime's own."""
    url = serve(*PACE)

    def make(grader="by_row", flags=None, **changes):
        from slime.utils.misc import load_function

        stock = {
            "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
            "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer",
        }
        section = {"reward_timeout": {**FAST, "grader": f"{GRADERS}.{grader}", **(flags or {})}}
        tail = changes.pop("rl_accel", {})
        args = slime_args(url, **{**stock, **hooks, "rl_accel": {**tail, **section}, **changes})
        data_source = load_function(args.data_source_path)(args)

        def rollout(rollout_id, evaluation=False):
            function = load_function(args.eval_function_path if evaluation else args.rollout_function_path)
            return function(args, rollout_id, data_source, evaluation=evaluation)

        return args, rollout

    return make


def rows_file(tmp_path, **metadata):
    file = tmp_path / "prompts.jsonl"
    rows = [{"input": f"{i}x{i}", "label": str(i), "metadata": {"row": i, **metadata}} for i in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_hanging_and_raising_graders_do_not_stall_slimes_own_rollout(start, tmp_path):
    (tmp_path / "pids").mkdir()
    data = rows_file(tmp_path, pids=str(tmp_path / "pids"))
    _, rollout = start(prompt_data=data, rollout_shuffle=False, rollout_max_response_len=16)
    output = rollout(0)
    samples = {sample.index: sample for group in output.samples for sample in group}
    assert len(samples) == 32
    by_row = {row: [s.reward for s in samples.values() if s.metadata["row"] == row] for row in range(8)}
    assert by_row.pop(2) == by_row.pop(5) == [0.0] * 4
    assert all(sorted(rewards) == [0.0, 0.0, 1.0, 1.0] for rewards in by_row.values())
    assert gone(tmp_path / "pids")
    found = counts()
    assert (found["executions"], found["timeouts"], found["errors"]) == (32, 4, 4)
    assert found["anchors"] == 6


def test_a_group_is_judged_in_slimes_own_rollout(start, tmp_path):
    data = rows_file(tmp_path, hanging=[])
    _, rollout = start(
        grader="by_row", prompt_data=data, group_rm=True, rollout_shuffle=False, rollout_max_response_len=16
    )
    output = rollout(0)
    for group in output.samples:
        wanted = 0.0 if group[0].metadata["row"] == 5 else 1.0
        assert [s.reward for s in group] == [wanted * (s.index % 2) for s in group]


def evaluation_of(data, **changes):
    from slime.utils.eval_config import EvalDatasetConfig

    dataset = EvalDatasetConfig(name="few", path=data, n_samples_per_eval_prompt=2, input_key="input")
    dataset.label_key, dataset.metadata_key = "label", "metadata"
    dataset.temperature, dataset.top_p, dataset.top_k, dataset.max_response_len = 1.0, 1.0, -1, 16
    dataset.__dict__.update(changes)
    return {"eval_datasets": [dataset], "eval_max_prompt_len": None}


@pytest.mark.parametrize("inherited", [False, True])
def test_an_evaluation_is_held_to_what_training_taught_and_teaches_nothing(start, tmp_path, inherited):
    """``inherited``: --custom-rm-path is on the command line still, from where slime has put it into the evaluation's samples."""
    train, evaluated = tmp_path / "train", tmp_path / "eval"
    for folder in (train, evaluated):
        folder.mkdir()
    own = {"custom_rm_path": f"{GRADERS}.by_row"} if inherited else {}
    _, rollout = start(
        prompt_data=rows_file(train, hanging=[]),
        rollout_shuffle=False,
        rollout_max_response_len=16,
        flags={"min_correct": 1, "maximum": 4.0},
        **evaluation_of(rows_file(evaluated, hanging=[0]), **own),
    )
    before = rollout(0, evaluation=True)
    assert len(before.data["few"]["rewards"]) == 80
    found = counts()
    assert (found["eval_executions"], found["eval_errors"], found["executions"], found["anchors"]) == (80, 2, 0, 0)
    rollout(0)
    assert counts()["anchors"] == 7
    began = time.monotonic()
    after = rollout(1, evaluation=True)
    seconds = time.monotonic() - began
    assert after.data["few"]["rewards"] == before.data["few"]["rewards"]
    found = counts()
    assert (found["eval_executions"], found["executions"], found["anchors"]) == (80, 0, 7)
    print(f"an evaluation in which the grader hangs twice: {seconds:.1f} s")


def test_tail_batching_has_the_graders_of_dropped_responses_killed_at_once(start, tmp_path):
    from rl_accel.features import TAIL_BATCHING

    (tmp_path / "pids").mkdir()
    _, rollout = start(
        **TAIL_BATCHING.slime.arguments,
        rl_accel={"tail_batching": True},
        prompt_data=rows_file(tmp_path, hanging=[1, 4], pids=str(tmp_path / "pids")),
        rollout_shuffle=False,
        rollout_max_response_len=64,
        flags={"maximum": 300.0, "workers": 12},
    )
    began = time.monotonic()
    output = rollout(0)
    assert time.monotonic() - began < 120, "the limit is five minutes"
    assert gone(tmp_path / "pids", within=1.0)
    assert len(output.samples) == 8
    assert not {s.metadata["row"] for group in output.samples for s in group} & {1, 4}
    assert counts()["cancelled"] >= 1
