"""Ways to stand still, one after the other in a run of verl as it is: each is named in one line within the patience."""

import contextlib
import re
import signal

import pandas as pd
import psutil
import pytest
import yaml

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

P0, R0 = 4, 2
GRADED, SEARCHED, BLOCKED = 1, P0 + 1, 2 * P0 + 1
REWARD = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    while extra_info["index"] == 1 and not os.path.exists(os.environ["STALL_FOLDER"] + "/grader"):
        time.sleep(0.1)
    return len(solution_str) / 100
"""
ADDRESS = r"\S+ pid \d+"
WAYS = [  # what stands still, the step, and what a line says about it
    (
        "grader",
        1,
        rf"for grader, the longest for \d+ s in RewardLoopWorker on {ADDRESS}.*\(rl_accel.reward_timeout limits it\)",
    ),
    (
        "tool",
        2,
        rf"for tool, the longest for \d+ s in \w+ on {ADDRESS}: search for request of-this-test \(rl_accel.tail_batching",
    ),
    ("data", 3, r"s in data loader of step 3;"),
    ("AgentLoopWorker", 4, rf"no answer from AgentLoopWorker\w* on {ADDRESS};"),
    ("WorkerDict", 5, rf"no answer from WorkerDict rank \d on {ADDRESS};"),
]


def processes_of(part, metrics):
    """Returns the processes of the run that logs to ``metrics`` with ``part`` in their title."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = process.environ().get("VERL_FILE_LOGGER_PATH") == str(metrics)
            if ours and "ray::" in process.cmdline()[0] and part in process.cmdline()[0]:
                found.append(process)
    return found


class Follower:
    """Lets the run go on when the line about the present way is there, and brings about the next way."""

    def __init__(self, folder, read_metrics):
        self.folder, self.read_metrics = folder, read_metrics
        self.stopped = None
        self.done = []

    def __call__(self, metrics):
        if len(self.done) == len(WAYS):
            return len(self.read_metrics(metrics)) >= len(WAYS)
        what, step, pattern = WAYS[len(self.done)]
        begun = len(self.read_metrics(metrics)) + 1
        if what[0].isupper() and self.stopped is None and begun == step and (found := processes_of(what, metrics)):
            self.stopped = found[-1]
            self.stopped.send_signal(signal.SIGSTOP)
        log = self.folder / "train.log"
        if log.exists() and re.search(
            rf"of step {step}\b.*{pattern}" if what != "data" else pattern, log.read_text(errors="replace")
        ):
            (self.folder / what).touch()
            if self.stopped is not None:
                self.stopped.send_signal(signal.SIGCONT)
            self.stopped = None
            self.done.append(what)
        return False


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
    follow = Follower(out, read_metrics)
    run = launch(
        out,
        len(WAYS) + 1,
        (P0, R0),
        f"data.train_files={out / 'train.parquet'}",
        "data.shuffle=False",
        f"data.custom_cls.path={loops / 'stall_places.py'}",
        "data.custom_cls.name=BlockingDataset",
        "data.max_response_length=64",
        "trainer.n_gpus_per_node=2",
        f"critic.ppo_mini_batch_size={P0}",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={out / 'loops.yaml'}",
        f"reward.custom_reward_function.path={out / 'reward.py'}",
        "+rl_accel.stall.enable=True",
        "+rl_accel.stall.patience=10",
        env={"PYTHONPATH": str(loops), "STALL_FOLDER": str(out), "STALL_BLOCKED_ROW": str(BLOCKED)},
        follow=follow,
        completes=False,
    )
    run.done = follow.done
    run.folder = out
    return run


@pytest.mark.parametrize("way", [what for what, _, _ in WAYS])
def test_what_stands_still_is_named_and_the_run_moves_again(left, way):
    assert way in left.done
    step = next(step for what, step, _ in WAYS if what == way)
    assert re.search(rf"stall: moves again after \d+ s in .* of step {step}\b", left.log)


def test_the_awaited_prompts_are_counted_and_the_files_have_the_stacks(left):
    assert re.search(r"in gen of step 1 \(\d of 4 prompts of train are awaited: ", left.log)
    text = (left.folder / "checkpoints" / "stall" / "step_1.txt").read_text()
    assert "in compute_score" in text
    assert re.search(r"AgentLoopWorker\w* on .*, last finished: ", text)
    assert re.search(r"waits for reward: prompt \S+ row 1 response \d", text)


def test_a_queue_that_cannot_be_placed_is_named_with_what_it_wants(launch, tmp_path):
    def follow(_metrics):
        log = tmp_path / "train.log"
        return log.exists() and "which Ray has not placed" in log.read_text(errors="replace")

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
    assert re.search(
        r"stall: for \d+ s in start of step 0; .*no answer from SimpleStorageUnit, which Ray has not placed: it wants \{'CPU': 1.0",
        run.log,
    )
