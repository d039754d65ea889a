"""Make the tiny model, its tokenizer and the data of this recipe: ``python prepare.py FOLDER``. Seconds, nothing is downloaded.

The task: a prompt such as ``digits kqx`` or ``letters 4b7`` names a kind of character and adds some noise; a response is
scored by the share of its characters that are of that kind (``reward.py``). The model, a Qwen2 of 0.1 million parameters, is
first taught for a few seconds to write mixed text that leans to the kind named, with response lengths spread out as
those of a real policy are: most short, a few up to the limit.
"""

import argparse
import hashlib
import json
import random
import shutil
import string
from pathlib import Path

import pandas as pd
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
PROMPTS = {"train": 2048, "val": 32}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character. Byte-level, because transformers reads the tokenizer of a Qwen2 model in no other way."""
    symbols = [PAD, BOS, UNK, START, END, "Ċ", "Ġ", *ALPHABET]
    core = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[], unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END,
        unk_token=UNK,
        additional_special_tokens=[START],
        chat_template=TEMPLATE,
    )


def prompt(rng: random.Random) -> tuple[str, str]:
    """Return the text of a prompt and the kind of character it names."""
    kind = rng.choice(sorted(KINDS))
    return f"{kind} {''.join(rng.choices(ALPHABET, k=3))}", kind


def dataset(split: str, rng: random.Random) -> pd.DataFrame:
    """Return prompts as verl's datasets hold them."""
    rows = []
    for index in range(PROMPTS[split]):
        text, kind = prompt(rng)
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


def model(tok: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Return the tiny model with fresh weights."""
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
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


def prepare(folder: Path) -> None:
    """Write ``model/``, ``train.parquet`` and ``val.parquet`` to ``folder``, unless this version of them is there."""
    sources = [Path(__file__), Path(__file__).with_name("reward.py")]
    stamp = {"sources": hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()}
    marker = folder / "prepared.json"
    if marker.exists() and json.loads(marker.read_text()) == stamp:
        print(f"{folder} is up to date")
        return
    shutil.rmtree(folder / "model", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for split in PROMPTS:
        dataset(split, rng).to_parquet(folder / f"{split}.parquet")
    tok = tokenizer()
    network = model(tok)
    loss = teach(network, tok, rng)
    tok.save_pretrained(folder / "model")
    network.eval().save_pretrained(folder / "model")
    marker.write_text(json.dumps(stamp))
    count = sum(parameter.numel() for parameter in network.parameters())
    print(f"{folder}: a model of {count:,} parameters (loss {loss:.2f}), {PROMPTS['train']} prompts")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    prepare(parser.parse_args().folder)
