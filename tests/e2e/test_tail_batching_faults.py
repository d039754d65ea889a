"""Tail batching on the real trainer when things go wrong: servers killed under two replicas with everything else switched on;
and group filtering while agent loops fail. Of every prompt that was begun the ledger says what became of it."""

import contextlib
import json
import signal
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import psutil
import pytest
import yaml

from rl_accel.compare.plan import plan_runs
from rl_accel.compare.recipe import load
from rl_accel.compare.runner import Stop, last_lines, ray_temp_dir, supervised

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

LOOPS = Path(__file__).parent / "loops"


@dataclass
class Left:
    """What a run left: its log, metrics by step, the ledger, and the rows of its data."""

    log: str
    steps: dict[int, dict[str, float]]
    ledger: list[dict]
    data: pd.DataFrame

    def numbers(self, name):
        return [metrics["rl_accel/tail_batching/" + name] for metrics in self.steps.values()]

    def settled(self, how):
        """Return row by prompt id of all that were ``trained``, ``rejected`` or ``failed``."""
        return {prompt_id: row for line in self.ledger for prompt_id, row in line[how].items()}


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def run(repo, workspace, clean_environment, tmp_path_factory):
    """``run(name, steps, loops, agent_name, *overrides, follow, reward)``: train on the recipe's rows, each with the agent
    loop that ``agent_name(index)`` names. In ``loops`` (entries of verl's agent_loop_config_path), in ``overrides`` and in
    ``reward`` (source of the reward module) ``{out}`` is a folder of the run's own. ``follow(metrics, ledger)`` is called
    a few times a second."""

    def run(name, steps, loops, agent_name, *overrides, follow=lambda metrics, ledger: None, reward=None):
        out = tmp_path_factory.mktemp(name)
        data = pd.read_parquet(workspace / "task" / "train.parquet").head(256)
        data["agent_name"] = [agent_name(index) for index in range(len(data))]
        data["data_source"] = [truth["ground_truth"] for truth in data["reward_model"]]
        data.to_parquet(out / "train.parquet")
        (out / "loops.yaml").write_text(yaml.safe_dump(loops).replace("{out}", str(out)))
        recipe_file = repo / "examples" / "verl_ppo_cpu" / "recipe.yaml"
        (plan,) = plan_runs(load(recipe_file), recipe_file.parent, workspace, arms=["stock"], steps=steps)
        command = [
            *plan.command,
            f"data.train_files={out / 'train.parquet'}",
            "data.shuffle=False",
            "data.max_response_length=160",
            "data.val_max_samples=4",
            "actor_rollout_ref.rollout.agent.num_workers=2",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={out / 'loops.yaml'}",
            f"trainer.default_local_dir={out / 'checkpoints'}",
            "+rl_accel.tail_batching.enable=True",
            *(item.replace("{out}", str(out)) for item in overrides),
        ]
        if reward is not None:
            (out / "reward.py").write_text(reward)
            command.append(f"reward.custom_reward_function.path={out / 'reward.py'}")
        metrics, log = out / "metrics.jsonl", out / "train.log"
        ledger = out / "checkpoints" / "tail_batching" / "ledger.jsonl"
        with ray_temp_dir() as ray_dir:
            environment = {
                **clean_environment,
                **{key: value for key, value in plan.env.items() if value is not None},
                "VERL_FILE_LOGGER_PATH": str(metrics),
                "PYTHONUNBUFFERED": "1",
                "PYTHONPATH": str(LOOPS),
                "RAY_TMPDIR": str(ray_dir),
            }
            outcome = supervised(
                command, environment, out, log, Stop(), lambda: bool(follow(metrics, read(ledger))), ray_dir
            )
        assert outcome.exit_code == 0, last_lines(log, 80)
        steps_logged = {r["step"]: r["data"] for r in read(metrics) if "training/global_step" in r["data"]}
        return Left(log.read_text(errors="replace"), steps_logged, read(ledger), data)

    return run


def kill_a_server(metrics):
    """SIGKILL to one rollout server of the run that logs to ``metrics``; whether there was one."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = process.environ().get("VERL_FILE_LOGGER_PATH") == str(metrics)
            if ours and "CPURolloutServer" in " ".join(process.cmdline()):
                process.send_signal(signal.SIGKILL)
                return True
    return False


def assert_sound(left, steps, prompts):
    """Every step trained a full batch, on samples of the weights it then updated."""
    assert list(left.steps) == [line["step"] for line in left.ledger] == list(range(1, steps + 1))
    assert "dtype mismatch" not in left.log
    assert "could not be cleared" not in left.log
    for metrics in left.steps.values():
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
        assert metrics["training/off_policy/trajectory_staleness/max"] == 0
        assert metrics["training/off_policy/trajectory_spans/max"] == 1
        assert 0 < metrics["actor/grad_norm"] < 1e4
    assert set(left.numbers("prompts_trained")) == {prompts}
    assert set(left.numbers("ghost_keys")) == {0.0}


class TestKilledServers:
    """Two replicas, critic, reference with KL, quotas, three kinds of agent loop, validation in between. One server is
    killed while it generates, one while the trainer trains."""

    P0, R0, STEPS, KILLS = 8, 2, 6, 21
    QUOTAS = {"digits": 5, "letters": 3}  # noqa: RUF012

    @pytest.fixture(scope="class")
    def left(self, run):
        loops = [
            {"name": "two_turns", "_target_": "tail_batching_loops.TwoTurns"},
            {
                "name": "kills_server",
                "_target_": "tail_batching_loops.KillsServer",
                "server": "hf_cpu_server_1",
                "folder": "{out}",
            },
        ]
        killed = []

        def follow(metrics, ledger):
            if len(ledger) >= 4 and not killed and kill_a_server(metrics):
                killed.append(True)

        def agent_name(index):
            return (
                "kills_server" if index == self.KILLS else ("tool_agent", "two_turns", "single_turn_agent")[index % 3]
            )

        left = run(
            "killed",
            self.STEPS,
            loops,
            agent_name,
            "trainer.n_gpus_per_node=2",
            f"data.train_batch_size={self.P0}",
            f"actor_rollout_ref.rollout.n={self.R0}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={self.P0}",
            "actor_rollout_ref.actor.use_kl_loss=True",
            f"critic.ppo_mini_batch_size={self.P0}",
            "trainer.test_freq=2",
            "+rl_accel.tail_batching.queue_threshold=3",
            "+rl_accel.tail_batching.domain_quotas={digits:5,letters:3}",
            follow=follow,
        )
        assert killed, "else nothing was killed while training"
        return left

    def test_training_goes_on_with_full_batches_and_equal_weights(self, left):
        assert_sound(left, self.STEPS, self.P0)
        for metrics in left.steps.values():
            assert 0 < metrics["critic/grad_norm"] < 1e4
        assert left.steps[1]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
        assert left.steps[self.STEPS]["actor/kl_loss"] > 0

    def test_what_the_dead_server_generated_is_generated_again_and_it_is_started_again(self, left):
        assert sum(left.numbers("responses_failed")) >= 2, "at least two were running on it"
        assert sum(left.numbers("prompts_failed")) == 0
        assert "rollout server hf_cpu_server_1 is dead, its requests go to the others" in left.log
        assert left.log.count("had died and was started again") == 2

    def test_every_prompt_is_trained_once(self, left):
        trained = left.settled("trained")
        assert len(trained) == sum(len(line["trained"]) for line in left.ledger) == self.P0 * self.STEPS
        assert left.settled("rejected") == left.settled("failed") == {}
        assert {prompt_id: int(prompt_id.split(":")[1]) - 1 for prompt_id in trained} == trained
        assert self.KILLS in trained.values()

    def test_every_batch_has_its_quotas(self, left):
        for line in left.ledger:
            domains = left.data["data_source"].iloc[list(line["trained"].values())]
            assert domains.value_counts().to_dict() == self.QUOTAS

    def test_agent_loops_of_several_turns_are_trained(self, left):
        found = set(left.data["agent_name"].iloc[list(left.settled("trained").values())])
        assert found == {"tool_agent", "two_turns", "single_turn_agent", "kills_server"}
        for step, metrics in left.steps.items():
            turns = (
                left.data["agent_name"]
                .iloc[list(left.ledger[step - 1]["trained"].values())]
                .map(lambda name: 4 if name == "two_turns" else 2)
            )
            assert metrics["num_turns/mean"] == pytest.approx(turns.mean())

    def test_validation_runs_in_between(self, left):
        validated = {step for step, metrics in left.steps.items() if any(name.startswith("val-") for name in metrics)}
        assert validated == {2, 4, 6}


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    wanted = str.isdigit if ground_truth == "digits" else str.isalpha
    share = sum(map(wanted, solution_str)) / max(len(solution_str), 1)
    # What the filter looks at. A run id of its own for each response, so only the rows named are constant.
    return {"score": share, "signal": 0.5 if extra_info["index"] % 5 == 2 else hash(solution_str) % 10**6 / 10**6}
"""


class TestFilterAndFailures:
    """Group filtering in short and long rounds, while some agent loops fail always and some once."""

    P0, R0, STEPS = 4, 2, 8
    ALWAYS, ONCE = (1, 10), (5, 13)

    @pytest.fixture(scope="class")
    def left(self, run):
        loops = [
            {"name": name, "_target_": "tail_batching_loops.Fails", "folder": "{out}", "once": name == "fails_once"}
            for name in ("fails_always", "fails_once")
        ]

        def agent_name(index):
            if index in self.ALWAYS:
                return "fails_always"
            return "fails_once" if index in self.ONCE else "single_turn_agent"

        return run(
            "filtered",
            self.STEPS,
            loops,
            agent_name,
            "algorithm.adv_estimator=grpo",
            "algorithm.filter_groups.enable=True",
            "algorithm.filter_groups.metric=signal",
            f"data.train_batch_size={self.P0}",
            f"actor_rollout_ref.rollout.n={self.R0}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={self.P0}",
            "+rl_accel.tail_batching.queue_threshold=2",
            reward=REWARD,
        )

    def test_batches_are_full_in_short_and_long_rounds(self, left):
        assert_sound(left, self.STEPS, self.P0)
        assert {line["kind"] for line in left.ledger} >= {"short", "long"}

    def test_of_every_prompt_begun_the_ledger_says_once_what_became_of_it(self, left):
        trained, rejected, failed = (left.settled(how) for how in ("trained", "rejected", "failed"))
        assert len(trained) == self.P0 * self.STEPS
        begun = len(trained) + len(rejected) + len(failed)
        lines = [
            prompt_id for line in left.ledger for how in ("trained", "rejected", "failed") for prompt_id in line[how]
        ]
        # Prompts are numbered as they are taken, so without a gap none was lost.
        assert sorted(lines, key=lambda prompt_id: int(prompt_id.split(":")[1])) == [f"1:{n + 1}" for n in range(begun)]

    def test_groups_without_signal_are_rejected_and_no_others(self, left):
        rejected = set(left.settled("rejected").values())
        assert rejected == {row for row in range(max(rejected) + 1) if row % 5 == 2}
        assert not [row for row in left.settled("trained").values() if row % 5 == 2]
        assert [len(line["rejected"]) for line in left.ledger] == left.numbers("prompts_rejected")

    def test_a_loop_that_always_fails_is_reported_after_its_retries_and_not_trained(self, left):
        assert set(left.settled("failed").values()) == set(self.ALWAYS)
        errors = {prompt_id: error for line in left.ledger for prompt_id, error in line["errors"].items()}
        assert errors == {f"1:{row + 1}": f"RuntimeError: no tool for row {row}" for row in self.ALWAYS}
        assert left.log.count("failed after its last retry and is not trained") == len(self.ALWAYS)
        assert [len(line["failed"]) for line in left.ledger] == left.numbers("prompts_failed")

    def test_a_loop_that_fails_once_is_retried_and_trained(self, left):
        assert set(self.ONCE) <= set(left.settled("trained").values())
        for row in self.ONCE:
            assert left.log.count(f"no tool for row {row}\n") >= 1
