"""Makes the tiny model, its tokenizer and the data of this recipe: ``python prepare.py FOLDER``. Takes seconds, downloads nothing.

A prompt such as ``digits kqx`` or ``letters 4b7`` names a kind of character, followed by random characters. The reward of a
response is the share of its characters that are of this kind (``reward.py``).

The model is a Qwen2 of 0.1 million parameters. It is first trained for a few seconds on text in which 60% of the characters are
of the kind named. Most responses are short, a few reach the limit. Options of this script:

* ``--lengths published``: a prompt such as ``digits Dqx`` also has a mark, and response lengths have the long tail described in
  ``published_lengths.py``.
* ``--alike 0.95``: in a response, 95% of the characters are determined by the character two places before. Responses then
  have long passages in common, as speculative decoding needs.
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
"""Share of characters of the named kind in the text that the model is first trained on."""
MEAN_LENGTH = 150
VALIDATION_PROMPTS = 32
LENGTHS = ("geometric", "published")


def tokenizer(lengths: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per character.

    Unused tokens fill the vocabulary up to a multiple of 16, which is the model's vocabulary size. Without them verl would mask the
    missing tokens in vLLM, but not in the trainer. The tokenizer is byte-level, as transformers requires for Qwen2 models.
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
    """Returns a random prompt, and the kind of character that it names."""
    kind = rng.choice(sorted(KINDS))
    return f"{kind} {mark}{''.join(rng.choices(ALPHABET, k=3 - len(mark)))}", kind


def dataset(split: str, count: int, lengths: str, rng: random.Random) -> pd.DataFrame:
    """Returns ``count`` random prompts as rows with the columns of verl's datasets."""
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
    """Returns the tiny model with random weights, for responses of up to ``limit`` tokens."""
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
    network = Qwen2ForCausalLM(config)
    network.generation_config.eos_token_id = tok.eos_token_id
    return network


def teach(network: Qwen2ForCausalLM, tok: PreTrainedTokenizerFast, rng: random.Random, steps: int = 160) -> float:
    """Trains ``network`` on texts with the mean length ``MEAN_LENGTH``, and returns the last loss."""
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
    """Trains ``network`` on texts with published lengths and with the repetition ``alike``. Returns the last loss."""
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
    """Returns a function that draws random texts for training, see ``published_lengths.Writer``.

    With probability ``alike``, a character is determined by the character two places before (``following``). Otherwise it is drawn
    from the distribution ``characters``, shape (vocabulary,). A pair of neighbouring characters is thus rarely repeated within a
    text, but often occurs in ten other texts.
    """

    def write(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.multinomial(characters, count, replacement=True)
        shares = characters.repeat(count, 1)
        if alike:
            goes_on = (torch.rand(count) < alike).tolist()
            tokens = drawn.tolist()
            for i in range(2, count):
                token = following[tokens[i - 2]]
                if goes_on[i]:
                    tokens[i] = token
                shares[i] *= 1 - alike
                shares[i, token] += alike
            drawn = torch.tensor(tokens)
        return drawn, shares

    return write


def prepare(folder: Path, lengths: str, prompts: int, alike: float, limit: int) -> None:
    """Writes ``model/``, ``train.parquet`` and ``val.parquet`` to ``folder``, unless the same version of them is already there."""
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
    parser.add_argument("--lengths", choices=LENGTHS, default="geometric", help="distribution of response lengths")
    parser.add_argument("--prompts", type=int, default=2048, help="rows of train.parquet")
    parser.add_argument(
        "--alike", type=float, default=0.0, help="share of characters that repeat other texts (published)"
    )
    parser.add_argument(
        "--limit", type=int, default=published_lengths.LIMIT, help="tokens of the longest response (published)"
    )
    args = parser.parse_args()
    if args.lengths == "published" and args.limit < published_lengths.SMALLEST_LIMIT:
        raise SystemExit(
            f"--lengths published wants --limit of at least {published_lengths.SMALLEST_LIMIT}, found {args.limit}"
        )
    prepare(args.folder, args.lengths, args.prompts, args.alike, args.limit)
