"""Tests single responses of tail batching in slime's own ``generate_and_rm``, without a server. Needs a checkout in SLIME_ROOT."""

import itertools
from types import SimpleNamespace

import pytest

from rl_accel.features import TailBatchingFlags
from rl_accel.rollout.round_driver import Job

ARGUMENTS = {
    "sglang_server_concurrency": 1,
    "rollout_num_engines": 1,
    "sglang_dp_size": 1,
    "sglang_router_ip": "127.0.0.1",
    "sglang_router_port": 1,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "rollout_top_k": -1,
    "rollout_max_response_len": 8,
    "rollout_stop": None,
    "rollout_stop_token_ids": None,
    "rollout_skip_special_tokens": True,
    "rollout_sample_hook_path": None,
    "n_samples_per_prompt": 1,
    "partial_rollout": False,
    "group_rm": False,
    "custom_generate_function_path": "slime_test_plugins.tool",
    "custom_rm_path": "slime_test_plugins.score",
}


@pytest.fixture
def plugins(slime_root):
    import slime_test_plugins

    slime_test_plugins.reset()
    yield slime_test_plugins
    slime_test_plugins.MAY_CLOSE.set()


@pytest.fixture
def responses(plugins, model_folder):
    """``responses(**changes)``: responses with room for one at a time."""
    from slime.rollout.sglang_rollout import GenerateState

    from rl_accel.integrations.slime.tail_batching.responses import Engines, Responses

    def make(flags=None, **changes):
        GenerateState.clear_instances()
        args = SimpleNamespace(**{"hf_checkpoint": str(model_folder), **ARGUMENTS, **changes})
        return Responses(args, Engines(args), itertools.count().__next__, flags or TailBatchingFlags())

    return make


def job(row, response_id):
    from slime.utils.types import Sample

    return Job(f"1:{row}", {"sample": Sample(prompt="?", metadata={"row": row})}, (response_id,), 1)


def events_of(responses, last):
    """The events up to one of the kind ``last``."""
    events = []
    while not events or events[-1].kind != last:
        found = responses.wait(60)
        assert found, f"only {events} in 60 seconds"
        events += found
    return events


@pytest.mark.slow
def test_a_sandbox_is_closed_in_the_background_and_the_next_response_has_its_place(responses, plugins, wait_for):
    plugins.CLOSING.clear()
    plugins.MAY_CLOSE.clear()
    plugins.SLOW_ROWS.add(1)
    ours = responses()
    ours.launch(job(1, 0))
    wait_for(ours.outside_engines, "the tool to be called")
    ours.cancel([0])
    assert [event.kind for event in events_of(ours, "aborted")] == ["aborted"]
    assert plugins.CLOSING.is_set()
    ours.launch(job(2, 1))
    assert [(event.kind, event.response_id) for event in events_of(ours, "scored")] == [("generated", 1), ("scored", 1)]
    assert "closed" not in plugins.SEEN
    plugins.MAY_CLOSE.set()
    wait_for(lambda: "closed" in plugins.SEEN, "the sandbox to be closed")


@pytest.mark.slow
def test_the_time_limit_fails_the_response_and_its_sandbox_is_closed_in_the_background(responses, plugins, wait_for):
    plugins.MAY_CLOSE.clear()
    plugins.SLOW_ROWS.add(1)
    ours = responses(TailBatchingFlags(agent_loop_limit=0.1))
    ours.launch(job(1, 0))
    (failed,) = events_of(ours, "failed")
    assert failed.error == "TimeoutError: its agent loop was not over after 0.1 s (agent_loop_limit)"
    plugins.MAY_CLOSE.set()
    wait_for(lambda: "closed" in plugins.SEEN, "the sandbox to be closed")


@pytest.mark.slow
def test_an_error_of_the_configuration_ends_the_run(responses):
    ours = responses(custom_rm_path="slime_test_plugins.wrongly_set_up")
    ours.launch(job(1, 0))
    failed = events_of(ours, "failed")[-1]
    assert failed.ends_run
    assert failed.error == "rl_accel.reward_timeout.grader wants the dotted path of a function, found 'a.b'"
