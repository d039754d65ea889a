"""Tests the reward of examples/verl_ppo_cpu, and what prepare.py refuses. Tests that run the recipe cover the rest."""

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


def test_a_limit_too_small_for_a_response_is_refused_in_one_line(repo, tmp_path, monkeypatch):
    folder = repo / "examples" / "verl_ppo_cpu"
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("sys.argv", ["prepare.py", str(tmp_path), "--lengths", "published", "--limit", "256"])
    with pytest.raises(SystemExit, match=r"^--lengths published wants --limit of at least 512, found 256$"):
        runpy.run_path(str(folder / "prepare.py"), run_name="__main__")
