"""Tests ways to stand still, one after the other in one run of verl: a line names each, the run goes on, and it ends by itself."""

import contextlib
import re
import signal
from typing import NamedTuple

import pandas as pd
import psutil
import pytest
import yaml

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

P0, R0 = 4, 2
GRADED = 1
SEARCHED = P0 + 1
BLOCKED = 2 * P0 + 1
GRADED_LAST = 5 * P0 + 1
LAST_TRY = 6
"""Number of alarms about a step after which the run goes on although none says what is wanted."""
REWARD = f"""
import os, time, uuid

FOLDER = os.environ["STALL_FOLDER"]
FILES = {{{GRADED}: "grader", {GRADED_LAST}: "RewardLoopWorker"}}

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    row = extra_info["index"]
    with open(f"{{FOLDER}}/graded_{{row}}_{{os.getpid()}}_{{uuid.uuid4()}}", "w"):
        pass
    while row in FILES and not os.path.exists(f"{{FOLDER}}/{{FILES[row]}}"):
        time.sleep(0.1)
    return len(solution_str) / 100
"""
ADDRESS = r"\S+ pid \d+"


class Way(NamedTuple):
    """What stands still, in which step, by which signal if any, and what a line says about it."""

    what: str
    step: int
    signal: signal.Signals | None
    pattern: str


WAYS = [
    Way(
        "grader",
        1,
        None,
        rf"for grader, .* in RewardLoopWorker on {ADDRESS}, prompt \S+ \(rl_accel.reward_timeout limits",
    ),
    Way(
        "tool",
        2,
        None,
        rf"for tool, .* in AgentLoopWorkerTQ on {ADDRESS}, prompt \S+ row {SEARCHED} response \d .*, search",
    ),
    Way("data", 3, None, rf"for data loader, .* in TaskRunnerV1 on {ADDRESS}, _\w+"),
    Way("AgentLoopWorker", 4, signal.SIGSTOP, rf"no answer from AgentLoopWorkerTQ on {ADDRESS};"),
    Way("WorkerDict", 5, signal.SIGSTOP, rf"no answer from WorkerDict rank \d on {ADDRESS};"),
    Way("RewardLoopWorker", 6, signal.SIGKILL, rf"; RewardLoopWorker on {ADDRESS} has died; .*for grader"),
]


def processes_of(part, metrics):
    """Returns the processes of the run that logs to ``metrics`` whose title contains ``part``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = process.environ().get("VERL_FILE_LOGGER_PATH") == str(metrics)
            if ours and part in process.cmdline()[0]:
                found.append(process)
    return found


class Follower:
    """Lets the run go on when the line about the present way is there, and brings about the next way."""

    def __init__(self, folder, read_metrics, ways):
        self.folder = folder
        self.read_metrics = read_metrics
        self.ways = list(ways)
        self.lines = {}
        self.texts = {}
        self.signalled = None

    def __call__(self, metrics):
        log = self.folder / "train.log"
        if not self.ways or not log.exists():
            return
        way = self.ways[0]
        if way.signal and self.signalled is None and len(self.read_metrics(metrics)) == way.step - 1:
            self.signal(way, metrics)
        alarms = re.findall(rf"stall: for .* of step {way.step}\b.*", log.read_text(errors="replace"))
        if way.signal and self.signalled is None:
            return
        said = [line for line in alarms if re.search(way.pattern, line)]
        if said:
            self.lines[way.what] = said[0]
            with open(said[0].split("; stacks in ")[1].strip()) as file:
                self.texts[way.what] = file.read()
        if said or len(alarms) >= LAST_TRY:
            (self.folder / way.what).touch()
            if way.signal is signal.SIGSTOP:
                self.signalled.send_signal(signal.SIGCONT)
            self.signalled = None
            self.ways.pop(0)

    def signal(self, way, metrics):
        """Sends the signal to one process. A reward worker is killed only when no response needs it any more."""
        graded = [file.name.split("_")[1:3] for file in self.folder.glob("graded_*")]
        sleeping = {int(pid) for row, pid in graded if int(row) == GRADED_LAST}
        if way.signal is signal.SIGKILL and len(graded) < way.step * P0 * R0:
            return
        found = [process for process in processes_of(way.what, metrics) if process.pid not in sleeping]
        if found:
            self.signalled = found[-1]
            self.signalled.send_signal(way.signal)


@pytest.fixture(scope="module")
def left(launch, workspace, tmp_path_factory, read_metrics, repo):
    out = tmp_path_factory.mktemp("stall")
    data = pd.read_parquet(workspace / "task" / "train.parquet").head(64)
    data["agent_name"] = ["searches" if row == SEARCHED else "single_turn_agent" for row in range(len(data))]
    data["data_source"] = [truth["ground_truth"] for truth in data["reward_model"]]
    data.to_parquet(out / "train.parquet")
    (out / "reward.py").write_text(REWARD)
    (out / "loops.yaml").write_text(yaml.safe_dump([{"name": "searches", "_target_": "stall_places.Searches"}]))
    loops = repo / "tests" / "e2e" / "loops"
    follow = Follower(out, read_metrics, WAYS)
    run = launch(
        out,
        len(WAYS),
        (P0, R0),
        f"data.train_files={out / 'train.parquet'}",
        "data.shuffle=False",
        f"data.custom_cls.path={loops / 'stall_places.py'}",
        "data.custom_cls.name=BlockingDataset",
        "data.max_response_length=64",
        "trainer.n_gpus_per_node=2",
        "trainer.test_freq=-1",
        f"critic.ppo_mini_batch_size={P0}",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={out / 'loops.yaml'}",
        f"reward.custom_reward_function.path={out / 'reward.py'}",
        "reward.num_workers=3",
        "+rl_accel.stall.enable=True",
        "+rl_accel.stall.patience=6",
        env={"PYTHONPATH": str(loops), "STALL_FOLDER": str(out), "STALL_BLOCKED_ROW": str(BLOCKED)},
        follow=follow,
    )
    run.follow = follow
    return run


@pytest.mark.parametrize("way", WAYS, ids=[way.what for way in WAYS])
def test_what_stands_still_is_named_and_the_run_moves_again(left, way):
    assert way.what in left.follow.lines
    print(left.follow.lines[way.what])
    assert re.search(rf"stall: moves again after \d+ s in .* of step {way.step}\b", left.log)
    assert list(left.steps) == list(range(1, len(WAYS) + 1))


def test_the_awaited_prompts_are_counted_and_the_file_has_the_stacks(left):
    assert re.search(r"in gen of step 1 \(\d of 4 prompts of train are awaited: ", left.follow.lines["grader"])
    text = left.follow.texts["grader"]
    assert "in compute_score" in text
    assert re.search(r"AgentLoopWorkerTQ on .*, last finished: ", text)
    assert re.search(r"waits for reward, prompt \S+ row 1 response \d", text)


def test_the_rank_that_waits_for_the_stopped_one_names_its_collective(left):
    line = left.follow.lines["WorkerDict"]
    stopped = re.search(r"no answer from (WorkerDict rank \d)", line).group(1)
    waiting = {"WorkerDict rank 0": "WorkerDict rank 1", "WorkerDict rank 1": "WorkerDict rank 0"}[stopped]
    assert re.search(rf"wait for collective, the longest for \d+ s in {waiting} on", line)


def test_a_queue_that_cannot_be_placed_is_named_with_what_it_wants(launch, tmp_path):
    wanted = r"stall: for \d+ s in start of step 0; .*Ray has not placed SimpleStorageUnit, which wants \{'CPU': 1.0"

    def follow(_metrics):
        log = tmp_path / "train.log"
        return log.exists() and re.search(wanted, log.read_text(errors="replace"))

    run = launch(
        tmp_path,
        1,
        (P0, R0),
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=40",
        "+rl_accel.stall.enable=True",
        "+rl_accel.stall.patience=5",
        follow=follow,
        completes=False,
    )
    assert re.search(wanted, run.log)


@pytest.mark.vllm
@pytest.mark.parametrize("engine", ["vllm"], indirect=True, scope="module")
def test_a_stopped_engine_of_vllm_is_named_and_so_are_the_replicas_that_are_waited_for(launch, tmp_path, read_metrics):
    pattern = (
        rf"child process \d+ VLLM::EngineCore is stopped \(vLLM\w+ on {ADDRESS}\); .*for generation, .* replica \S+"
    )
    way = Way("VLLM::EngineCore", 2, signal.SIGSTOP, pattern)
    follow = Follower(tmp_path, read_metrics, [way])
    patience = ["+rl_accel.stall.enable=True", "+rl_accel.stall.patience=6"]
    run = launch(tmp_path, 2, (P0, R0), "data.max_response_length=64", *patience, follow=follow)
    assert way.what in follow.lines
    print(follow.lines[way.what])
    assert re.search(r"stall: moves again after \d+ s in .* of step 2\b", run.log)
