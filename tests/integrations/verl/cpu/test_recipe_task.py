"""The task of examples/verl_ppo_cpu: its reward, and what prepare.py writes."""

import importlib.util
import subprocess
import sys

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
    ],
)
def test_the_reward_is_the_share_of_the_kind_that_was_asked_for(reward, response, kind, score):
    assert reward.compute_score("", response, kind) == score


def test_white_space_counts_for_nothing_and_an_unknown_kind_is_an_error(reward):
    assert reward.compute_score("", " 1 2 \n", "digits") == 1.0
    assert reward.compute_score("", " \n", "digits") == 0.0
    with pytest.raises(ValueError, match="digits, letters, found 'vowels'"):
        reward.compute_score("", "a", "vowels")


@pytest.mark.slow
def test_prepare_writes_what_verl_reads_and_only_once(repo, tmp_path, clean_environment):
    pandas, transformers = pytest.importorskip("pandas"), pytest.importorskip("transformers")
    command = [sys.executable, str(repo / "examples" / "verl_ppo_cpu" / "prepare.py"), str(tmp_path)]
    run = {"check": True, "capture_output": True, "text": True, "env": clean_environment}
    assert "2048 prompts" in subprocess.run(command, **run).stdout
    written = (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns
    assert "up to date" in subprocess.run(command, **run).stdout
    assert (tmp_path / "model" / "model.safetensors").stat().st_mtime_ns == written

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    rows = pandas.read_parquet(tmp_path / "train.parquet").to_dict("records")
    lengths = set()
    for row in rows[:200]:
        text = row["prompt"][0]["content"]
        assert text.startswith(row["reward_model"]["ground_truth"])
        ids = tokenizer.apply_chat_template(list(row["prompt"]), add_generation_prompt=True, return_dict=False)
        assert tokenizer.unk_token_id not in ids
        lengths.add(len(ids))
    assert max(lengths) <= 16  # data.max_prompt_length of the recipe
    assert {row["reward_model"]["ground_truth"] for row in rows} == {"digits", "letters"}
    assert tokenizer.decode(tokenizer.encode("4 tea"), skip_special_tokens=True) == "4 tea"
