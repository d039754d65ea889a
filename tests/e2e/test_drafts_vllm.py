"""Tests drafts on real vLLM: the same greedy tokens, the exact distribution of samples, and correct log-probabilities."""

import json
import subprocess
from pathlib import Path

import pytest
from scipy.stats import chisquare

pytestmark = [pytest.mark.vllm, pytest.mark.parametrize("engine", ["vllm"], indirect=True, scope="module")]

SCRIPTS = Path(__file__).parent / "drafts"


@pytest.fixture(scope="module")
def generate(engine, repo, workspace, clean_environment, tmp_path_factory):
    """``generate(*words)``: the results of ``drafts/generate.py``, with this checkout and the recipe's model."""

    def run(*words):
        folder = tmp_path_factory.mktemp("drafts")
        out = folder / "out.json"
        (folder / "model").symlink_to(workspace / "task" / "model")
        environment = {**clean_environment, "PYTHONPATH": f"{repo}:{SCRIPTS}"}
        command = [engine.python, str(SCRIPTS / "generate.py"), str(folder), str(out), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1400)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        answer = json.loads(out.read_text())
        assert Path(answer["package"]).is_relative_to(repo)
        return answer

    return run


@pytest.fixture(scope="module")
def generated(generate):
    return generate()


@pytest.fixture(scope="module")
def samples(generate):
    return generate("samples")


def test_greedy_tokens_are_those_without_drafts_but_for_ties(generated):
    """With prefix caching, log-probabilities of prompts, preemptions, and responses cut at max_model_len."""
    greedy, margins = generated["greedy"], generated["margins"]
    assert len(greedy["plain"]) == 8
    assert all(len(response) == 300 for run in (greedy["plain"], *greedy["epochs"]) for response in run)
    assert [len(response) for response in greedy["cut"]] == [200 - 13] * 8
    for name, parted in margins.items():
        assert all(margin < 1e-5 for margin in parted), (name, parted)
    assert greedy["prompt_logprobs"] == [13] * 8
    assert greedy["preemptions"] > 0
    told = greedy["counts"]
    assert told["accepted_earlier"] > 0
    assert told["tokens"] > 2 * 8 * 299
    assert told["steps"] < 600


def test_stop_strings_and_aborts_change_nothing(generated):
    without, with_drafts = generated["stops"]
    assert len(without[0]) == 8
    assert with_drafts == without


def test_seeds_of_requests_choose_the_tokens(generated):
    """Other tokens than without drafts, by vLLM's sampler, but the same ones again; and the same ones where nothing is drafted."""
    seeds = generated["seeds"]
    assert seeds["again"] == seeds["first"]
    assert seeds["first accepted"] > 100
    assert seeds["crowd"] == seeds["plain"]
    assert seeds["crowd accepted"] == 0
    once, twice, other = seeds["plain"]
    assert once == twice != other
    assert len({tuple(response) for response in seeds["first"][0]}) > 3


def test_the_doctor_warns_of_a_cpu_build_until_it_is_repaired(generated):
    before, after = generated["problems"]
    assert [what for _, what, _ in before] == ["vllm.speculative_config"]
    assert after == []


def test_log_probabilities_are_those_of_a_plain_forward(generated):
    for mode in ("raw_logprobs", "processed_logprobs"):
        assert generated["logprobs"][f"{mode} accepted"] > 100
        assert all(generated["logprobs"][f"{mode} at {temperature}"] < 1e-4 for temperature in (1.0, 0.3))


@pytest.mark.full
@pytest.mark.parametrize(
    ("proposer", "number"), [("Eager", 20_000), ("with seeds", 5_000), ("Always", 20_000), ("AlwaysStop", 20_000)]
)
def test_samples_have_the_exact_distribution(samples, proposer, number):
    expected = [number * chance for chance in samples["expected"]]
    rare = [chance < 5 for chance in expected]  # chi-square needs cells that are not too small
    cells = [
        [value for value, small in zip(values, rare, strict=True) if not small]
        + [sum(value for value, small in zip(values, rare, strict=True) if small)]
        for values in (samples[proposer], expected)
    ]
    assert sum(cells[0]) == number
    assert len(cells[0]) > 50
    if cells[1][-1] < 5:
        cells = [[*values[:-2], values[-2] + values[-1]] for values in cells]
    scale = sum(cells[0]) / sum(cells[1])
    assert chisquare(cells[0], [value * scale for value in cells[1]]).pvalue > 0.001
    assert samples["accepted"] > 1000
