"""Tests advice about the tensor-parallel size on slime. With SLIME_ROOT, on slime's own rollouts and a real SGLang server."""

import json
from types import SimpleNamespace

import httpx
import pytest

import rl_accel
from rl_accel.errors import ConfigError
from rl_accel.features import TpReplanFlags
from rl_accel.integrations.slime import custom_config, rollout_log, tp_replan
from rl_accel.parallel.tp_planner import STATE_FILE
from rl_accel.telemetry import server_counters

ON = TpReplanFlags(enable=True)
RISE = [12] * 6 + [60] * 2
"""Retractions of rollouts, the last of which is enough for a decision."""


def test_bounds_come_from_the_cluster_the_model_and_the_flags(arguments_of):
    def sizes(flags=ON, **changes):
        return tp_replan.bounds_of(arguments_of(**changes), flags).sizes

    assert sizes() == (1, 2, 4)
    assert sizes(rollout_num_gpus=16, num_gpus_per_node=8) == (1, 2, 4), "the model has 4 heads"
    assert sizes(TpReplanFlags(enable=True, max_tp=2)) == (1, 2)
    assert sizes(sglang_pp_size=2, rollout_num_gpus_per_engine=2) == (1, 2)
    with pytest.raises(ConfigError, match=r"possible on 4 GPUs: .*TP 4: is below min_tp = 8"):
        sizes(TpReplanFlags(enable=True, min_tp=8))


@pytest.fixture
def cluster(monkeypatch):
    """A router that lists servers by ``ids``, each of which has counted to ``count``; what is None does not answer."""
    state = SimpleNamespace(ids=["a"], count=0)

    def fetch(url):
        if url.endswith("/workers") and state.ids is not None:
            return json.dumps({"workers": [{"id": name, "url": "http://server"} for name in state.ids]})
        if url.endswith("/metrics") and state.count is not None:
            return f"sglang:num_retracted_requests_total {state.count}\n"
        raise OSError("no answer")

    monkeypatch.setattr(tp_replan, "fetch_page", fetch)
    monkeypatch.setattr(server_counters, "fetch_page", fetch)
    return state


@pytest.fixture
def play(arguments_of, cluster):
    """``play(**arguments)``: ``rollout(number, preemptions)`` logs a rollout in which servers counted so many more."""

    def make(**changes):
        content = custom_config.make(["tp_replan"], {})
        args = arguments_of(**content, sglang_router_ip="router", sglang_router_port=1, **changes)

        def rollout(number, preemptions=0, **metrics):
            if cluster.count is not None:
                cluster.count += preemptions
            samples = [SimpleNamespace(response_length=50)] * 20
            assert rollout_log.log(number, args, samples, metrics, 10.0) is False, "slime goes on to log"
            ours = {name: value for name, value in metrics.items() if tp_replan.PREFIX in name}
            return {name.removeprefix(tp_replan.PREFIX): value for name, value in ours.items()}

        return SimpleNamespace(args=args, rollout=rollout)

    return make


def test_advice_is_one_line_and_asked_for_once(play, caplog):
    run = play(sglang_pp_size=2, rollout_num_gpus_per_engine=2)
    numbers = [run.rollout(number, count) for number, count in enumerate([*RISE, 60])]
    assert [logged["wanted_tp"] for logged in numbers] == [1] * 7 + [2, 1]
    assert numbers[7] == {"tp": 1.0, "wanted_tp": 2.0, "preemptions": 60.0, "changes": 0.0}
    (line,) = [line for line in caplog.messages if "advice" in line]
    assert "advice after rollout 7: raise TP 1 to 2" in line
    assert line.endswith("for the next launch: --rollout-num-gpus-per-engine 4"), "two stages of two"


def test_after_disable_a_run_counts_from_the_start_of_its_servers(play):
    run = play()
    assert [run.rollout(number, 5)["preemptions"] for number in range(2)] == [5.0, 5.0]
    rl_accel.disable()
    assert run.rollout(2, 5)["preemptions"] == 15.0


@pytest.mark.parametrize(("absent", "words"), [("ids", "router:1/workers: "), ("count", "server/metrics: no answer")])
def test_what_does_not_answer_is_unknown_in_one_line_and_decides_nothing(play, cluster, caplog, absent, words):
    setattr(cluster, absent, None)
    run = play()
    assert [run.rollout(number) for number in range(8)] == [{"tp": 1.0, "wanted_tp": 1.0, "changes": 0.0}] * 8
    assert sum(f"preemptions are unknown, http://{words}" in line for line in caplog.messages) == 1


def test_preemptions_are_those_of_the_rollout_and_unknown_if_a_server_was_started_anew(play, cluster):
    run = play()
    assert run.rollout(0, 5)["preemptions"] == 5.0
    cluster.ids = ["b"]
    assert "preemptions" not in run.rollout(1, 5)
    assert run.rollout(2, 3)["preemptions"] == 3.0
    cluster.count += 100
    assert rollout_log.log_evaluation(2, run.args, {}, {}) is False
    assert run.rollout(3, 2)["preemptions"] == 2.0, "not those of the evaluation"


def test_the_next_launch_goes_on_with_what_this_one_saw(play, tmp_path):
    run = play(save=str(tmp_path))
    for number, count in enumerate(RISE):
        run.rollout(number, count)
    step, *_ = json.loads((tmp_path / STATE_FILE).read_text())["steps"]
    assert step == {"step": 0, "kind": "all", "tp": 1, "preemptions": 12, "rollout_seconds": 10.0, "tokens": 1000}
    following = play(save=str(tmp_path), rollout_num_gpus_per_engine=2)
    assert following.rollout(len(RISE))["changes"] == 1, "what was advised is what it runs at"


def test_without_engines_there_is_nothing_to_say(play):
    assert play(load_debug_rollout_data="/data/{rollout_id}.pt").rollout(0) == {}


@pytest.fixture
def train(start, serve, monkeypatch):
    """``train(features, **arguments)``: ``rollout(number, prompts)`` makes a rollout and returns what slime logs of it."""

    def make(features=("tp_replan",), **changes):
        from slime.observability import logging_utils, rollout_metrics

        logged = []
        monkeypatch.setattr(logging_utils, "log", lambda args, metrics, step_key: logged.append(metrics))
        gpus = {"rollout_num_gpus": 4, "num_gpus_per_node": 4, "load_debug_rollout_data": None}
        content = custom_config.make(features, {}) | changes
        args, _, make_rollout = start(serve(max_total_tokens=320), rollout_shuffle=True, **gpus, **content)

        def rollout(number, prompts=8):
            args.rollout_batch_size = args.over_sampling_batch_size = prompts
            output = make_rollout(number)
            samples = [sample for group in output.samples for sample in group]
            rollout_metrics.log_rollout_data(number, args, samples, output.metrics, 1.0)
            return logged[-1]

        return rollout

    return make


@pytest.mark.slow
def test_retractions_are_counted_as_the_server_counts_them(train, serve):
    # Four whole responses fit into the memory. Of 32, SGLang lets six begin, and has to retract one.
    rollout = train(custom_generate_function_path="slime_test_plugins.whole")
    url, found = serve(max_total_tokens=320), []

    def retracted():
        lines = httpx.get(f"{url}/metrics", timeout=None).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("sglang:num_retracted_requests_total"))

    for number, prompts in enumerate((1, 1, 8, 8)):
        before, logged = retracted(), rollout(number, prompts)
        found.append(logged["rl_accel/tp_replan/preemptions"])
        assert found[-1] == retracted() - before
        assert "rollout/response_len/mean" in logged, "slime's own numbers are there"
    assert found[:2] == [0, 0]
    assert sum(found) > 0


@pytest.mark.slow
def test_numbers_of_another_feature_arrive_with_ours(train, end_grading, monkeypatch):
    from rl_accel.integrations.slime.reward_timeout import rm_hook

    monkeypatch.setattr(rm_hook, "_collect", lambda *_: {"reward_timeout/executions": 32.0})  # no Ray here, no store
    features = ("tp_replan", "reward_timeout", "tail_batching")
    numbers = train(features, custom_rm_path="slime_test_graders.awaiting")(0)
    assert numbers["rl_accel/reward_timeout/executions"] == 32
    assert numbers["rl_accel/tail_batching/prompts_trained"] == 8
    assert numbers["rl_accel/tp_replan/tp"] == 1
