"""Downloads model and data of a GPU recipe from the Hugging Face hub: ``python from_hub.py gsm8k FOLDER --model NAME``.

Writes ``train.parquet`` and ``val.parquet`` in the columns of verl's datasets, and puts the model into the cache of the hub,
where nodes without internet find it. Files that exist are not downloaded again.
"""

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path

from datasets import Dataset, load_dataset

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def gsm8k() -> dict[str, Dataset]:
    """Returns GSM8K in the form that verl's reward for ``openai/gsm8k`` expects, with the answer after ####."""

    def row(example: dict, index: int) -> dict:
        answer = re.search(r"#### (-?[0-9.,]+)", example["answer"])
        if answer is None:
            raise ValueError(f"row {index} of openai/gsm8k has no answer after ####: {example['answer'][-80:]!r}")
        return {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{example['question']} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer[1].replace(",", "")},
            "extra_info": {"index": index},
        }

    both = load_dataset("openai/gsm8k", "main")
    parts = {"train": both["train"], "val": both["test"]}
    return {name: part.map(row, with_indices=True, remove_columns=part.column_names) for name, part in parts.items()}


def dapo_math() -> dict[str, Dataset]:
    """Returns DAPO-Math-17k with each prompt once (the hub's file repeats them), and AIME 2024 for validation."""
    train = load_dataset("BytedTsinghua-SIA/DAPO-Math-17k", split="train")
    seen: set[str] = set()

    def is_first(extra_info: dict) -> bool:
        new = extra_info["index"] not in seen
        seen.add(extra_info["index"])
        return new

    val = load_dataset("BytedTsinghua-SIA/AIME-2024", split="train")
    return {"train": train.filter(is_first, input_columns="extra_info"), "val": val}


def code() -> dict[str, Dataset]:
    """Returns the programming tasks of Eurus-2-RL-Data, which verl grades with ``prime_code``."""
    both = load_dataset("PRIME-RL/Eurus-2-RL-Data")
    parts = {"train": both["train"], "val": both["validation"]}
    return {
        name: part.filter(lambda ability: ability == "code", input_columns="ability") for name, part in parts.items()
    }


DATA: dict[str, Callable[[], dict[str, Dataset]]] = {"gsm8k": gsm8k, "dapo_math": dapo_math, "code": code}


def prepare(name: str, folder: Path, model: str) -> None:
    """Downloads the model, and writes missing files of the dataset ``name`` to ``folder``. An interruption leaves no partial
    file."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {part: folder / f"{part}.parquet" for part in ("train", "val")}
    if not all(file.exists() for file in files.values()):
        for part, rows in DATA[name]().items():
            unfinished = files[part].with_suffix(".tmp")
            rows.to_parquet(unfinished)
            os.replace(unfinished, files[part])
            print(f"{files[part]}: {len(rows)} prompts")
    if not Path(model).exists():
        from huggingface_hub import snapshot_download

        print(f"{model}: {snapshot_download(model)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", choices=sorted(DATA))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True, help="name of the model on the hub, or its folder")
    args = parser.parse_args()
    prepare(args.data, args.folder, args.model)
