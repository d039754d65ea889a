"""Advice about the tensor-parallel size on slime. With SLIME_ROOT: slime's own rollouts and log, over HTTP from the CPU server."""

import asyncio
import http.server
import json
import threading
from types import SimpleNamespace

import pytest

from rl_accel.integrations.slime import custom_config, rollout_log
from rl_accel.integrations.slime.tp_replan import CONFIG_FILE, STATE_FILE, replan
from rl_accel.integrations.slime.tp_replan.layout import layout_of
from rl_accel.runtime import RUNTIME

QUICK = {"enable": True, "confirm_steps": 1, "least_reference": 1.0}


@pytest.fixture(autouse=True)
def anew():
    """Flags and the planner of a test end with it."""
    yield
    RUNTIME.clear()
    replan._running = None


# What goes in and comes out of a rollout


class Cluster:
    """A router and its servers in one: ``/workers`` lists ``ids``, ``/metrics`` has ``counts``; what is None is not there."""

    def __init__(self):
        self.ids, self.count = ["a"], 0


@pytest.fixture
def cluster():
    state = Cluster()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = None
            if self.path == "/workers" and state.ids is not None:
                body = json.dumps({"workers": [{"id": each, "url": state.url} for each in state.ids]})
            if self.path == "/metrics" and state.count is not None:
                body = f"sglang:num_retracted_requests_total {state.count}\n"
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write((body or "").encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state.host, state.port = "127.0.0.1", server.server_port
    state.url = f"http://{state.host}:{state.port}"
    yield state
    server.shutdown()
    server.server_close()


@pytest.fixture
def play(arguments_of, cluster):
    """``play(**arguments)``: ``rollout(number, preemptions)`` logs a rollout in which servers counted so many more."""

    def make(flags=None, **changes):
        content = custom_config.make(["tp_replan"], {"tp_replan": {**QUICK, **(flags or {})}})
        args = arguments_of(**content, sglang_router_ip=cluster.host, sglang_router_port=cluster.port, **changes)

        def rollout(number, preemptions=0, **metrics):
            if cluster.count is not None:
                cluster.count += preemptions
            samples = [SimpleNamespace(response_length=50)] * 20
            assert rollout_log.log(number, args, samples, metrics, 10.0) is False, "slime goes on to log"
            return {name.removeprefix(replan.PREFIX): value for name, value in metrics.items() if replan.PREFIX in name}

        return SimpleNamespace(args=args, rollout=rollout)

    return make


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "rl_accel"]


def test_advice_is_one_line_and_asked_for_once(play, caplog):
    run = play()
    found = [run.rollout(number, count) for number, count in enumerate((2, 2, 2, 60, 60))]
    assert [numbers["wanted_tp"] for numbers in found] == [1, 1, 1, 2, 1]
    assert found[3] == {"tp": 1.0, "wanted_tp": 2.0, "preemptions": 60.0}
    (line,) = [line for line in lines(caplog) if "advice" in line]
    assert "advice after rollout 3: raise TP 1 to 2: preemptions are 30.00 times their reference" in line
    assert line.endswith("for the next launch: --rollout-num-gpus-per-engine 2"), "there is no --save to write to"


def test_metrics_that_are_off_are_unknown_in_one_line_and_decide_nothing(play, cluster, caplog):
    cluster.count = None
    run = play()
    for number in range(8):
        assert run.rollout(number) == {"tp": 1.0, "wanted_tp": 1.0}
    (line,) = [line for line in lines(caplog) if "unknown, " in line and "memory" not in line]
    assert f"preemptions are unknown, {cluster.url}/metrics: HTTP Error 404" in line


def test_a_router_that_does_not_answer_is_unknown_in_one_line(play, cluster, caplog):
    cluster.ids = None
    run = play()
    assert [run.rollout(number) for number in (0, 1)] == [{"tp": 1.0, "wanted_tp": 1.0}] * 2
    assert sum(f"{cluster.url}/workers: " in line for line in lines(caplog)) == 1


def test_a_server_that_was_started_anew_makes_its_rollout_unknown(play, cluster):
    run = play()
    assert run.rollout(0, 5)["preemptions"] == 5.0
    cluster.ids = ["b"]
    assert "preemptions" not in run.rollout(1, 5)
    assert run.rollout(2, 3)["preemptions"] == 3.0


def test_what_an_evaluation_costs_is_not_of_the_next_rollout(play, cluster):
    run = play()
    run.rollout(0, 2)
    cluster.count += 100
    assert rollout_log.log_evaluation(0, run.args, {}, {}) is False
    assert run.rollout(1, 2)["preemptions"] == 2.0


def test_round_kind_and_tokens_come_from_tail_batching_where_it_is_on(play, monkeypatch):
    seen, step = [], replan.TpPlanner.step
    monkeypatch.setattr(replan.TpPlanner, "step", lambda self, one: seen.append(one) or step(self, one))
    run = play()
    tail = "rl_accel/tail_batching/"
    run.rollout(0)
    run.rollout(1, **{tail + "short_round": 1.0, tail + "long_round": 0.0, tail + "tokens_generated": 1234.0})
    run.rollout(2, **{tail + "short_round": 0.0, tail + "long_round": 1.0})
    assert [(one.kind, one.tokens) for one in seen] == [("all", 1000), ("short", 1234), ("long", 1000)]
    assert {one.rollout_seconds for one in seen} == {10.0}


def test_what_is_known_is_kept_for_a_launch_that_goes_on_and_not_for_a_new_run(play, tmp_path):
    def changes():
        return json.loads((tmp_path / STATE_FILE).read_text())["planner"]["changes"]

    run = play(save=str(tmp_path))
    for number, count in enumerate((2, 2, 2, 60)):
        run.rollout(number, count)
    play(save=str(tmp_path), rollout_num_gpus_per_engine=2).rollout(4)
    assert changes() == 1, "what was advised is what it runs at"
    play(save=str(tmp_path), rollout_num_gpus_per_engine=2).rollout(0)
    assert changes() == 0


def test_without_engines_there_is_nothing_to_say(play):
    assert play(load_debug_rollout_data="/data/{rollout_id}.pt").rollout(0) == {}


# Real rollouts


@pytest.fixture
def train(slime_args, serve, slime_root, monkeypatch):
    """``train(seed)``: ``rollout(number, prompts)`` makes one with slime's own function and returns what slime logs of it."""
    from slime.observability import logging_utils, rollout_metrics
    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils.misc import load_function

    GenerateState.clear_instances()  # it keeps the arguments of the run before
    logged = []
    monkeypatch.setattr(logging_utils, "log", lambda args, metrics, step_key: logged.append(metrics))
    stock = "slime.rollout.sglang_rollout.generate_rollout"
    usual = {
        "rollout_function_path": stock,
        "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer",
        "rollout_num_gpus": 4,
        "rollout_num_gpus_per_engine": 1,
        "num_gpus_per_node": 4,
        "sglang_pp_size": 1,
        "prefill_num_servers": None,
        "sglang_config": None,
        "load_debug_rollout_data": None,
        "wandb_always_use_train_step": False,
        "sglang_speculative_algorithm": None,
        "advantage_estimator": "grpo",
    }

    def make(seed, features=("tp_replan",), flags=None, **changes):
        content = custom_config.make(features, {"tp_replan": QUICK, **(flags or {})})
        options = ("--max-running-requests", "256", "--context-length", "512", "--kv-tokens", "600")
        args = slime_args(serve(*options, "--random-seed", seed), **{**usual, **content, **changes})
        source = load_function(args.data_source_path)(args)

        def rollout(number, prompts=8):
            args.rollout_batch_size = args.over_sampling_batch_size = prompts
            output = load_function(args.rollout_function_path)(args, number, source)
            samples = [sample for group in output.samples for sample in group]
            rollout_metrics.log_rollout_data(number, args, samples, output.metrics, 1.0)
            return logged[-1]

        return SimpleNamespace(args=args, rollout=rollout)

    return make


@pytest.mark.slow
def test_retractions_that_rise_are_advised_about_once_in_a_file_that_slime_reads(train, slime_root, tmp_path, caplog):
    from slime.backends.sglang_utils.sglang_config import SglangConfig

    run = train("1")
    found = [run.rollout(number, 1 if number < 3 else 8) for number in range(5)]
    assert [numbers["rl_accel/tp_replan/preemptions"] for numbers in found[:3]] == [0, 0, 0]
    assert found[3]["rl_accel/tp_replan/preemptions"] > 5
    assert [numbers["rl_accel/tp_replan/wanted_tp"] for numbers in found] == [1, 1, 1, 2, 1]
    assert all("rollout/response_len/mean" in numbers for numbers in found), "slime's own numbers are there"
    file = tmp_path / "checkpoints" / CONFIG_FILE
    (line,) = [line for line in lines(caplog) if "advice" in line]
    assert line.endswith(f"for the next launch: --sglang-config {file} --rollout-num-gpus-per-engine 2")
    assert [each.name for each in file.parent.glob("rl_accel_*")].count(CONFIG_FILE) == 1
    (model,) = SglangConfig.from_yaml(str(file)).models
    model.resolve(run.args)
    ((group,), engines) = model.server_groups, 4 // 2
    assert (group.worker_type, group.num_gpus, group.num_gpus // group.num_gpus_per_engine) == ("regular", 4, engines)
    assert model.update_weights is True
    following = train("1", sglang_config=str(file), rollout_num_gpus_per_engine=2)
    assert layout_of(following.args).tp == 2
    assert following.rollout(5, 1)["rl_accel/tp_replan/tp"] == 2.0


@pytest.mark.slow
def test_a_file_that_slime_would_refuse_is_not_written(train, config_file, tmp_path, caplog):
    run = train(
        "2", sglang_config=config_file({"worker_type": "regular", "num_gpus": 4}), rollout_num_gpus=8
    )  # slime itself stops here
    (tmp_path / "checkpoints").mkdir()
    file = tmp_path / "checkpoints" / CONFIG_FILE
    file.write_text("what was there")
    for number in range(4):
        run.rollout(number, 1 if number < 3 else 8)
    (line,) = [line for line in lines(caplog) if "advice" in line]
    assert f"no file: {file} could not be written: it has 4 GPUs, and --rollout-num-gpus is 8" in line
    assert file.read_text() == "what was there"
    assert sorted(each.name for each in file.parent.iterdir()) == [CONFIG_FILE, STATE_FILE]


@pytest.fixture
def graded(slime_root):
    """What grades in a test ends with it."""
    from rl_accel.integrations.slime.reward_timeout.rm_hook import OPEN

    yield
    for loop, grading in list(OPEN.items()):
        asyncio.run_coroutine_threadsafe(grading.close(), loop).result(30)
    OPEN.clear()


@pytest.mark.slow
@pytest.mark.parametrize("features", [("tp_replan", "reward_timeout"), ("reward_timeout",)])
def test_numbers_of_another_feature_arrive_with_ours_and_without(train, graded, features):
    flags = {"reward_timeout": {"grader": "slime_test_graders.awaiting"}}
    found = train(
        "3", (*features, "tail_batching"), flags | ({} if "tp_replan" in features else {"tp_replan": {}})
    ).rollout(0)
    assert found["rl_accel/reward_timeout/executions"] >= 32
    assert found["rl_accel/tail_batching/prompts_trained"] == 8
    assert ("rl_accel/tp_replan/tp" in found) is ("tp_replan" in features)
