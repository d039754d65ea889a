"""Files of tail batching: its state in each checkpoint, and a log of the prompts that each step trained or gave up.

Commands that read the log import this module. It imports torch when a state is saved or restored, because that takes seconds.
"""

import contextlib
import datetime
import decimal
import hashlib
import importlib.util
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rl_accel.errors import ConfigError, RlAccelError, first_line, typed_line
from rl_accel.files import BAD_RECORD, append_line, write_atomically
from rl_accel.rollout.round_driver import PromptSupply, StepResult
from rl_accel.rollout.tail_batching import TailBatching

FOLDER = "tail_batching"
_STATE = "state.pt"
OTHER_CHECKPOINT = "Resume from another checkpoint, or without rl_accel.tail_batching"
"""Advice in error messages about a checkpoint that cannot be resumed."""


class ResumeError(ConfigError):
    """Error for a checkpoint without a state of tail batching, or with one that does not fit the resumed run."""


class WriteError(RlAccelError, OSError):
    """Error for a file of tail batching that cannot be written, such as on a full disk."""


def save(folder: Path, step: int, core: dict[str, Any], fetched: int, payloads: dict[str, dict[str, Any]]) -> None:
    """Writes the state of tail batching to ``folder`` in a checkpoint. A crash leaves either the old or the new state.

    Args:
        folder: folder for the state; created if missing.
        step: number of the training step of the checkpoint.
        core: result of ``TailBatching.state_dict()``.
        fetched, payloads: attributes of :class:`PromptSupply`.

    Raises:
        ConfigError: see :func:`packed`.
        WriteError: the file cannot be written.
    """
    state = {"step": step, "rows_fetched": fetched, "core": core, "payloads": payloads}
    content = packed(state)
    with writing(folder / _STATE):
        write_atomically(folder / _STATE, content)


@contextlib.contextmanager
def writing(file: Path) -> Iterator[None]:
    """Context manager for code that writes ``file``. Turns an OSError, such as a full disk, into a :class:`WriteError`."""
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"rl_accel.tail_batching: {file} cannot be written ({error.strerror or error}). Free space there, then resume "
            "from the last checkpoint"
        ) from error


def packed(content: Any) -> bytes:
    """Returns ``content``, such as data rows, as bytes for a checkpoint. Loading these bytes cannot run code.

    Raises:
        ConfigError: ``content`` holds an object that is no standard Python type, tensor, NumPy array or Pillow image.
    """
    import torch
    from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    with safe_globals(_row_types()):
        if unknown := get_unsafe_globals_in_checkpoint(file):
            raise ConfigError(f"rl_accel.tail_batching cannot save rows of the data that hold {', '.join(unknown)}")
    return file.getvalue()


def rows_digest(rows: Iterable[Any]) -> str:
    """Returns a text that identifies the content and the order of ``rows``: the same in every process that reads the same rows.

    A row may hold anything that Arrow, JSON and Pillow return. A value of another type counts by its type only.
    """
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(json.dumps(row, default=_as_json).encode())
    return digest.hexdigest()


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return hashlib.blake2b(value, digest_size=16).hexdigest()
    if hasattr(value, "tolist"):  # NumPy's arrays and numbers, tensors
        return value.tolist()
    if hasattr(value, "tobytes"):  # Pillow's images
        return _as_json(value.tobytes())
    if isinstance(value, datetime.date | datetime.timedelta | decimal.Decimal):
        return str(value)
    return type(value).__qualname__


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


def restore(
    folder: Path,
    step: int,
    core: TailBatching,
    supply: PromptSupply,
    rows_advice: str = "Resume with the data of the saved run",
) -> None:
    """Loads the state that :func:`save` wrote to ``folder`` into ``core`` and ``supply``.

    ``rows_advice`` is advice for the error message if the data has other rows than the saved run.

    Raises:
        ResumeError: the saved state is missing, damaged, or of another version or training step, or the saved run had another batch
            size, number of responses per prompt, data set or row order. Nothing is changed then.
    """
    import torch

    file = state_file(folder)
    try:
        with torch.serialization.safe_globals(_row_types()):
            state = torch.load(file, weights_only=True)
        if not isinstance(state, dict):
            raise TypeError(f"it must hold a dict, found {type(state).__name__}")
        saved_step = state["step"]
        fetched = state["rows_fetched"]
        saved_core = state["core"]
        payloads = state["payloads"]
    except Exception as error:  # a damaged file makes torch.load raise nearly any exception
        raise damaged(file, typed_line(error)) from error
    types = {"step": int, "rows_fetched": int, "core": dict, "payloads": dict}
    for name, wanted in types.items():
        if type(state[name]) is not wanted:
            raise damaged(file, f"{name} must be of type {wanted.__name__}, found {type(state[name]).__name__}")
    if saved_step != step:
        raise ResumeError(f"{file} must be of step {step}, found {saved_step}")
    restored = TailBatching(core.run)
    try:
        restored.load_state_dict(saved_core)
    except ValueError as error:
        advice = f". {rows_advice}" if saved_core.get("rows_id") != core.run.rows_id else ""
        raise ResumeError(f"{file} does not fit this run: {first_line(error)}{advice}") from error
    if differ := sorted(payloads.keys() ^ set(restored.unsettled_prompts()), key=str):
        raise damaged(file, f"the queue and the saved rows differ in {len(differ)} prompts, such as {differ[0]}")
    if len(payloads) + restored.settled != fetched:
        found = f"{len(payloads)} prompts are open and {restored.settled} settled, but {fetched} rows were fetched"
        raise damaged(file, found)
    for prompt_id, row in payloads.items():
        if not isinstance(row, dict):
            raise damaged(file, f"the row of prompt {prompt_id} must be of type dict, found {type(row).__name__}")
        if not supply.has_fetched(prompt_id, fetched):
            raise damaged(file, f"prompt {prompt_id} is none of the {fetched} rows that were fetched")
    core.load_state_dict(saved_core)
    supply.restore(fetched, payloads)


def damaged(file: Path, reason: str) -> ResumeError:
    """Returns the error for a damaged ``file`` of a checkpoint, which says what helps."""
    return ResumeError(f"{file} is damaged: {reason}. {OTHER_CHECKPOINT}")


class Ledger:
    """Log of the prompts that each training step trained, rejected or gave up: ``tail_batching/ledger.jsonl``.

    Each training step has one line, a JSON object. ``trained``, ``rejected`` and ``failed`` are mappings from prompt id
    (``epoch:row``) to the content of the column ``index`` in the data row. ``errors`` has the last error of each failed prompt.
    """

    def __init__(self, root: Path) -> None:
        self.path = root / FOLDER / "ledger.jsonl"

    def rewind(self, step: int) -> None:
        """Drops the lines of training steps after ``step``. For a run that resumes from the checkpoint of ``step``.

        Raises:
            ResumeError: the file cannot be read, or one of its lines is damaged. Nothing is changed then.
            WriteError: the file cannot be written.
        """
        kept = []
        for number, line in enumerate(self._lines(), start=1):
            try:
                line_step = json.loads(line)["step"]
                if type(line_step) is not int:
                    raise TypeError(f"step must be of type int, found {line_step!r}")
            except BAD_RECORD as error:
                raise self._damaged(f"line {number}: {typed_line(error)}") from error
            if line_step <= step:
                kept.append(line + "\n")
        with writing(self.path):
            write_atomically(self.path, "".join(kept))

    def add(self, step: int, result: StepResult) -> None:
        """Appends the line of training step ``step``. Raises WriteError if it cannot be written; no part of it is written then."""
        line = {"step": step, "round": result.batch.number, "kind": result.batch.kind}
        line |= {name: getattr(result, name) for name in ("trained", "rejected", "failed", "errors")}
        with writing(self.path):
            append_line(self.path, json.dumps(line, default=str))

    def _lines(self) -> list[str]:
        """Returns the lines of the file. Leaves out a half last line, which a run leaves that is killed while it writes."""
        try:
            text = self.path.read_text("utf-8")
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise self._damaged(typed_line(error)) from error
        lines = text.split("\n")
        last_line = lines.pop()
        with contextlib.suppress(ValueError):
            json.loads(last_line)
            lines.append(last_line)
        return lines

    def _damaged(self, reason: str) -> ResumeError:
        return ResumeError(f"{self.path} is damaged: {reason}. Move it away; the resumed run then begins a new one")
