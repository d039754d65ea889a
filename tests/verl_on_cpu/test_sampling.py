"""Tests sampling: uniform numbers depend only on seed and position, wrong settings are refused."""

import numpy as np
import pytest
import torch
from scipy import stats

from verl_on_cpu.sampling import BatchSampler, SamplingParams, derive_seed, uniforms


def draw(logits, params, seeds, positions):
    return BatchSampler(params, seeds)(logits, positions)


def test_uniforms_are_the_published_splitmix64_stream_and_seeds_do_not_depend_on_hash_randomisation():
    # First outputs of SplitMix64 with seed 1234567, from the reference implementation.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    result = uniforms(np.full(3, 1234567, dtype=np.uint64), np.arange(3))
    assert result.tolist() == [(value >> 11) * 2.0**-53 for value in expected]
    assert derive_seed(0, "a", None) == 10994160445515956199
    assert len({derive_seed(a, b) for a in range(50) for b in range(50)}) == 2500


def test_uniforms_are_uniform_along_seeds_and_along_positions():
    many = np.arange(20_000)
    along_positions = uniforms(np.full(len(many), 42, dtype=np.uint64), many)
    along_seeds = uniforms(np.array([derive_seed(i) for i in many], dtype=np.uint64), np.full(len(many), 7))
    for sample in (along_positions, along_seeds):
        assert stats.kstest(sample, "uniform").pvalue > 1e-3


def test_drawn_tokens_follow_the_softmax_at_the_temperature():
    logits = torch.tensor([[2.0, 0.0, -1.0, 1.0, -3.0]])
    count = 20_000
    for temperature in (0.5, 1.0, 1.7):
        params = [SamplingParams(temperature=temperature)] * count
        tokens, _ = draw(logits.expand(count, -1), params, [3] * count, range(count))
        expected = torch.softmax(logits[0].double() / temperature, 0).numpy() * count
        assert stats.chisquare(np.bincount(tokens, minlength=5), expected).pvalue > 1e-3


def test_a_token_of_zero_probability_is_never_drawn_and_a_row_that_is_not_finite_is_marked():
    logits = torch.full((4096, 8), -torch.inf)
    logits[:, 3] = 0.0
    logits[1, 2] = torch.nan
    tokens, logprobs = draw(logits, [SamplingParams()] * 4096, range(4096), [0] * 4096)
    assert (tokens.pop(1), set(tokens)) == (-1, {3})
    assert {*logprobs[:1], *logprobs[2:]} == {0.0}


def test_parameters_of_an_agent_loop_are_understood():
    sent = {"temperature": 0.7, "top_k": -1, "top_p": 1.0, "repetition_penalty": 1.0, "logprobs": True, "seed": 5}
    params = SamplingParams.from_dict(sent, max_tokens=30)
    assert params == SamplingParams(max_tokens=30, temperature=0.7, logprobs=True, seed=5)
    assert SamplingParams.from_dict({"max_new_tokens": 7, "logprobs": None}).max_tokens == 7
    assert SamplingParams.from_dict({"logprobs": 0}).logprobs  # vLLM's "only the sampled token"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temprature": 1.0}, "unknown sampling parameter 'temprature'"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2 is not supported"),
        ({"temperature": -1}, "temperature wants"),
        ({"temperature": float("nan")}, "temperature wants"),
        ({"top_k": 10}, "top_k=10 is not supported"),
        ({"top_p": 0.9}, "top_p=0.9 is not supported"),
        ({"max_tokens": 0}, "max_tokens wants"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams.from_dict(params)
