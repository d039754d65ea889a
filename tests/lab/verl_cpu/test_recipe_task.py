"""The task of examples/verl_ppo_cpu: its reward. What prepare.py writes is tested where the recipe is run."""

import importlib.util

import pytest


@pytest.fixture(scope="module")
def reward(repo):
    spec = importlib.util.spec_from_file_location("recipe_reward", repo / "examples" / "verl_ppo_cpu" / "reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("response", "kind", "score"),
    [
        ("1234", "digits", 1.0),
        ("1a2b", "digits", 0.5),
        ("1a2b", "letters", 0.5),
        ("abc?", "letters", 0.75),
        ("", "digits", 0.0),
        # white space and marks count for nothing
        (" 1 2 \n", "digits", 1.0),
        ("M12a4", "digits", 0.75),
        (" \n", "digits", 0.0),
    ],
)
def test_the_reward_is_the_share_of_the_kind_that_was_asked_for(reward, response, kind, score):
    assert reward.compute_score("", response, kind) == score


def test_an_unknown_kind_is_an_error(reward):
    with pytest.raises(ValueError, match="digits, letters, found 'vowels'"):
        reward.compute_score("", "a", "vowels")
