"""``python generate.py FOLDER OUT.json [samples]``: runs real vLLM with and without drafts, in vLLM's environment.

With ``samples`` it draws the many samples of the test of distributions, and does nothing else.
"""

import itertools
import json
import os
import sys
from collections import Counter
from pathlib import Path

os.environ.update(VLLM_PLUGINS="", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind")

import proposers
import torch
from proposers import STOP
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from vllm import LLM, SamplingParams
from vllm.utils import cpu_triton_utils

import rl_accel
from rl_accel.integrations.verl.drafts import check_engine
from verl_on_cpu.vllm import accept_precision, correct_expansion

PROBLEMS = [check_engine()]
correct_expansion(cpu_triton_utils)
accept_precision(cpu_triton_utils)
PROBLEMS.append(check_engine())

SAMPLES, SEEDED, TOKENS, WORDS = 20_000, 5_000, 5, 4
PROMPTS = [[5 + i % 4, *range(10, 20), 9 + i % 4, 7] for i in range(8)]


def engine(model, drafting=True, **options):
    """Real vLLM, with drafts or without."""
    if drafting:
        drafter = {"method": "custom_class", "model": "proposers.Eager"}
        options["speculative_config"] = {**drafter, "num_speculative_tokens": 8}
        options["additional_config"] = {"rl_accel_drafts": {"memory_mb": 20}}
    options = {"max_model_len": 512, "kv_cache_memory_bytes": 2**27, "disable_log_stats": True, **options}
    return LLM(str(model), dtype="float32", enforce_eager=True, **options)


def begin(llm, proposer="Eager", batch_limit=1024):
    """Give an engine that drafts a new drafter, without history."""

    def change(worker):
        worker.vllm_config.additional_config["rl_accel_drafts"] = {"memory_mb": 20, "batch_limit": batch_limit}
        worker.model_runner.drafter = getattr(proposers, proposer)(worker.vllm_config)

    llm.collective_rpc(change)


def generate(llm, prompts, **sampling):
    """Greedy responses of up to 60 tokens, unless told otherwise. ``seed`` is that of the first prompt."""
    sampling = {"temperature": 0, "max_tokens": 60, **sampling}
    seed = sampling.pop("seed", None)
    each = [SamplingParams(seed=seed and seed + 100 * n, **sampling) for n in range(len(prompts))]
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], each, use_tqdm=False)


def tokens(requests):
    return [list(output.token_ids) for request in requests for output in request.outputs]


def counts(llm):
    return llm.collective_rpc(lambda worker: worker.model_runner.drafter.take_counts())[0]


def new_weights(llm):
    llm.collective_rpc(lambda worker: worker.model_runner.drafter.new_weights())


def forward(model, sequence, temperature=1.0):
    """Log-probabilities of each next token after each token of ``sequence``, by a plain forward of transformers."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([sequence])).logits[0].float() / temperature, -1)


def small_model(folder):
    """A model of four words."""
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    config = Qwen2Config(**sizes, **heads, initializer_range=0.3, bos_token_id=None, eos_token_id=None)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.3)
    model.save_pretrained(folder)
    return model.eval()


def exact(model, prompt):
    """The probability of each response of TOKENS tokens, or fewer up to STOP."""
    responses = {(): 1.0}
    for _ in range(TOKENS):
        longer = {}
        for response, chance in responses.items():
            if response and response[-1] == STOP:
                longer[response] = chance
            else:
                following = forward(model, [*prompt, *response])[-1].exp().tolist()
                longer |= {(*response, word): chance * following[word] for word in range(WORDS)}
        responses = longer
    return responses


def samples(model, llm):
    """How often each response was sampled, by proposer, beside its exact probability."""
    prompt = [1, 2, 0, 1, 2, 2, 1]
    expected = exact(model, prompt)
    result = {}
    each = {"n": 100, "temperature": 1.0, "max_tokens": TOKENS, "stop_token_ids": [STOP], "detokenize": False}
    for name in ("Eager", "with seeds", "Always", "AlwaysStop"):
        proposer, count, seed = ("Eager", SEEDED, 7) if name == "with seeds" else (name, SAMPLES, None)
        begin(llm, proposer)
        requests = generate(llm, [prompt] * (count // 100), seed=seed, **each)
        seen = Counter(tuple(response) for response in tokens(requests))
        result[name] = [seen[response] for response in expected]
        if name == "Eager":
            result["accepted"] = counts(llm)["accepted"]
        assert set(seen) <= set(expected), set(seen) - set(expected)
    return {"expected": list(expected.values()), **result}


def greedy(stock, ours, folder):
    """Greedy responses without drafts and with: in two epochs; with a short max_model_len, and memory so little that requests
    are preempted."""
    long = {"max_tokens": 300, "ignore_eos": True}
    answer = {"plain": tokens(generate(stock, PROMPTS, **long)), "epochs": []}
    for _ in range(2):
        requests = generate(ours, PROMPTS, prompt_logprobs=0, logprobs=0, **long)
        answer["epochs"].append(tokens(requests))
        new_weights(ours)
    answer["prompt_logprobs"] = [len(request.prompt_logprobs) for request in requests]
    answer["counts"] = counts(ours)
    block = 2 * 2 * 2 * 32 * 4 * 128  # layers, keys and values, heads, their dimension, bytes, tokens
    little = {"max_model_len": 200, "kv_cache_memory_bytes": 8 * block, "block_size": 128, "disable_log_stats": False}
    tight = engine(folder, **little)
    answer["cut"] = tokens(generate(tight, PROMPTS, **long))
    preempted = [metric.value for metric in tight.get_metrics() if metric.name == "vllm:num_preemptions"]
    return {**answer, "preemptions": sum(preempted)}


def stops(llm):
    """Greedy responses with a string that ends them, and after an abort."""
    text = generate(llm, PROMPTS[:1], ignore_eos=True)[0].outputs[0].text
    generate(llm, PROMPTS, ignore_eos=True)
    requests = generate(llm, PROMPTS, ignore_eos=True, stop=[text[40:43]])
    for number, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        llm.llm_engine.add_request(f"aborted {number}", {"prompt_token_ids": prompt}, sampling)
    for step in range(20):
        llm.llm_engine.step()
        if step == 10:
            llm.llm_engine.abort_request(["aborted 0", "aborted 3"])
    llm.llm_engine.abort_request([f"aborted {number}" for number in range(len(PROMPTS))])
    again = tokens(generate(llm, PROMPTS, ignore_eos=True))
    return [[output.text for request in requests for output in request.outputs], again]


def logprobs(model, engines):
    """The largest difference between the log-probabilities that vLLM returns with drafts and those of a plain forward."""
    prompts = [[1, 2, word, 1, 0] for word in (0, 1, 2)] * 4
    answer = {}
    for mode, llm in engines.items():
        begin(llm)
        for temperature in (1.0, 0.3):
            sampling = {"temperature": temperature, "max_tokens": 200, "logprobs": 0, "detokenize": False}
            requests = generate(llm, prompts, **sampling)
            worst = 0.0
            for request in requests:
                (output,) = request.outputs
                prompt, said = list(request.prompt_token_ids), list(output.token_ids)
                scale = temperature if mode == "processed_logprobs" else 1.0
                expected = forward(model, prompt + said, scale)[len(prompt) - 1 : -1]
                for token, told, row in zip(said, output.logprobs, expected, strict=True):
                    worst = max(worst, abs(told[token].logprob - float(row[token])))
            answer[f"{mode} at {temperature}"] = worst
        answer[f"{mode} accepted"] = counts(llm)["accepted"]
    return answer


def seeds(stock, ours):
    """Responses sampled with a seed each: without drafts, twice with them, and with more requests than are drafted for."""
    answer = {}
    for name, limit in (("plain", 0), ("first", 1024), ("again", 1024), ("crowd", 1)):
        llm, epochs = (ours if limit else stock), []
        if limit:
            begin(ours, batch_limit=limit)
        for seed in (1000, 1000, 5000):
            prompts = [[1, 2, word, 1, 0] for word in (0, 1, 2)] * 2
            sampling = {"temperature": 1.0, "max_tokens": 60, "detokenize": False, "seed": seed}
            epochs.append(tokens(generate(llm, prompts, **sampling)))
            if limit:
                new_weights(ours)
        answer[name] = epochs
        answer[f"{name} accepted"] = counts(ours)["accepted"] if limit else 0
    return answer


def margins(folder, plain, other):
    """Where two greedy responses part: the logits of the two tokens, by a plain forward."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for prompt, one, two in zip(PROMPTS, plain, other, strict=True):
        for at, (a, b) in enumerate(itertools.zip_longest(one[: len(two)], two)):
            if a != b:
                row = forward(model, [*prompt, *one[:at]])[-1]
                found.append(abs(float(row[a] - row[b])))
                break
    return found


def main(folder, out, what="all but samples"):
    path, small = Path(folder) / "model", Path(folder) / "small"
    model = small_model(small)
    modes = {
        mode: engine(small, skip_tokenizer_init=True, max_num_seqs=256, logprobs_mode=mode)
        for mode in ("raw_logprobs", "processed_logprobs")[: 1 if what == "samples" else 2]
    }
    ours = modes["raw_logprobs"]
    answer = {"package": rl_accel.__file__, "problems": PROBLEMS}
    if what == "samples":
        answer |= samples(model, ours)
    else:
        stock = engine(small, drafting=False, skip_tokenizer_init=True, max_num_seqs=256)
        answer |= {"seeds": seeds(stock, ours), "logprobs": logprobs(model, modes)}
        stock, ours = engine(path, drafting=False), engine(path, enable_prefix_caching=True)
        given = greedy(stock, ours, path)
        begin(ours)
        answer |= {"greedy": given, "stops": [stops(stock), stops(ours)]}
        runs = {"first": given["epochs"][0], "second": given["epochs"][1], "cut": given["cut"]}
        answer["margins"] = {name: margins(path, given["plain"], responses) for name, responses in runs.items()}
    Path(out).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
