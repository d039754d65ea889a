"""Tests lengths drawn from published distributions, from files, and from the responses of a run."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtri

from rl_accel.errors import RlAccelError
from rl_accel.rollout.workload import Lengths, from_groups, read_lengths

published = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "published_table.py"))["published"]
RNG = np.random.default_rng(0)


def scores_of(lengths, rows):
    return ndtri((np.searchsorted(lengths.tokens, rows) + 0.5) / len(lengths.tokens))


@pytest.mark.parametrize("alike", [0.0, 0.4, 0.9])
def test_all_responses_together_keep_the_distribution(alike):
    workload = published(alike=alike)
    drawn = workload.lengths(range(20_000), 2, np.random.default_rng(1))
    for share in (0.25, 0.5, 0.9, 0.95):
        assert np.quantile(drawn, share) == pytest.approx(np.quantile(workload.tokens, share), rel=0.05)
    assert (drawn == 16384).mean() == pytest.approx(0.01, abs=0.003)
    assert np.corrcoef(scores_of(workload, drawn).T)[0, 1] == pytest.approx(alike, abs=0.03)


@given(alike=st.floats(0.3, 0.8), seed=st.integers(0, 100))
def test_how_alike_responses_are_is_found_again(alike, seed):
    drawn = Lengths(np.arange(1, 20_001), alike).lengths(range(600), 8, np.random.default_rng(seed))
    assert from_groups(drawn, "").alike == pytest.approx(alike, abs=0.1)


def test_a_prompt_keeps_its_score_until_the_workload_is_drawn_anew():
    workload = published(alike=0.999)
    first, second = (workload.lengths([3] * 200, 1, RNG) for _ in range(2))
    assert max(first.max(), second.max()) < 5 * min(first.min(), second.min())
    anew = [np.median(workload.drawn(seed).lengths([3] * 200, 1, RNG)) for seed in range(20)]
    assert max(anew) > 5 * min(anew)


def test_prompts_of_a_run_first_have_the_responses_that_they_had():
    groups = [[5.0, 7.0], [9.0, 11.0], [100.0]]
    workload = from_groups(groups, "")
    first, again = (workload.lengths([0, 1, 2], 3, RNG) for _ in range(2))
    assert (first[:2, :2].tolist(), first[2, 0]) == ([[5, 7], [9, 11]], 100)
    assert set(np.concatenate([first, again]).ravel()) <= {5, 7, 9, 11, 100}
    assert from_groups(groups, "").lengths([3], 2, RNG).tolist() == [[5, 7]], "the data begins again"
    of_samples = {tuple(from_groups(groups, "").drawn(seed).lengths([0], 1, RNG)[0]) for seed in range(20)}
    assert of_samples == {(5,), (9,), (100,)}


def test_rewards_take_the_times_that_were_seen():
    assert set(from_groups([[1.0]], "", rewards=np.array([0.5, 2.0])).reward_seconds(100, RNG)) == {0.5, 2.0}
    assert from_groups([[1.0]], "").reward_seconds(100, RNG) is None


def test_a_file_of_lengths(tmp_path):
    path = tmp_path / "lengths.jsonl"
    rows = [{"prompt": n // 2, "tokens": 10 + n, "reward_seconds": 0.5} for n in range(8)]
    rows[0]["note"] = "one line\u2028and one more"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8-sig")
    workload = read_lengths(path)
    assert workload.tokens.tolist() == list(range(10, 18))
    assert workload.seen.tolist() == [[10, 11], [12, 13], [14, 15], [16, 17]]
    assert workload.rewards.tolist() == [0.5] * 8


def test_rollouts_that_slime_saved_are_read(tmp_path):
    for rollout in (10, 9):
        samples = [{"group_index": rollout * 2 + n // 2, "response_length": rollout * 10 + n} for n in range(4)]
        torch.save({"rollout_id": rollout, "samples": samples}, tmp_path / f"{rollout}.pt")
    torch.save({"samples": [{"group_index": 0, "response_length": 7}]}, tmp_path / "eval_9.pt")
    workload = read_lengths(tmp_path)
    assert workload.seen.tolist() == [[90, 91], [92, 93], [100, 101], [102, 103]]
    assert workload.source == str(tmp_path)


def test_responses_that_verl_saved_are_counted_by_a_tokenizer_or_else_in_characters(tmp_path, tiny_tokenizer):
    for step in (10, 9):
        rows = [{"input": f"{n // 2}", "output": "ab" * (step + n), "step": step, "uid": str(n)} for n in range(4)]
        (tmp_path / f"{step}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    workload = read_lengths(tmp_path)
    assert workload.seen.tolist() == [[18, 20], [22, 24], [20, 22], [24, 26]], "another step, another prompt"
    assert "in characters instead of tokens" in workload.source
    assert (read_lengths(tmp_path, tiny_tokenizer).seen * 2 == workload.seen).all()
    with pytest.raises(RlAccelError, match=r"^--tokenizer: cannot read [^\n]*$"):
        read_lengths(tmp_path, str(tmp_path))


@pytest.fixture
def tiny_tokenizer(tmp_path_factory):
    """Folder of a tokenizer that has the token "ab"."""
    folder = tmp_path_factory.mktemp("tokenizer")
    words = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return str(folder)


TOKENS = '{"prompt": 1, "tokens": %s}'
REWARD = '{"prompt": 1, "tokens": 1, "reward_seconds": %s}'


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("lengths.jsonl", "", "holds no lengths: wanted lines such as"),
        ("lengths.jsonl", '{"prompt": 1}', r"line 1: wanted lines such as .*KeyError\('tokens'\)"),
        ("lengths.jsonl", '{"prompt": 1, "tokens": 3}\nnonsense', "line 2: wanted lines such as"),
        ("lengths.jsonl", TOKENS % "0", "line 1: .*tokens must be at least 1 and at most 1,000,000,000, found 0"),
        ("lengths.jsonl", TOKENS % "1e30", r"line 1: .*tokens must be at least 1 .*, found 1e\+30"),
        ("lengths.jsonl", TOKENS % "1e400", "line 1: .*found inf"),
        ("lengths.jsonl", TOKENS % "NaN", "line 1: .*found nan"),
        ("lengths.jsonl", TOKENS % "true", "line 1: .*tokens must be at least 1 .* found True"),
        ("lengths.jsonl", TOKENS % "null", "line 1: .*tokens must be at least 1 .* found None"),
        ("lengths.jsonl", TOKENS % ("1" * 400), r"line 1: .*tokens must be at least 1 .* found 1{40}\b"),
        ("lengths.jsonl", TOKENS % ("[" * 100_000), "line 1: .*RecursionError"),
        ("lengths.jsonl", REWARD % "Infinity", "line 1: .*reward_seconds must be"),
        ("lengths.jsonl", REWARD % "-1", "line 1: .*reward_seconds must be"),
        ("lengths.jsonl", REWARD % "NaN", "line 1: .*reward_seconds must be"),
        ("lengths.jsonl", None, "cannot read"),
        (".", None, "found none"),
        ("0.pt", "no file of torch", "0.pt: wanted a rollout of slime, .* found UnpicklingError"),
        ("0.pt", {"samples": [{"group_index": 0}]}, "found KeyError: 'response_length'"),
        ("0.pt", {"samples": []}, "found no responses"),
    ],
)
def test_a_file_or_folder_without_lengths_is_refused(tmp_path, file, content, words):
    path = tmp_path / file
    if isinstance(content, str):
        path.write_text(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(RlAccelError, match=words):
        read_lengths(path if file == "lengths.jsonl" else tmp_path)
