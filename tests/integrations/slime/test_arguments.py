"""Slime's flags that cannot go together with tail batching, each named. Needs no slime."""

from types import SimpleNamespace

import pytest

from rl_accel.errors import ConfigError
from rl_accel.features import TAIL_BATCHING, TailBatchingFlags
from rl_accel.integrations.slime import tail_batching

FINE = {
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
}
ON = TailBatchingFlags(enable=True)


def test_an_ordinary_run_passes_and_its_run_follows_slimes():
    args = SimpleNamespace(**FINE)
    tail_batching.check(args, ON)
    run = tail_batching.run_of(args, ON, 100)
    assert (run.prompts_per_step, run.responses_per_prompt, run.filter_groups) == (8, 4, False)
    assert run.data_id == "math.jsonl 100 shuffle=True seed=7"
    assert tail_batching.last_rollout(args, 100) == 36
    assert tail_batching.last_rollout(SimpleNamespace(**{**FINE, "num_rollout": 5}), 100) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partial_rollout": True}, "--partial-rollout = unset, found True .*strictly on-policy"),
        ({"over_sampling_batch_size": 16}, "--over-sampling-batch-size = unset, found 16 .*prompt_ratio"),
        ({"buffer_filter_path": "my.filter"}, r"--buffer-filter-path = unset, found my\.filter"),
        ({"rollout_global_dataset": False}, "--disable-rollout-global-dataset = unset"),
        ({"rollout_function_path": "my.rollout"}, r"--rollout-function-path = rl_accel\..*, found my\.rollout"),
    ],
)
def test_a_conflicting_flag_is_named(change, message):
    with pytest.raises(ConfigError, match=message):
        tail_batching.check(SimpleNamespace(**{**FINE, **change}), ON)


def test_the_data_source_without_the_flag_is_refused():
    with pytest.raises(ConfigError, match=r"rl_accel\.tail_batching\.enable is not set"):
        tail_batching.check(SimpleNamespace(**FINE), TailBatchingFlags())


def test_a_small_data_set_and_a_quota_that_does_not_fit_are_named():
    args = SimpleNamespace(**FINE)
    with pytest.raises(ConfigError, match="at least --rollout-batch-size, 8, found 7"):
        tail_batching.run_of(args, ON, 7)
    with pytest.raises(ConfigError, match=r"domain_quotas must add up to .* 8 prompts, found 3"):
        tail_batching.run_of(args, TailBatchingFlags(enable=True, domain_quotas={"math": 3}), 100)
