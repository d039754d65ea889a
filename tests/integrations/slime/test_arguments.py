"""Arguments of slime and flags of ours that cannot go together, each named. Needs no slime."""

import pytest

from rl_accel.errors import ConfigError
from rl_accel.features import TAIL_BATCHING, RewardTimeoutFlags, TailBatchingFlags, TpReplanFlags
from rl_accel.integrations.slime import reward_timeout, tail_batching, tp_replan

FINE = {
    "tail_batching": {
        **TAIL_BATCHING.slime.arguments,
        "rollout_global_dataset": True,
        "partial_rollout": False,
        "over_sampling_batch_size": 8,
        "rollout_batch_size": 8,
        "n_samples_per_prompt": 4,
        "buffer_filter_path": None,
        "dynamic_sampling_filter_path": None,
        "prompt_data": "/data/math.jsonl",
        "rollout_shuffle": True,
        "rollout_seed": 7,
        "num_rollout": None,
        "num_epoch": 3,
    },
    "reward_timeout": {"rollout_sample_hook_path": ["my.hook", reward_timeout.SAMPLE_HOOK]},
    "tp_replan": {},
}
CHECKS = {
    "tail_batching": (tail_batching.check, TailBatchingFlags),
    "reward_timeout": (reward_timeout.check, RewardTimeoutFlags),
    "tp_replan": (tp_replan.check, TpReplanFlags),
}
TAIL_ON = TailBatchingFlags(enable=True)


@pytest.mark.parametrize(
    ("feature", "change", "message"),
    [
        ("tail_batching", {"partial_rollout": True}, "--partial-rollout = unset, found True .*strictly on-policy"),
        ("tail_batching", {"over_sampling_batch_size": 16}, "--over-sampling-batch-size = unset, found 16 .*prompt_r"),
        ("tail_batching", {"buffer_filter_path": "my.filter"}, r"--buffer-filter-path = unset, found my\.filter"),
        ("tail_batching", {"rollout_global_dataset": False}, "--disable-rollout-global-dataset = unset"),
        (
            "tail_batching",
            {"rollout_function_path": "my.own"},
            r"--rollout-function-path = rl_accel\..*, found my\.own",
        ),
        ("tail_batching", {"flags": {"enable": False}}, r"rl_accel\.tail_batching\.enable is not set"),
        (
            "reward_timeout",
            {"rollout_sample_hook_path": ["my.hook"]},
            r"hook_path to hold rl_accel.*found \['my\.hook'\]",
        ),
        ("reward_timeout", {"flags": {"grader": reward_timeout.RM_HOOK}}, "grader wants the .* --custom-rm-path named"),
        ("reward_timeout", {"flags": {"enable": False}}, r"rl_accel\.reward_timeout\.enable is not set"),
        ("tp_replan", {"rollout_external": True}, "rollout_external to be unset"),
        ("tp_replan", {"prefill_num_servers": 1}, "prefill_num_servers to be unset, found 1"),
        ("tp_replan", {"sglang_config": "engines.yaml"}, r"sglang_config to be unset, found engines\.yaml"),
        ("tp_replan", {"rollout_num_gpus": 0}, "whole engines of whole pipelines, found 0 GPUs"),
        ("tp_replan", {"rollout_num_gpus_per_engine": 3}, "whole engines of whole pipelines, found 4 GPUs"),
        ("tp_replan", {"sglang_dp_size": 2}, "--sglang-dp-size 1, found 2"),
        (
            "tp_replan",
            {"rollout_num_gpus_per_engine": 4, "num_gpus_per_node": 2},
            "TP 1 or 2, found 4 .*the 2 GPUs of a node",
        ),
        ("tp_replan", {"sglang_ep_size": 2}, r"TP 2 or 4, found 1 .*no multiple of 2"),
    ],
)
def test_a_conflict_is_named(arguments_of, feature, change, message):
    check, flags = CHECKS[feature]
    check(arguments_of(**FINE[feature]), flags(enable=True))
    wrong = {**FINE[feature], **change}
    wanted = flags(**{"enable": True, **wrong.pop("flags", {})})
    with pytest.raises(ConfigError, match=message):
        check(arguments_of(**wrong), wanted)
    if feature == "tp_replan":
        check(arguments_of(**wrong, debug_train_only=True), wanted)


def test_a_run_of_tail_batching_follows_slimes_and_has_prompts_enough(arguments_of):
    args = arguments_of(**FINE["tail_batching"])
    run = tail_batching.run_of(args, TAIL_ON, 100)
    assert (run.prompts_per_step, run.responses_per_prompt, run.filter_groups) == (8, 4, False)
    assert run.data_id == "math.jsonl 100 shuffle=True seed=7"
    assert tail_batching.last_rollout(args, 100) == 36
    assert tail_batching.last_rollout(arguments_of(**{**FINE["tail_batching"], "num_rollout": 5}), 100) == 5
    with pytest.raises(ConfigError, match="at least --rollout-batch-size, 8, found 7"):
        tail_batching.run_of(args, TAIL_ON, 7)
    with pytest.raises(ConfigError, match=r"domain_quotas must add up to .* 8 prompts, found 3"):
        tail_batching.run_of(args, TailBatchingFlags(enable=True, domain_quotas={"math": 3}), 100)
