"""Files of tail batching: its state in each checkpoint, and a log of the prompts that each step trained or gave up."""

import contextlib
import datetime
import decimal
import importlib.util
import io
import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from rl_accel.errors import ConfigError
from rl_accel.files import write_atomically
from rl_accel.rollout.round_driver import PromptSupply, StepResult
from rl_accel.rollout.tail_batching import TailBatching

FOLDER = "tail_batching"
_STATE = "state.pt"


class ResumeError(ConfigError):
    """Error for a checkpoint without a state of tail batching, or with one that does not fit the resumed run."""


def save(folder: Path, step: int, core: dict[str, Any], fetched: int, payloads: dict[str, dict[str, Any]]) -> None:
    """Writes the state of tail batching to ``folder`` in a checkpoint. A crash leaves either the old or the new state.

    Args:
        folder: folder for the state; created if missing.
        step: number of the training step of the checkpoint.
        core: result of ``TailBatching.state_dict()``.
        fetched, payloads: attributes of :class:`PromptSupply`.

    Raises:
        ConfigError: see :func:`packed`.
    """
    state = {"step": step, "rows_fetched": fetched, "core": core, "payloads": payloads}
    write_atomically(folder / _STATE, packed(state))


def packed(content: Any) -> bytes:
    """Returns ``content``, such as data rows, as bytes for a checkpoint. Loading these bytes cannot run code.

    Raises:
        ConfigError: ``content`` holds an object that is no standard Python type, tensor, NumPy array or Pillow image.
    """
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    with safe_globals(_row_types()):
        if unknown := get_unsafe_globals_in_checkpoint(file):
            raise ConfigError(f"rl_accel.tail_batching cannot save rows of the data that hold {', '.join(unknown)}")
    return file.getvalue()


def _row_types() -> list[Any]:
    """Returns the types that a saved data row may hold besides those that ``torch.load`` always allows."""
    types: list[Any] = [datetime.datetime, datetime.date, datetime.timedelta, decimal.Decimal, np.ndarray, np.dtype]
    types += [value.__reduce__()[0] for value in (np.empty(0), np.float64(0))]
    types += {type(np.dtype(code)) for code in np.typecodes["All"]}
    if importlib.util.find_spec("PIL"):
        from PIL import Image, ImageFile

        Image.init()
        types += [Image.Image, *ImageFile.ImageFile.__subclasses__()]
    return types


def state_file(folder: Path) -> Path:
    """Returns the path of the saved state in ``folder``. Raises ResumeError if it is missing or of an earlier version."""
    file = folder / _STATE
    if (folder / "state.json").exists():
        raise ResumeError(f"{folder} has the format of an earlier version of rl-accel, which is not read any more")
    if not file.exists():
        raise ResumeError(
            f"{folder.parent} was saved without tail batching: {file} is missing. Resume it without rl_accel.tail_batching"
        )
    return file


def restore(folder: Path, step: int, core: TailBatching, supply: PromptSupply) -> None:
    """Loads the state that :func:`save` wrote to ``folder`` into ``core`` and ``supply``.

    Raises:
        ResumeError: the saved state is missing, damaged, or of another version or training step, or the saved run had another batch
            size, number of responses per prompt, data set or row order. Nothing is changed then.
    """
    file = state_file(folder)
    try:
        with safe_globals(_row_types()):
            state = torch.load(file, weights_only=True)
        payloads = state["payloads"]
        saved_step, fetched, saved_core = state["step"], int(state["rows_fetched"]), state["core"]
    except (OSError, EOFError, RuntimeError, UnpicklingError, ValueError, KeyError, TypeError) as error:
        raise ResumeError(f"{folder} is damaged: {type(error).__name__}: {error}") from error
    if saved_step != step:
        raise ResumeError(f"{folder} must be of step {step}, found {saved_step}")
    restored = TailBatching(core.run)
    try:
        restored.load_state_dict(saved_core)
    except ValueError as error:
        raise ResumeError(f"{folder} does not fit this run: {error}") from error
    if differ := sorted(payloads.keys() ^ set(restored.unsettled_prompts())):
        raise ResumeError(
            f"{folder} is damaged: the queue and the saved rows differ in {len(differ)} prompts, such as {differ[0]}"
        )
    if len(payloads) + restored.settled != fetched:
        found = f"{len(payloads)} prompts are open and {restored.settled} settled, but {fetched} rows were fetched"
        raise ResumeError(f"{folder} is damaged: {found}")
    core.load_state_dict(saved_core)
    supply.restore(fetched, payloads)


class Ledger:
    """Log of the prompts that each training step trained, rejected or gave up: ``tail_batching/ledger.jsonl``.

    Each training step has one line, a JSON object. ``trained``, ``rejected`` and ``failed`` are mappings from prompt id
    (``epoch:row``) to the content of the column ``index`` in the data row. ``errors`` has the last error of each failed prompt.
    """

    def __init__(self, root: Path) -> None:
        self.path = root / FOLDER / "ledger.jsonl"

    def rewind(self, step: int) -> None:
        """Drops the lines of training steps after ``step``. For a run that resumes from the checkpoint of ``step``."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        kept = []
        for line in lines:
            with contextlib.suppress(ValueError):  # last line of a run that was killed while writing
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
        write_atomically(self.path, "".join(kept))

    def add(self, step: int, result: StepResult) -> None:
        """Appends the line of training step ``step``."""
        line = {"step": step, "round": result.batch.number, "kind": result.batch.kind}
        line |= {name: getattr(result, name) for name in ("trained", "rejected", "failed", "errors")}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")
