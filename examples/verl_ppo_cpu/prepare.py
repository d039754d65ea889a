"""Make the tiny model, its tokenizer and the data of this recipe: ``python prepare.py FOLDER``. Seconds, nothing is downloaded.

The task: a prompt such as ``digits kqx`` or ``letters 4b7`` names a kind of character and adds some noise; a response is
scored by the share of its characters that are of that kind (``reward.py``). The model, a Qwen2 of 0.1 million parameters, is
first taught for a few seconds to write mixed text that leans to the kind named, with response lengths spread out as
those of a real policy are: most short, a few up to the limit. With ``--lengths published`` a prompt such as ``digits Dqx``
holds a mark as well, and lengths have the long tail of ``published_lengths.py``. With ``--alike 0.95`` that share of their
characters follows from the last but one, always in the same way, so that responses have long stretches in common.
"""

import argparse
import hashlib
import json
import math
import random
import shutil
import string
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import published_lengths
import torch
from reward import KINDS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, BOS, UNK, START, END = "<pad>", "<bos>", "<unk>", "<|im_start|>", "<|im_end|>"
ALPHABET = string.digits + string.ascii_lowercase
TEMPLATE = (
    "{% for message in messages %}" + START + "{{ message['content'] }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}" + START + "{% endif %}"
)
LEAN = 0.6
"""Share of characters of the kind named in the text that the model is taught first."""
MEAN_LENGTH = 150
VALIDATION_PROMPTS = 32
LENGTHS = ("geometric", "published")


def tokenizer(lengths: str) -> PreTrainedTokenizerFast:
    """One token a character, and unused ones up to a multiple of 16, the size of the model's vocabulary: verl masks what the
    tokenizer lacks in vLLM and not in the trainer. Byte-level, because transformers reads no other tokenizer of a Qwen2 model.
    """
    symbols = [PAD, BOS, UNK, START, END, "Ċ", "Ġ", *ALPHABET]
    if lengths == "published":
        symbols += [*published_lengths.PROMPT_MARKS, *published_lengths.RESPONSE_MARKS]
    size = 16 * math.ceil(max(len(symbols), 64) / 16)
    unused = [f"<unused{i}>" for i in range(len(symbols), size)]
    symbols += unused
    core = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[], unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        unk_token=UNK,
        additional_special_tokens=[START, *unused],
        chat_template=TEMPLATE,
    )


def prompt(rng: random.Random, mark: str = "") -> tuple[str, str]:
    """Return the text of a prompt and the kind of character it names."""
    kind = rng.choice(sorted(KINDS))
    return f"{kind} {mark}{''.join(rng.choices(ALPHABET, k=3 - len(mark)))}", kind


def dataset(split: str, count: int, lengths: str, rng: random.Random) -> pd.DataFrame:
    """Return ``count`` prompts as verl's datasets hold them."""
    marks = [""] * count
    if lengths == "published":
        marks = published_lengths.marks_of_prompts(count, rng)
    rows = []
    for index, mark in enumerate(marks):
        text, kind = prompt(rng, mark)
        rows.append(
            {
                "data_source": "rl_accel/character_kinds",
                "prompt": [{"role": "user", "content": text}],
                "ability": "format",
                "reward_model": {"style": "rule", "ground_truth": kind},
                "extra_info": {"index": index, "split": split},
            }
        )
    return pd.DataFrame(rows)


def model(tok: PreTrainedTokenizerFast, limit: int) -> Qwen2ForCausalLM:
    """Return the tiny model with fresh weights, for responses of ``limit`` tokens."""
    config = Qwen2Config(
        vocab_size=len(tok),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2 * limit,
        bos_token_id=tok.bos_token_id,
        eos_token_id=tok.eos_token_id,
        pad_token_id=tok.pad_token_id,
        tie_word_embeddings=False,
    )
    built = Qwen2ForCausalLM(config)
    built.generation_config.eos_token_id = tok.eos_token_id
    return built


def teach(network: Qwen2ForCausalLM, tok: PreTrainedTokenizerFast, rng: random.Random, steps: int = 160) -> float:
    """Train ``network`` on mixed text and return the last loss. Text ends with probability 1/MEAN_LENGTH a character."""
    rows, width = 32, 96
    heads = []
    for text, kind in (prompt(rng) for _ in range(256)):
        turn = [{"role": "user", "content": text}]
        heads.append((tok.apply_chat_template(turn, add_generation_prompt=True, return_dict=False), kind))
    named = {kind: torch.tensor(tok.convert_tokens_to_ids(sorted(KINDS[kind]))) for kind in KINDS}
    other = {kind: torch.tensor(tok.convert_tokens_to_ids(sorted(set(ALPHABET) - KINDS[kind]))) for kind in KINDS}

    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
    loss = torch.zeros(())
    for _ in range(steps):
        ids = torch.full((rows, width), tok.pad_token_id)
        labels = torch.full((rows, width), -100)
        for row in range(rows):
            head, kind = rng.choice(heads)
            length = min(int(rng.expovariate(1 / MEAN_LENGTH)), width - len(head))
            body = torch.where(torch.rand(length) < LEAN, _draw(named[kind], length), _draw(other[kind], length))
            text = torch.cat([torch.tensor(head), body, torch.tensor([tok.eos_token_id])])[:width]
            ids[row, : len(text)] = text
            labels[row, len(head) : len(text)] = text[len(head) :]
        loss = network(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return loss.item()


def _draw(tokens: torch.Tensor, count: int) -> torch.Tensor:
    return tokens[torch.randint(len(tokens), (count,))]


def teach_published(
    network: Qwen2ForCausalLM, tok: PreTrainedTokenizerFast, rng: random.Random, alike: float, limit: int
) -> float:
    """Train ``network`` on such text, or one that is ``alike``, with the lengths of ``published_lengths``; return the last loss."""
    characters = {}
    for kind, named in KINDS.items():
        other = set(ALPHABET) - named
        characters[kind] = shares = torch.zeros(network.config.vocab_size)
        shares[tok.convert_tokens_to_ids(sorted(named))] = LEAN / len(named)
        shares[tok.convert_tokens_to_ids(sorted(other))] = (1 - LEAN) / len(other)

    def head(mark: int) -> tuple[list[int], torch.Tensor]:
        text, kind = prompt(rng, published_lengths.PROMPT_MARKS[mark])
        turn = [{"role": "user", "content": text}]
        tokens = tok.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
        return tokens, writer(characters[kind], following, alike)

    ring = random.Random(0).sample(tok.convert_tokens_to_ids(list(ALPHABET)), len(ALPHABET))
    following = dict(zip(ring, ring[1:] + ring[:1], strict=True))
    return published_lengths.teach(network, tok, rng, head, limit)


def writer(
    characters: torch.Tensor, following: dict[int, int], alike: float
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Return what writes ``characters``, (vocabulary,), but with probability ``alike`` what is ``following`` the last but one.

    So a text is two cycles of 36 characters, letter by letter in turns, and where one of them jumps they go on in another phase:
    of the 1,296 pairs of characters few have occurred before in the same text, and many in ten others.
    """

    def write(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.multinomial(characters, count, replacement=True)
        shares = characters.repeat(count, 1)
        if alike:
            goes_on = (torch.rand(count) < alike).tolist()
            tokens = drawn.tolist()
            for at in range(2, count):
                token = following[tokens[at - 2]]
                if goes_on[at]:
                    tokens[at] = token
                shares[at] *= 1 - alike
                shares[at, token] += alike
            drawn = torch.tensor(tokens)
        return drawn, shares

    return write


def prepare(folder: Path, lengths: str, prompts: int, alike: float, limit: int) -> None:
    """Write ``model/``, ``train.parquet`` and ``val.parquet`` to ``folder``, unless this version of them is there."""
    sources = [Path(__file__).with_name(name) for name in ("prepare.py", "reward.py", "published_lengths.py")]
    stamp = {
        "sources": hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest(),
        "lengths": lengths,
        "prompts": prompts,
        "alike": alike,
        "limit": limit,
    }
    marker = folder / "prepared.json"
    if marker.exists() and json.loads(marker.read_text()) == stamp:
        print(f"{folder} is up to date")
        return
    shutil.rmtree(folder / "model", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for split, count in {"train": prompts, "val": VALIDATION_PROMPTS}.items():
        dataset(split, count, lengths, rng).to_parquet(folder / f"{split}.parquet")
    tok = tokenizer(lengths)
    network = model(tok, limit)
    loss = teach(network, tok, rng) if lengths == "geometric" else teach_published(network, tok, rng, alike, limit)
    tok.save_pretrained(folder / "model")
    network.eval().save_pretrained(folder / "model")
    marker.write_text(json.dumps(stamp))
    count = sum(parameter.numel() for parameter in network.parameters())
    print(f"{folder}: a model of {count:,} parameters (loss {loss:.2f}), {prompts} prompts")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lengths", choices=LENGTHS, default="geometric", help="how long responses tend to be")
    parser.add_argument("--prompts", type=int, default=2048, help="rows of train.parquet")
    parser.add_argument(
        "--alike", type=float, default=0.0, help="share of characters that go on as others do (published)"
    )
    parser.add_argument(
        "--limit", type=int, default=published_lengths.LIMIT, help="tokens of the longest response (published)"
    )
    wanted = parser.parse_args()
    prepare(wanted.folder, wanted.lengths, wanted.prompts, wanted.alike, wanted.limit)
