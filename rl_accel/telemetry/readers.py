"""Readers for logs of runs that were launched elsewhere: verl's file logger, TensorBoard, W&B, consoles of verl and slime."""

import ast
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_accel.errors import RlAccelError
from rl_accel.telemetry.logs import ESCAPE, LogRecord, merged, parse_log_line, read_console, unreadable

_STEP_KEYS = ("rollout/step", "eval/step", "_step", "Step", "step")
"""Keys that may hold the step of a log record, the most reliable first. slime logs the first two. W&B's ``_step`` counts log
calls."""
_STEP_METRIC = "training/global_step"
"""verl's metric for the number of the training step, used if a log record has none of ``_STEP_KEYS``."""
_SLIME_LINE = re.compile(r"\b(?:rollout|perf|eval|passrate|multi_turn) (\d+): (\{.*\})")
_OBJECT = re.compile(r"<[^<>]*>")
"""Pattern of Python's text for an object, which is no Python, such as ``<AddBackward0>``."""
_BLOCK, _FULL, _FIRST, _LAST = 32768, 1, 2, 4


@dataclass
class Logged:
    """Metrics of one run, as ``steps``: step -> metric name -> value.

    ``source`` is the kind of log that was read. ``restarts`` holds the steps at which the run was restarted. ``config`` is the
    configuration of the run as logged by W&B, with the GPUs under the key ``gpus``; empty for other logs.
    """

    source: str
    steps: dict[int, dict[str, float]]
    restarts: list[int]
    config: dict[str, Any]


def read(*paths: str) -> Logged:
    """Reads the metrics of one run from a folder or log file. Several paths are read as consecutive starts of the same run.

    Raises:
        RlAccelError: a path has no log, a path has logs of several runs, or the Python package for reading a log is missing. The
            message names the path, and the runs or the package.
    """
    config: dict[str, Any] = {}
    found = [_read(path, config) for path in paths]
    steps, restarts = merged(record for _, records in found for record in records)
    return Logged(found[0][0], steps, restarts, config)


def _read(path: str, config: dict[str, Any]) -> tuple[str, list[LogRecord]]:
    """Reads the most detailed log at ``path``. Returns the kind of log (a key of :data:`_KINDS`) and the records of the log.

    Adds W&B's configuration of the run to ``config``.
    """
    name, is_csv, run = path.partition(".csv:")
    place = Path(f"{name}.csv" if is_csv else path)
    if not place.exists():
        raise RlAccelError(f"{place} does not exist")
    for kind, (pattern, reader) in _KINDS.items():
        is_one = place.is_file() and (place.match(pattern) or reader in (_verl_console, _slime))
        files = [place] if is_one else sorted(place.rglob(pattern)) if reader is not _csv else []
        try:
            logs = {file: list(reader(file, config, run)) for file in files if file.is_file()}
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            raise RlAccelError(f"{path} is of {kind}: to read it, pip install {package}") from error
        logs = {file: records for file, records in logs.items() if records}
        # a restarted run adds a TensorBoard event file to its folder, or a folder with the same W&B id
        runs = {getattr(file, {_tensorboard: "parent", _wandb: "name"}.get(reader, "parts")) for file in logs}
        if len(runs) > 1:
            raise RlAccelError(f"{path} holds several runs, wanted one of {', '.join(map(str, list(logs)[:4]))}")
        if logs:
            return kind, [record for records in logs.values() for record in records]
    raise RlAccelError(f"{path} holds no metrics of {', '.join(_KINDS)}{unreadable(place)}")


def _verl(file: Path, *_: Any) -> Iterator[LogRecord]:
    with file.open("rb") as lines:
        # files of responses or prompts may be large, and are not worth parsing
        yield from filter(None, (parse_log_line(line) for line in lines if b'"data"' in line))


def _verl_console(file: Path, *_: Any) -> Iterator[LogRecord]:
    with file.open(errors="replace") as lines:
        yield from read_console(lines)


def _tensorboard(file: Path, *_: Any) -> Iterator[LogRecord]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(file), size_guidance={"scalars": 0}, purge_orphaned_data=False).Reload()
    events = ((e.wall_time, e.step, tag, e.value) for tag in log.Tags()["scalars"] for e in log.Scalars(tag))
    yield from ((step, {tag: value}) for _, step, tag, value in sorted(events))


def _wandb(file: Path, config: dict[str, Any], _: str) -> Iterator[LogRecord]:
    from wandb.proto.wandb_internal_pb2 import Record

    for entry in _log_entries(file.read_bytes()):
        record = Record.FromString(entry)
        config |= {its.key: json.loads(its.value_json) for its in (*record.run.config.update, *record.config.update)}
        if record.environment.gpu_type:
            config["gpus"] = f"{record.environment.gpu_count} x {record.environment.gpu_type}"
        row = {its.key or its.nested_key[0]: json.loads(its.value_json) for its in record.history.item}
        yield from _record({"_step": record.history.step.num, **row})


def _log_entries(data: bytes) -> Iterator[bytes]:
    """Yields the complete entries of a W&B log file, whose format is that of LevelDB's logs. An incomplete last entry is skipped.

    The wandb package itself no longer reads this format.
    """
    at, entry = 7, b""
    while at + 7 <= len(data):
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if _BLOCK - at % _BLOCK < 7 or kind == 0:  # the rest of the block is padding
            at += _BLOCK - at % _BLOCK
            continue
        part = data[at + 7 : at + 7 + length]
        if len(part) < length:
            return
        at += 7 + length
        entry = part if kind in (_FULL, _FIRST) else entry + part
        if kind in (_FULL, _LAST):
            yield entry


def _csv(file: Path, _: Any, run: str) -> Iterator[LogRecord]:
    import pandas

    try:
        table = pandas.read_csv(file)
    except ValueError as error:  # empty, not text, or an unclosed quote
        raise RlAccelError(f"{file} is no CSV file ({' '.join(str(error).split())}){unreadable(file)}") from error
    keys = {*_STEP_KEYS, _STEP_METRIC}
    own = table[[name for name in table if name in keys or name.startswith(f"{run} - " if run else "")]]
    own = own.rename(columns=lambda name: name.rpartition(" - ")[2])
    if own.columns.duplicated().any() or len(own.columns) < 2 or not set(own) & keys:
        wanted = f"a column {' or '.join((*_STEP_KEYS, _STEP_METRIC))} and metrics of one run, or {file}:RUN with the name of one"
        raise RlAccelError(f"{file} wants {wanted}, found {', '.join(table)}")
    for row in own.apply(pandas.to_numeric, errors="coerce").to_dict("records"):
        yield from _record(row)


def _slime(file: Path, *_: Any) -> Iterator[LogRecord]:
    with file.open(errors="replace") as lines:
        for line in filter(None, (_SLIME_LINE.search(ESCAPE.sub("", line)) for line in lines)):
            try:
                shown = ast.parse(_OBJECT.sub("None", line[2]), mode="eval").body
            except (SyntaxError, ValueError, RecursionError, MemoryError):  # another text in braces
                continue
            if isinstance(shown, ast.Dict):
                pairs = zip(shown.keys, shown.values, strict=True)
                metrics = {str(key.value): _number(value) for key, value in pairs if isinstance(key, ast.Constant)}
                yield from _record({"_step": int(line[1]), **metrics})


def _number(value: ast.expr) -> float:
    """Returns the number in Python code such as ``0.5``, ``-inf``, ``np.int64(1)`` or ``tensor(0.5, ...)``; NaN for other code."""
    try:
        return float(ast.unparse(value.args[0] if isinstance(value, ast.Call) and value.args else value))
    except ValueError:
        return math.nan


def _record(row: Mapping[str, Any]) -> Iterator[LogRecord]:
    """Yields a record with the step and the finite numbers of a log row. Yields nothing if the row has no step or no numbers.

    Rows with the key ``train/step``, which describe optimizer steps of slime, are skipped too.
    """
    numbers = {
        name: float(value) for name, value in row.items() if isinstance(value, int | float) and math.isfinite(value)
    }
    steps = [numbers.pop(key) for key in _STEP_KEYS if key in numbers]
    if not steps and _STEP_METRIC in numbers:
        steps = [numbers[_STEP_METRIC]]
    metrics = {name: value for name, value in numbers.items() if not name.startswith(("_", "Unnamed"))}
    if steps and metrics and "train/step" not in row:
        yield int(steps[0]), metrics


_KINDS = {  # kinds of log, the most detailed first: pattern of file names, reader of a file
    "verl's file logger": ("*.jsonl", _verl),
    "TensorBoard": ("*tfevents*", _tensorboard),
    "W&B": ("*.wandb", _wandb),
    "a CSV of W&B": ("*.csv", _csv),
    "verl's console": ("*.[lo][ou][gt]", _verl_console),
    "slime's console": ("*.[lo][ou][gt]", _slime),  # .log or .out
}
