"""Tests the reward of examples/verl_ppo_cpu. Tests that run the recipe cover prepare.py."""

import runpy

import pytest


def test_the_reward_is_the_share_of_the_kind_that_was_asked_for(repo):
    score = runpy.run_path(str(repo / "examples" / "verl_ppo_cpu" / "reward.py"))["compute_score"]
    for response, kind, share in (
        ("1234", "digits", 1.0),
        ("1a2b", "digits", 0.5),
        ("1a2b", "letters", 0.5),
        ("abc?", "letters", 0.75),
        ("M12a4", "digits", 0.75),  # a mark counts for nothing
        (" 1 2 \n", "digits", 1.0),  # nor does white space
        (" \n", "digits", 0.0),
        ("", "digits", 0.0),
    ):
        assert score("", response, kind) == share, response
    with pytest.raises(ValueError, match="digits, letters, found 'vowels'"):
        score("", "a", "vowels")
