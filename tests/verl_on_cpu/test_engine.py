"""Compares the engine with a plain forward pass of the model, and tests that requests do not influence each other."""

import random
import threading
import time
from concurrent.futures import wait

import pytest
import torch

from verl_on_cpu.engine import CPUEngine
from verl_on_cpu.requests import EngineError
from verl_on_cpu.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=40, temperature=0, logprobs=True, ignore_eos=True)


def prompts(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 64) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def endless(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=10_000, ignore_eos=True, logprobs=True, seed=seed)


@torch.inference_mode()
def plain_logprobs(model, prompt, tokens, temperature=1.0):
    logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1)


@pytest.mark.parametrize("heads", [4, 2, 1])
def test_greedy_and_sampled_tokens_and_their_logprobs_are_those_of_a_plain_forward(make_model, engine_for, heads):
    """More requests than slots."""
    model = make_model(num_key_value_heads=heads)
    engine = engine_for(model)
    temperatures = [0.0] * 16 + [0.5 + i / 8 for i in range(16)]
    params = [SamplingParams(max_tokens=60, temperature=t, logprobs=True, seed=i) for i, t in enumerate(temperatures)]
    requests = list(zip(prompts(32), params, strict=True))
    for (prompt, p), future in [(request, engine.submit("r", *request)) for request in requests]:
        generation = future.result(30)
        tokens = torch.tensor(generation.token_ids)
        expected = plain_logprobs(model, prompt, generation.token_ids, p.temperature or 1.0)
        assert p.temperature or torch.equal(tokens, expected.argmax(-1))
        chosen = expected.gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(generation.logprobs), chosen, atol=2e-5, rtol=0)
        assert generation.stop_reason == "completed"
        assert 4 not in tokens[:-1]
        assert len(tokens) == 60 or tokens[-1] == 4
    stats = engine.stats().result(10)
    assert (stats.completed, stats.running, stats.waiting) == (32, 0, 0)


@pytest.mark.slow
def test_a_request_gives_the_same_bits_whatever_shares_its_batch(model, engine_for):
    engine, rng = engine_for(model, max_num_seqs=16), random.Random(3)
    lengths = [300, 170, *(rng.randint(1, 60) for _ in range(14))]  # across the block sizes of the cache
    kinds = [{"temperature": (1.0, 0.0, 1.3)[i % 3], "seed": i} for i in range(16)]
    fixed = {"logprobs": True, "ignore_eos": True}
    params = [SamplingParams(max_tokens=n, **fixed, **kind) for n, kind in zip(lengths, kinds, strict=True)]
    requests = list(zip(prompts(16, longest=140), params, strict=True))
    alone = [engine.submit("r", *request).result(60) for request in requests]
    together = [future.result(60) for future in [engine.submit("r", *request) for request in requests]]
    assert together == alone
    staggered = {}
    for i in rng.sample(range(16), 16):
        staggered[i] = engine.submit("r", *requests[i])
        time.sleep(rng.random() * 0.01)
    assert [staggered[i].result(60) for i in range(16)] == alone


def test_seeds_decide_the_tokens_and_their_absence_leaves_it_to_the_request_id(model, engine_for):
    engine = engine_for(model)
    [prompt] = prompts(1)

    def tokens(request_id, seed, more=(), **changes):
        params = SamplingParams(**{"max_tokens": 30, "ignore_eos": True, "seed": seed, **changes})
        return engine.submit(request_id, [*prompt, *more], params).result(30).token_ids

    assert tokens("a", 1) == tokens("b", 1)
    assert tokens("a", 1) != tokens("a", 2)
    assert tokens("a", None) == tokens("a", None)
    assert tokens("a", None) != tokens("b", None)
    whole = tokens("r", 4, max_tokens=120)
    assert tokens("r", 4, whole[:50], max_tokens=70) == whole[50:], "resumed, it goes on as if never aborted"
    assert tokens("r", 4, stop_token_ids=(whole[7],)) == whole[: whole.index(whole[7]) + 1]


def test_a_pace_slows_decoding_down_and_changes_nothing_else(model, engine_for):
    params = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=True, seed=1)
    began = time.monotonic()
    paced = engine_for(model, seconds_per_step=0.02).submit("r", [5, 6, 7], params).result(30)
    assert time.monotonic() - began >= 28 * 0.02  # a first token from the prompt, and no wait after the last one
    assert paced == engine_for(model).submit("r", [5, 6, 7], params).result(30)


def test_cancelling_ends_one_pause_ends_all_and_holds_what_comes_and_resume_goes_on(model, engine_for, wait_for):
    engine = engine_for(model, max_num_seqs=3)
    futures = [engine.submit(str(i), p, endless(i)) for i, p in enumerate(prompts(5))]
    wait_for(lambda: engine.stats().result(10).tokens > 20, "the engine")
    for _ in range(20):
        engine.abort("nobody").cancel()  # a control call that is cancelled harms nobody
    assert futures[0].cancel()
    wait_for(lambda: engine.stats().result(10).aborted == 1, "the end of the cancelled request")
    assert engine.pause().result(10) == 4
    assert {future.result(10).stop_reason for future in futures[1:]} == {"aborted"}
    held = engine.submit("late", [5, 6], GREEDY)
    stats = engine.stats().result(10)
    assert (stats.paused, stats.waiting, stats.running) == (True, 1, 0)
    assert not held.done()
    engine.resume().result(10)
    assert held.result(30).stop_reason == "completed"


@pytest.mark.parametrize("tied", [False, True])
def test_equal_prompts_are_read_once_until_new_weights_which_the_next_request_uses(make_model, engine_for, tied):
    old, new = (make_model(seed=seed, tie_word_embeddings=tied) for seed in (0, 1))
    engine = engine_for(old)
    [prompt] = prompts(1)
    group = [engine.submit(str(i), prompt, SamplingParams(seed=i)) for i in range(6)]
    assert {future.result(30).logprobs for future in group} == {None}, "not asked for"
    assert engine.stats().result(10).prefills == 1
    weights = {name: tensor.clone() for name, tensor in new.named_parameters()}
    assert ("lm_head.weight" in weights) != tied, "tied weights may come under one name"
    engine.load_weights(weights).result(10)
    tokens = engine.submit("r", prompt, GREEDY).result(30).token_ids
    assert tokens == plain_logprobs(new, prompt, tokens).argmax(-1).tolist()
    assert engine.stats().result(10).prefills == 2


def test_weights_that_do_not_fit_change_nothing(model, engine_for):
    engine = engine_for(model)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    new = {name: tensor + 1 for name, tensor in before.items()}
    for weights, message in (
        ({name: tensor for name, tensor in new.items() if name != "lm_head.weight"}, "missing.*lm_head"),
        (new | {"extra": torch.zeros(1)}, "unknown.*extra"),
        (new | {"model.norm.weight": torch.zeros(3)}, r"model.norm.weight \(3,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.load_weights(weights).result(10)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())


def test_a_prompt_that_cannot_be_read_is_refused_at_once(model, engine_for):
    engine = engine_for(model)
    wrong = (([], "is empty"), ([5] * 512, "512 tokens leaves no room"), ([5, 64], "vocab"), ([-1], "vocab"))
    for prompt, message in wrong:
        with pytest.raises(ValueError, match=message):
            engine.submit("r", prompt, GREEDY)


def test_requests_that_fail_in_the_model_fail_alone_and_leave_nothing_behind(make_model, engine_for):
    model = make_model()
    with torch.no_grad():
        model.get_input_embeddings().weight[63] = torch.nan
    engine = engine_for(model, max_num_seqs=2)

    def avoiding(seed):
        return SamplingParams(max_tokens=30, seed=seed, stop_token_ids=(63,), ignore_eos=True)

    in_prompt = engine.submit("first", [5, 63], avoiding(0))
    with pytest.raises(EngineError, match="request first: the model gave logits that are not finite"):
        in_prompt.result(30)
    # Without a stop at token 63 a response sooner or later reads its own NaN, in the middle of a batch.
    others = [engine.submit(f"n{i}", [5, 6], SamplingParams(max_tokens=500, seed=i, ignore_eos=True)) for i in range(6)]
    wait(others, timeout=60)
    assert any(other.exception() for other in others)
    after = [engine.submit(f"g{i}", [7, 8, 9], avoiding(i)) for i in range(6)]
    assert {future.result(30).stop_reason for future in after} == {"completed"}


def test_a_closed_engine_ends_its_requests_and_its_thread(model):
    engine = CPUEngine(model, [4], max_num_seqs=2, max_model_len=512)
    future = engine.submit("r", [5, 6], endless(0))
    engine.close()
    assert future.result(10).stop_reason == "aborted"
    with pytest.raises(EngineError, match="closed"):
        engine.submit("r", [5, 6], GREEDY)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rl-accel-cpu-engine")]


def test_a_failure_of_the_engine_itself_reaches_every_caller(make_model, engine_for, monkeypatch, wait_for):
    engine = engine_for(make_model(), max_num_seqs=1)
    futures = [engine.submit(str(i), [5, 6], endless(i)) for i in range(3)]
    wait_for(lambda: engine.stats().result(10).running == 1, "the engine")
    monkeypatch.setattr(engine, "_drop_cancelled", lambda: 1 / 0)
    for future in futures:
        with pytest.raises(ZeroDivisionError):
            future.result(10)
    with pytest.raises(EngineError, match="closed"):
        engine.pause()


def test_a_model_with_sliding_windows_and_a_negative_pace_are_refused(make_model):
    with pytest.raises(ValueError, match="full attention only"):
        CPUEngine(make_model(use_sliding_window=True, sliding_window=16, max_window_layers=1), [4])
    with pytest.raises(ValueError, match="seconds_per_step wants a number from 0 to 10, found -1"):
        CPUEngine(make_model(), [4], seconds_per_step=-1)
