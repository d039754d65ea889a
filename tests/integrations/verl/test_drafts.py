from collections import Counter

import pytest

from rl_accel.integrations.verl import drafts
from rl_accel.integrations.verl.drafts.router import HOME_MARGIN, SiblingRouter
from rl_accel.telemetry import metrics


@pytest.mark.slow
def test_responses_of_a_prompt_share_a_replica_unless_that_unbalances_them():
    router = SiblingRouter({f"s{i}": f"handle {i}" for i in range(4)}, {})
    prompts = [[prompt, 7, 9] for prompt in range(40)]

    def acquire(request_id, prompt):
        return router.acquire_server(request_id, prompt_ids=prompt)[0]

    first = {prompt[0]: acquire(f"a{prompt[0]}", prompt) for prompt in prompts}
    assert set(Counter(first.values()).values()) == {10}, "new prompts go to the emptiest replica"
    assert {prompt[0]: acquire(f"b{prompt[0]}", prompt) for prompt in reversed(prompts)} == first
    for prompt in (*prompts, *prompts):
        router.release_server(first[prompt[0]])

    same = Counter(acquire(f"c{i}", prompts[0]) for i in range(40))
    assert max(same.values()) - min(same.values()) <= HOME_MARGIN + 1
    assert same.most_common(1)[0][0] == first[0]
    assert acquire("c0", prompts[1]) == acquire("c0", prompts[2]), "a conversation stays where it began"
    router.remove_servers([first[0]])
    assert acquire("d", prompts[0]) in router.get_all_servers()
    with pytest.raises(RuntimeError, match="No available servers"):
        SiblingRouter({}).acquire_server("x", prompt_ids=[1])


def test_the_first_steps_are_compared_with_the_trainer_and_stop_the_training_if_wrong():
    drafts.check({})
    drafts.check({"training/rollout_probs_diff_mean": 0.01})
    for wrong in (0.2, float("nan")):
        with pytest.raises(metrics.StopTraining, match="train without drafts"):
            drafts.check({"training/rollout_probs_diff_mean": wrong})
    metrics.set_observer("drafts", lambda _step, logged: drafts.check(logged) or {})
    try:
        assert metrics.run_observers(1, {}) == {}
        with pytest.raises(metrics.StopTraining):
            metrics.run_observers(2, {"training/rollout_probs_diff_mean": 1.0})
    finally:
        metrics.set_observer("drafts", None)


def test_numbers_of_a_step():
    counted = {"steps": 10, "tokens": 60, "drafted": 40, "accepted": 30, "accepted_sibling": 20, "drafted_sibling": 22}
    counted |= {"tokens_from_16": 20, "row_steps_from_16": 20, "tokens_from_32": 40, "row_steps_from_32": 10}
    result = drafts.numbers(Counter(counted))
    wanted = {"acceptance": 0.75, "acceptance_sibling": 20 / 22, "tokens_a_step": 2.0, "tokens_an_engine_step": 6.0}
    wanted |= {"tokens_a_step_from_32": 4.0, "accepted_sibling": 20, "drafted_own": 0}
    assert result.items() >= {f"drafts/{name}": value for name, value in wanted.items()}.items()
    assert "drafts/acceptance_own" not in result
    assert set(drafts.numbers(Counter()).values()) == {0.0}
