"""A model that is built in memory, small enough for a CPU and random enough that its tokens differ in probability."""

import re
import string
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """``make_model(seed=0, **config)`` builds a Qwen2 of two layers with 64 tokens, of which 4 ends a response."""
    transformers = pytest.importorskip("transformers")

    def make(seed: int = 0, **changes: Any) -> Any:
        config = transformers.Qwen2Config(
            **{
                "vocab_size": 64,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 1024,
                "initializer_range": 0.2,
                "eos_token_id": 4,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "attn_implementation": "sdpa",
                **changes,
            }
        )
        torch.manual_seed(seed)
        return transformers.Qwen2ForCausalLM(config).eval()

    return make


@pytest.fixture
def model(make_model: Callable[..., Any]) -> Any:
    return make_model()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The engine is run on one thread in production too; and tests share the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def engine_for() -> Iterator[Callable[..., Any]]:
    """``engine_for(model, **options)`` starts an engine that ends with the test."""
    from rl_accel.integrations.cpu_engine.engine import Engine

    engines = []

    def start(model: Any, **options: Any) -> Any:
        engines.append(Engine(model, **{"eos_token_ids": [4], "max_num_seqs": 8, "max_model_len": 512, **options}))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, make_model) -> Path:
    """A random Qwen2 whose responses end after some 60 tokens; and a tokenizer with a token for each character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("slime") / "model"
    symbols = ["<pad>", "<unk>", "<eos>", "Ġ", *string.digits, *string.ascii_lowercase]
    tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)
    model = make_model(eos_token_id=2, pad_token_id=0, bos_token_id=None)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def serve(clean_environment, model_folder) -> Iterator[Callable[..., str]]:
    """``serve("--seconds-per-step", "0.01")`` starts a server and returns its address; the same options share one."""
    running: dict[tuple[str, ...], tuple[subprocess.Popen[str], str]] = {}

    def start(*options: str) -> str:
        if options not in running:
            command = [sys.executable, "-m", "rl_accel", "serve-cpu", "--model", str(model_folder), *options]
            process = subprocess.Popen(command, env=clean_environment, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"at (http://\S+)", line)
            if found is None:
                process.kill()
                raise AssertionError(f"the server did not start: {line!r}")
            running[options] = process, found[1]
        return running[options][1]

    yield start
    for process, _ in running.values():
        process.terminate()
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
