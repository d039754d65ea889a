"""Tests slime's arguments with our flags: conflicts are named, and the launch line loses nothing. Needs no slime."""

import json
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

import rl_accel
from rl_accel.errors import ConfigError
from rl_accel.features import REWARD_TIMEOUT, SAMPLER, SLIME_ROLLOUT, TAIL_BATCHING
from rl_accel.integrations.slime import custom_config, hooks, launch_line, reward_timeout, tail_batching
from rl_accel.integrations.slime.rollout_log import log

RUN = {"rollout_global_dataset": True, "partial_rollout": False, "buffer_filter_path": None, "num_epoch": 3}
RUN |= {"over_sampling_batch_size": 8, "rollout_batch_size": 8, "n_samples_per_prompt": 4, "num_rollout": None}
RUN |= {"dynamic_sampling_filter_path": None, "prompt_data": "/data/math.jsonl", "rollout_shuffle": True}
FINE = {
    "tail_batching": {**TAIL_BATCHING.slime.arguments, **RUN, "rollout_seed": 7},
    "reward_timeout": {"rollout_sample_hook_path": ["my.hook", reward_timeout.SAMPLE_HOOK]},
}
CHECKS = {
    "tail_batching": (tail_batching.check, TAIL_BATCHING.flags),
    "reward_timeout": (reward_timeout.check, REWARD_TIMEOUT.flags),
}
TAIL_ON = TAIL_BATCHING.flags(enable=True)
DISTILLATION = "slime.rollout.on_policy_distillation.reward_func"
GRADER = {"settings": {"reward_timeout": {"grader": "other.rm"}}}
TWO_FILES = "--custom-config-path my.yaml --custom-config-path=ours.yaml"
ONE_FILE = r"one --custom-config-path, found my\.yaml and ours\.yaml: put their keys into one"
GAE_IDLE = "rl-accel: gae has nothing to do here: it serves --advantage-estimator ppo, found "
ADVANTAGES_IDLE = (
    "rl-accel: advantages has nothing to do here: it serves --advantage-estimator reinforce_plus_plus, found "
)
AFTER = "called after ours"
LOG_AFTER = f"log-function-path own.log is {AFTER}"
OWN_INIT = "--custom-megatron-init-path own.init"
NONE_COMPUTED = {"advantage_estimator": "ppo", "compute_advantages_and_returns": False}
DISABLED = "compute-advantages-and-returns is set"
OWN = {"advantage_estimator": "ppo", "custom_advantage_function_path": "my.adv"}


@pytest.mark.parametrize(
    ("feature", "change", "message"),
    [
        ("tail_batching", {"partial_rollout": True}, "--partial-rollout = unset, found True .*strictly on-policy"),
        ("tail_batching", {"over_sampling_batch_size": 16}, "--over-sampling-batch-size = unset, found 16 .*prompt_r"),
        ("tail_batching", {"buffer_filter_path": "my.filter"}, r"--buffer-filter-path = unset, found my\.filter"),
        ("tail_batching", {"rollout_global_dataset": False}, "--disable-rollout-global-dataset = unset"),
        ("tail_batching", {"rollout_function_path": "my.own"}, r"rollout-function-path = rl_accel\..*, found my\.own"),
        ("tail_batching", {"flags": {"enable": False}}, r"rl_accel\.tail_batching\.enable is not set"),
        (
            "reward_timeout",
            {"rollout_sample_hook_path": ["my.hook"]},
            r"_path = a list with rl_accel.*found \['my\.hook'\]",
        ),
        (
            "reward_timeout",
            {"flags": {"grader": reward_timeout.RM_HOOK}},
            "grader = the one that --custom-rm-path named",
        ),
        ("reward_timeout", {"flags": {"grader": DISTILLATION}}, "found slime's on-policy distillation"),
        ("reward_timeout", {"flags": {"enable": False}}, r"rl_accel\.reward_timeout\.enable is not set"),
    ],
)
def test_a_conflict_is_named(arguments_of, feature, change, message):
    check, flags = CHECKS[feature]
    check(arguments_of(**FINE[feature]), flags(enable=True))
    wrong = {**FINE[feature], **change}
    wanted = flags(**{"enable": True, **wrong.pop("flags", {})})
    with pytest.raises(ConfigError, match=message):
        check(arguments_of(**wrong), wanted)


def test_a_run_of_tail_batching_follows_slimes_and_has_prompts_enough(arguments_of):
    args = arguments_of(**FINE["tail_batching"])
    run = tail_batching.run_of(args, TAIL_ON, 100, "rows")
    assert (run.prompts_per_step, run.responses_per_prompt, run.filter_groups) == (8, 4, False)
    assert run.data_id == "math.jsonl 100 shuffle=True seed=7"
    assert tail_batching.last_rollout(args, 100) == 36
    assert tail_batching.last_rollout(arguments_of(**{**FINE["tail_batching"], "num_rollout": 5}), 100) == 5
    with pytest.raises(ConfigError, match="at least --rollout-batch-size, 8, found 7"):
        tail_batching.run_of(args, TAIL_ON, 7, "rows")


@pytest.fixture
def launched(arguments_of, monkeypatch):
    """``launched(features, line, settings={}, script="train.py", **given)``: slime's arguments under the file of ``slime-config``.

    The functions of a module ``own`` note their calls in ``args.calls``.
    """

    def make(features, line="", settings=None, script="train.py", **given):
        own = ModuleType("own")
        own.calls = []
        own.init = lambda args: (own.calls.append("init"), hooks.megatron_init(args))
        own.Source = lambda args: own.calls.append("source") or "the source"
        own.rm = lambda args, sample: 1.0
        own.log = lambda *given: own.calls.append(len(given)) or True
        monkeypatch.setitem(sys.modules, "own", own)
        monkeypatch.setitem(launch_line.STOCK, "data_source_path", "own.Source")
        monkeypatch.setattr(sys, "argv", [script, *line.split()])
        args = arguments_of(**{**FINE["tail_batching"], **launch_line.STOCK, "advantage_estimator": "grpo", **given})
        args.rollout_sample_hook_path = given.get("rollout_sample_hook_path")
        vars(args).update(custom_config.make(features, settings or {}), calls=own.calls)
        return args

    return make


@pytest.mark.parametrize(
    ("feature", "given", "says"),
    [
        ("reward_timeout", {"line": "--rm-type math"}, None),
        (
            "reward_timeout",
            {"custom_rm_path": "own.rm"},
            "--custom-rm-path own.rm is now rl_accel.reward_timeout.grader",
        ),
        ("reward_timeout", {"rollout_sample_hook_path": ["my.hook"]}, None),
        ("reward_timeout", {"custom_rollout_log_function_path": "own.log"}, f"--custom-rollout-{LOG_AFTER}"),
        ("reward_timeout", {"line": "--data-source-path own.Source"}, None),
        ("reward_timeout", {"rollout_function_path": "my.rollout", "eval_function_path": "my.eval"}, None),
    ],
)
def test_what_a_launch_line_names_is_kept_and_a_line_says_what_was_moved(launched, caplog, feature, given, says):
    args = launched([feature], **given)
    assert hooks.data_source(args) == "the source"
    assert caplog.messages == ([f"rl-accel: {says}"] if says else [])
    for key, ours in custom_config.SLIME_ARGUMENTS[feature].items():
        assert getattr(args, key) == ([*given.get(key, []), *ours] if isinstance(ours, list) else ours)
    assert hooks.flags_of(args)[REWARD_TIMEOUT].grader == given.get("custom_rm_path")
    for key in {"rollout_function_path", "eval_function_path"} & {*given}:
        assert getattr(args, key) == given[key]
    if "own.log" in given.values():
        args.rl_accel = None  # no grader to ask
        assert log(0, args, [], {}, 1.0) is True, "slime is told what theirs returned"
        assert args.calls[1:] == [5]


@pytest.mark.parametrize(
    ("feature", "given", "message"),
    [
        ("tail_batching", {"rollout_function_path": "my.own"}, r"--rollout-function-path = unset, found my\.own"),
        ("tail_batching", {"line": "--data-source-path=my.Source"}, r"--data-source-path = unset, found my\.Source"),
        ("tail_batching", {"partial_rollout": True}, "--partial-rollout = unset"),
        ("reward_timeout", {"custom_rm_path": "my.rm", **GRADER}, r"--custom-rm-path = other\.rm, found my\.rm"),
        ("drafts", {"line": "--sglang-speculative-algorithm EAGLE"}, "-speculative-algorithm = NGRAM, found EAGLE"),
        ("drafts", {"line": "--sglang-speculative-algo=EAGLE"}, "-speculative-algorithm = NGRAM, found EAGLE"),
        ("drafts", {"sglang_speculative_num_steps": 3}, "--sglang-speculative-num-steps = unset, found 3"),
        ("tail_batching", {"line": TWO_FILES}, ONE_FILE),
        ("reward_timeout", {"custom_rm_path": DISTILLATION}, "wants grader = a grader that"),
        ("reward_timeout", {"custom_rm_path": "does.not.exist"}, "wants grader = a fun.*No module named 'does'"),
        ("reward_timeout", {"settings": {"reward_timeout": {"grader": "own.gone"}}}, "grader = a fun.*'gone'"),
        ("tail_batching", {"prompt_data": None}, "wants --prompt-data = a data set, found None"),
        ("tail_batching", {"script": "/root/slime/train_async.py"}, r"= train\.py, found train_async\.py"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_a_rollout(launched, feature, given, message):
    with pytest.raises(ConfigError, match=message):
        hooks.data_source(launched([feature], **given))


def test_a_file_that_is_named_twice_is_one_file():
    words = ["--custom-config-path", "my.yaml", "--custom-config-path=./my.yaml"]
    assert launch_line.read_flags(words) == {"custom_config_path": "./my.yaml"}


FITS = r"\(rl-accel slime-config writes a file that fits the flags\)"


@pytest.mark.parametrize(
    ("features", "variable", "change", "message"),
    [
        (["sampler"], "drafts", {}, "drafts wants sglang_speculative_algorithm of .* = NGRAM, found None"),
        (["sampler"], "gae", {}, r"gae wants custom_megatron_init_path of .* = rl_accel.*\.megatron_init, found None"),
        (["drafts"], "", {"rl_accel": {"drafts": {"enable": True, "max_tokens": 4}}}, "tokens of .* = 5, found 9"),
        (["gae", "sampler"], "", {"custom_megatron_init_path": None}, "gae wants custom_megatron_init_path of"),
        (["gae", "sampler"], "", {"custom_megatron_init_path": "my.init"}, ""),  # it may call ours
        (["sampler"], "auto", {}, ""),
    ],
)
def test_a_flag_whose_arguments_the_file_lacks_is_named(launched, monkeypatch, features, variable, change, message):
    monkeypatch.setenv("RL_ACCEL", variable)
    args = launched(features)
    vars(args).update(change)
    if not message:
        assert hooks.data_source(args) == "the source"
        return
    with pytest.raises(ConfigError, match=rf"rl_accel\.{message}.*{FITS}" if "wants" in message else message):
        hooks.data_source(args)


NO_ABORT = (
    "slime aborts no request without --dynamic-sampling-filter-path or an --over-sampling-batch-size above --roll"
)
FINE_TUNED = {"rollout_function_path": launch_line.FINE_TUNING}
DURING_ROLLOUTS = ["sampler", "reward_timeout", "drafts"]


@pytest.mark.parametrize(
    ("features", "given", "idle", "reason"),
    [
        (["gae", "advantages", "sampler"], {"debug_rollout_only": True}, ["gae", "advantages"], "--debug-rollout-only"),
        (DURING_ROLLOUTS, {"debug_train_only": True}, DURING_ROLLOUTS, "--debug-train-only generates nothing"),
        (DURING_ROLLOUTS, {"load_debug_rollout_data": "x"}, DURING_ROLLOUTS, "--load-debug-rollout-data generates no"),
        (DURING_ROLLOUTS, FINE_TUNED, DURING_ROLLOUTS, f"--rollout-function-path {launch_line.FINE_TUNING} generates"),
        (["sampler"], {"over_sampling_batch_size": 8}, ["sampler"], NO_ABORT),
        (["sampler"], {"over_sampling_batch_size": None}, ["sampler"], NO_ABORT),
        (["sampler"], {"rollout_function_path": launch_line.FULLY_ASYNC}, ["sampler"], ".* aborts no request"),
        (
            ["sampler", "tail_batching"],
            {"over_sampling_batch_size": 8},
            ["sampler"],
            "tail_batching aborts requests it",
        ),
        (["sampler"], {}, [], ""),
        (["sampler"], {"over_sampling_batch_size": 8, "dynamic_sampling_filter_path": "my.filter"}, [], ""),
        (["sampler"], {"over_sampling_batch_size": 8, "rollout_function_path": "my.rollout"}, [], ""),
        (["reward_timeout", "drafts"], {"over_sampling_batch_size": 8}, [], ""),
    ],
)
def test_features_that_have_nothing_to_do_in_rollouts_say_so_in_a_line(
    launched, monkeypatch, caplog, features, given, idle, reason
):
    monkeypatch.setitem(
        sys.modules["rl_accel.integrations.slime.hooks"].__dict__, "function_at", lambda _: lambda _: "s"
    )
    hooks.data_source(launched(features, **{"over_sampling_batch_size": 16, **given}))
    said = [message for message in caplog.messages if "nothing to do" in message]
    assert len(said) == len(idle)
    for name, message in zip(idle, said, strict=True):
        assert re.match(f"rl-accel: {name} has nothing to do here: {reason}", message)


@pytest.mark.parametrize(
    ("features", "generate", "requested"),
    [
        ({"auto": True}, None, "automatically"),
        ({"auto": True}, "my.turns", "off"),
        ({"auto": True, "sampler": {"enable": True}}, "my.turns", "by name"),
        ({"sampler": {"enable": True}}, None, "by name"),
    ],
)
def test_sampler_stays_off_where_an_abort_is_not_the_end_unless_named(launched, caplog, features, generate, requested):
    caplog.set_level("INFO", logger="rl_accel")
    args = launched(["sampler"], custom_generate_function_path=generate)
    args.rl_accel = features
    assert hooks.data_source(args) == "the source"
    assert rl_accel.status()["sampler"].requested == requested
    assert hooks.flags_of(args)[SAMPLER].enable == {"off": False, "by name": True}.get(requested)
    line = "sampler stays off with --custom-generate-function-path; rl_accel.sampler.enable turns it on"
    assert (line in caplog.text) == (requested == "off")


def test_tail_batching_sets_its_arguments(launched, monkeypatch):
    args = launched(["tail_batching"], eval_function_path="my.eval")
    monkeypatch.setattr(hooks, "function_at", lambda path: lambda args: path)
    assert hooks.data_source(args) == TAIL_BATCHING.slime.arguments["data_source_path"]
    assert (args.rollout_function_path, args.eval_function_path) == (SLIME_ROLLOUT, "my.eval")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, [f"{GAE_IDLE}grpo", f"{ADVANTAGES_IDLE}grpo"]),
        ({"advantage_estimator": "ppo"}, [f"{ADVANTAGES_IDLE}ppo"]),
        (
            NONE_COMPUTED,
            [f"rl-accel: {name} has nothing to do here: --disable-" + DISABLED for name in ("gae", "advantages")],
        ),
        ({"advantage_estimator": "reinforce_plus_plus", "rank": 0}, [f"{GAE_IDLE}reinforce_plus_plus"]),
        (OWN, [f"{idle}--custom-advantage-function-path my.adv in its place" for idle in (GAE_IDLE, ADVANTAGES_IDLE)]),
        ({"rank": 1}, []),
        (
            {"advantage_estimator": "ppo", "line": OWN_INIT},
            [f"{ADVANTAGES_IDLE}ppo", f"rl-accel: {OWN_INIT} is {AFTER}"],
        ),
    ],
)
def test_the_hook_of_megatron_says_what_has_nothing_to_do_and_calls_that_of_the_line(launched, caplog, given, said):
    args = launched(["gae", "advantages"], **given)
    hooks.megatron_init(args)
    assert list(dict.fromkeys(caplog.messages)) == said
    assert args.calls == (["init"] if "line" in given else [])
    caplog.clear()
    args.rl_accel = {"auto": True}
    hooks.megatron_init(args)
    assert "nothing to do" not in caplog.text


@pytest.mark.slow
def test_a_ray_process_knows_the_words_of_its_jobs_launch_line(python, ray_address):
    words = ["--a", 'a "b" c', "--b", "it's", '--c={"d": 1}', "--e", "", "--data-source-path=my.Source"]
    done = python(
        f"""
import json, os, sys
if len(sys.argv) == 1:
    os.execv(sys.executable, [sys.executable, __file__, *{words!r}])
import ray
from rl_accel.integrations.slime.launch_line import flags_of_this_job
ray.init(address={ray_address!r})
print(json.dumps(ray.get(ray.remote(num_cpus=0)(flags_of_this_job).remote())))
"""
    )
    found = {
        launch_line.SCRIPT: "script.py",
        "a": 'a "b" c',
        "b": "it's",
        "c": '{"d": 1}',
        "e": "",
        "data_source_path": "my.Source",
    }
    assert json.loads(done.stdout.splitlines()[-1]) == found, done.stderr


@pytest.mark.parametrize(("given", "requested"), [({"sampler": True}, "by name"), ({}, "off"), (None, "off")])
def test_after_disable_the_flags_of_the_next_run_count_again(monkeypatch, given, requested):
    monkeypatch.setenv("RL_ACCEL_CONFIG", "sampler: true")
    args = SimpleNamespace(rl_accel=given)
    for _ in range(2):
        rl_accel.disable()
        assert hooks.flags_of(args).requested(SAMPLER) == requested
        assert rl_accel.status()["sampler"].requested == requested
