"""Readers for logs of runs that were launched elsewhere: verl's file logger, TensorBoard, W&B, consoles of verl and slime."""

import ast
import contextlib
import itertools
import json
import math
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import rich.progress
from rich.console import Console

from rl_accel.errors import RlAccelError
from rl_accel.files import BAD_RECORD
from rl_accel.telemetry.logs import ESCAPE, PROCESS, LogRecord, merged, parse_log_line, read_console
from rl_accel.telemetry.stage_clock import OVERLAPPING

_STEP_METRIC = "training/global_step"
"""Name of the metric in which verl logs the number of the step."""
_STEP_KEYS = ("rollout/step", "eval/step", "_step", "Step", "step", _STEP_METRIC)
"""Keys that may hold the step number of a log record, the most reliable first."""
_SLIME_LINE = re.compile(r"\b(?:rollout|perf|eval|passrate|multi_turn) (\d+): (\{.*)")
_MOST_ROWS = 200
"""Maximum number of terminal rows in a line of slime's metrics. Saves time if the end of the line is missing. Chosen by hand."""
_OBJECT = re.compile(r"<[^<>]*>")
"""Pattern of a printed object that is no Python code, such as ``<AddBackward0>``."""
_BLOCK, _FULL, _FIRST, _LAST = 32768, 1, 2, 4
"""Constants of LevelDB's log format, which W&B uses: bytes in a block, and the marks of a whole entry, a first and a last part."""
_TEXT_KEYS = ("log", "message", "msg", "textPayload", "line")
"""Keys under which Docker and log collectors store the text of a console line, if they write lines as JSON."""
_PART = 4096
"""Length in characters from which a text without a line end is taken as part of a longer line. Docker cuts lines every 16 KiB,
which are at least 4,096 characters."""
_JSON_LINE = re.compile(rf'\{{.*"(?:{"|".join(_TEXT_KEYS)})":')
_KUBERNETES = re.compile(r"\d{4}-\S+ std(?:out|err) ([FP]) ")
"""Pattern of what Kubernetes puts before each line. The group is P if the text goes on in the next line, otherwise F."""
_ENCODING = "utf-8-sig"
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?")
_COMMA = re.compile(r"[-+.\d]*,\d[.,\d]*([eE][-+]?\d+)?")
"""Pattern of a number with commas, either as the decimal point or between thousands."""
_LARGE = 50_000_000
"""Size in bytes from which reading a log takes seconds, and therefore shows a progress bar."""
_BATCH = (
    re.compile(r"(?:train_batch_size|rollout[-_]batch[-_]size)['\"]?[ .=:]+(\d+)"),
    re.compile(r"(?:rollout[._]n|n[-_]samples[-_]per[-_]prompt)['\"]?[ .=:]+(\d+)"),
)
"""Patterns of the number of prompts in a batch and of the number of responses per prompt, in a launch line or configuration."""
_MOST_CONSOLES = 8
"""Maximum number of console files next to a log. If there are more, they are probably of other runs, and are not searched for the
batch size. Chosen by hand."""
TELEMETRY = "rl_accel/telemetry/"
"""Prefix of the metrics of the feature telemetry."""


@dataclass
class Logged:
    """Log of one run.

    Attributes:
        source: kind of log, such as "TensorBoard".
        files: log files that were read.
        steps: metrics of each step, by step number.
        restarts: steps at which the run was restarted.
        config: configuration of the run, and under ``gpus`` the number and type of its GPUs. Only for W&B; {} for other logs.
        workers: Ray's prefixes of the processes that logged the steps, see :func:`read_console`. Only for verl's console.
        damage: number of bytes that are damaged or cut off, by log file. Only for TensorBoard and W&B.
    """

    source: str = ""
    files: list[Path] = field(default_factory=list)
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    restarts: list[int] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    workers: list[str] = field(default_factory=list)
    damage: dict[Path, int] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = {"step": len(self.steps), "restart": len(self.restarts)}
        words = [f"{count} {noun}{'s' * (count != 1)}" for noun, count in counts.items() if count]
        has_telemetry = any(name.startswith(TELEMETRY) for name in self.metric_names)
        return ", ".join([self.source, *words, "telemetry" if has_telemetry else "no telemetry"])

    @property
    def metric_names(self) -> set[str]:
        """Names of all metrics of all steps."""
        return set().union(*self.steps.values())

    @property
    def notes(self) -> list[str]:
        """Sentences about data that were left out, and about several runs on one console."""
        notes = []
        if self.restarts:
            steps = ", ".join(map(str, self.restarts))
            notes.append(f"the run began again at step {steps}: what was logged before from there on is left out")
        if len(set(self.workers)) < len(self.workers):
            names = ", ".join(sorted({worker.strip() for worker in self.workers}))
            notes.append(f"several processes log steps in turns ({names}): runs on one console cannot be told apart")
        damaged = "bytes are damaged or cut off: what they hold is left out"
        return notes + [f"{file}: {count:,} {damaged}" for file, count in self.damage.items() if count]

    @property
    def is_slime(self) -> bool:
        """True for a log of slime, False for a log of verl."""
        return any("perf/step_time" in step for step in self.steps.values())

    @property
    def overlaps(self) -> bool:
        """True if rollouts run during training, as with slime's ``train_async.py``, and one_step_off and fully_async of verl."""
        steps = self.steps.values()
        needed = ("perf/rollout_time", "perf/train_wait_time")
        late = [step[needed[0]] > step[needed[1]] for step in steps if all(name in step for name in needed)]
        return 2 * sum(late) > len(late) or not all(map(OVERLAPPING.isdisjoint, steps))

    def batch(self) -> tuple[int | None, int | None]:
        """Returns the number of prompts in a batch and the number of responses per prompt. Each number is None if it is unknown.

        Searches W&B's configuration, the log itself, and ``run.json`` in the log's folder, in this order. If a number is in none of
        them, it is taken from console files in the folder, if these agree.

        Only the first megabyte of a file is searched, because it holds the launch line. For a restarted run, the whole file is
        searched, because it holds several launch lines, of which the last counts.
        """
        section: Any = self.config
        for key in ("actor_rollout_ref", "rollout", "n"):
            section = section.get(key) if isinstance(section, dict) else None
        config = json.dumps({**self.config, "rollout.n": section})
        folders = dict.fromkeys(file.parent for file in self.files)
        files = [*reversed(self.files), *(file for folder in folders for file in folder.glob("run.json"))]
        patterns = () if "console" in self.source else ("*.log", "*.out")
        beside = [file for folder in folders for pattern in patterns for file in folder.glob(pattern) if file.is_file()]
        names = {file.stem for file in self.files}
        consoles = [file for file in beside if file.stem in names] or beside
        consoles = consoles if len(consoles) <= _MOST_CONSOLES else []
        is_restarted = bool(self.restarts)
        own = [_sizes([config]), *(_sizes(_chunks(file, is_restarted)) for file in files)]
        others = [_sizes(_chunks(file, is_restarted)) for file in consoles]

        def size(index: int) -> int | None:
            known = [sizes[index] for sizes in own if sizes[index]]
            guessed = {sizes[index] for sizes in others if sizes[index]}
            return known[0] if known else guessed.pop() if len(guessed) == 1 else None

        return size(0), size(1)


def starts_of(run: str) -> list[str]:
    """Splits ``run`` at the commas into the paths of the logs of a run's consecutive starts. Does not split an existing path.

    Raises:
        RlAccelError: a path is empty.
    """
    starts = [run] if run.strip() and Path(run).exists() else [start.strip() for start in run.split(",")]
    if not all(starts):
        raise RlAccelError(f"{run!r} wants a path before and after each comma, found an empty one")
    return starts


def read(*runs: str) -> Logged:
    """Reads the metrics of one run from a folder or log file.

    Several paths (as several arguments, or joined by commas) are the logs of consecutive starts of the run.

    Raises:
        RlAccelError: there is no log, there are logs of several runs, the Python package for reading the log is missing, or the log
            has no training steps. The message names the path, the runs or the package.
    """
    log = Logged()
    records = [record for run in runs for path in starts_of(run) for record in _read(path, log)]
    log.steps, log.restarts = merged(records)
    if not log.steps:
        raise RlAccelError(
            f"{','.join(runs)} holds only metrics of optimizer steps, train/…; wanted those of training steps"
        )
    return log


def _read(path: str, log: Logged) -> list[LogRecord]:
    """Returns the log records at ``path``. Fills in the fields of ``log`` except ``steps`` and ``restarts``.

    If there are several kinds of logs, only the most detailed is read: the first in :data:`_KINDS`.

    Raises:
        RlAccelError: as for :func:`read`.
    """
    name, is_csv, run = path.partition(".csv:")
    place = Path(f"{name}.csv" if is_csv else path)
    if not place.exists():
        raise RlAccelError(f"{place} does not exist")
    if not (place.is_file() or place.is_dir()):
        raise RlAccelError(f"{place} is no regular file, such as a pipe: write its text to a file first")
    for kind, (in_folder, named, reader, part) in _KINDS.items():
        if place.is_file():
            files = [place] if place.match(named) else []
        else:
            files = sorted(file for pattern in in_folder for file in place.rglob(pattern))
        try:
            once = {file.resolve(): file for file in reversed(files) if file.is_file()}  # a path per file
            logs = {file: list(reader(file, log, run)) for file in reversed(once.values()) if not _defect(file)}
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            raise RlAccelError(f"{path} is of {kind}: to read it, pip install {package}") from error
        logs = {file: records for file, records in logs.items() if records}
        logs = {file: records for file, records in logs.items() if file.parent == place} or logs
        if len({getattr(file, part) for file in logs}) > 1:
            names = ", ".join(map(str, list(logs)[:4])) + (f" and {len(logs) - 4} more" if len(logs) > 4 else "")
            raise RlAccelError(f"{path} holds several runs, wanted one of {names}; paths joined by commas are one run")
        if logs:
            log.source = log.source or kind
            log.files += logs
            return [record for records in logs.values() for record in records]
    files = [place] if place.is_file() else sorted(place.rglob("*"))
    texts = [file for file in files if file.is_file() and (file == place or _LOG_NAME.search(file.name))]
    found = ((file, _defect(file) if file.stat().st_size else "is empty") for file in texts)
    defects = (f"{file} {defect}: wanted plain text in UTF-8" for file, defect in found if defect)
    help_ = next(defects, "what verl or slime prints while it trains suffices")
    raise RlAccelError(f"{path} holds no metrics of {', '.join(_KINDS)}; {help_}")


_LOG_NAME = re.compile(r"\.(jsonl|log|out|err|txt|csv)\b")
_DEFECTS = {
    b"\x1f\x8b": "is compressed (gzip)",
    b"\x28\xb5\x2f\xfd": "is compressed (zstd)",
    b"\xfd7zXZ": "is compressed (xz)",
    b"\xff\xfe": "is in UTF-16",
    b"\xfe\xff": "is in UTF-16",
}
"""Mapping from the first bytes of a file to the reason why it is no text log."""


def _defect(file: Path) -> str:
    """Returns the reason why ``file`` cannot be a log, such as "is compressed (gzip)"; "" if there is none."""
    with file.open("rb") as opened:
        head = opened.read(8192)
    known = [reason for magic, reason in _DEFECTS.items() if head.startswith(magic)]
    is_binary = b"\0" in head and not any(map(file.match, ("*tfevents*", "*.wandb")))
    return known[0] if known else "is binary" if is_binary else ""


def _opened(file: Path) -> contextlib.AbstractContextManager[TextIO]:
    """Opens a log. Shows a progress bar only if the log is large, because the bar slows reading down."""
    if file.stat().st_size < _LARGE:
        return file.open(encoding=_ENCODING, errors="replace")
    look: dict[str, Any] = {"description": file.name, "transient": True, "console": Console(stderr=True)}
    return rich.progress.open(file, "rt", encoding=_ENCODING, errors="replace", **look)


def _lines(file: Path) -> Iterator[str]:
    """Yields the lines of a text log, without what Docker, Kubernetes or a log collector added to them."""
    whole = ""
    with _opened(file) as lines:
        for line in lines:
            if _JSON_LINE.match(line):
                with contextlib.suppress(*BAD_RECORD):
                    record = json.loads(line)
                    key, *_ = (key for key in _TEXT_KEYS if key in record)
                    line = str(record[key])
                    line += "\n" * (key != "log" or not (line.endswith("\n") or len(line) >= _PART))
            elif begun := _KUBERNETES.match(line):
                line = line[begun.end() :].removesuffix("\n" if begun[1] == "P" else "")
            whole += line
            if whole.endswith("\n"):
                yield whole
                whole = ""
    if whole:
        yield whole


def _chunks(file: Path, is_whole: bool) -> Iterator[str]:
    """Yields parts of a text file, each about a megabyte of whole lines. Yields only the first part unless ``is_whole``."""
    with file.open(encoding=_ENCODING, errors="replace") as lines:
        while chunk := lines.readlines(1_000_000):
            yield ESCAPE.sub("", "".join(chunk))
            if not is_whole:
                return


def _sizes(texts: Iterable[str]) -> list[int | None]:
    """Returns the number of prompts in a batch and of responses per prompt, as ``texts`` say last; None if they do not."""
    sizes: list[int | None] = [None, None]
    for text in texts:
        for index, pattern in enumerate(_BATCH):
            if numbers := pattern.findall(text):
                sizes[index] = int(numbers[-1])
    return sizes


def _verl(file: Path, *_: Any) -> Iterator[LogRecord]:
    with _opened(file) as lines:
        for line in lines:
            # files of responses or prompts may be large, and are not worth parsing
            if '"data"' in line and (record := parse_log_line(line)) and record[1]:
                yield record


def _verl_console(file: Path, log: Logged, _: str) -> Iterator[LogRecord]:
    yield from read_console(_lines(file), log.workers)


def _tensorboard(file: Path, log: Logged, _: str) -> Iterator[LogRecord]:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    entries = [*RawEventFileLoader(str(file)).Load()]  # up to the first one that is damaged
    log.damage[file] = file.stat().st_size - sum(16 + len(entry) for entry in entries)  # with length and checksums
    events = [(event, value) for event in map(Event.FromString, entries) for value in event.summary.value]
    for event, value in sorted(events, key=lambda pair: (pair[0].wall_time, pair[0].step)):
        if value.HasField("simple_value"):
            yield event.step, {value.tag: value.simple_value}


def _wandb(file: Path, log: Logged, _: str) -> Iterator[LogRecord]:
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    config = log.config
    for entry in _log_entries(file, log):
        try:
            record = Record.FromString(entry)
            config |= {
                item.key: json.loads(item.value_json) for item in (*record.run.config.update, *record.config.update)
            }
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        except (DecodeError, *BAD_RECORD):  # a part of a damaged file
            continue
        if record.environment.gpu_type:
            config["gpus"] = f"{record.environment.gpu_count} x {record.environment.gpu_type}"
        yield from _record({"_step": record.history.step.num, **row})


def _log_entries(file: Path, log: Logged) -> Iterator[bytes]:
    """Yields the undamaged entries of a W&B log file. Stores the number of damaged bytes in ``log.damage``."""
    # the format of LevelDB's logs, which the wandb package itself no longer reads
    data, at, entry = file.read_bytes(), 7, b""
    log.damage[file] = 0
    while at + 7 <= len(data):
        checksum, length, kind = struct.unpack_from("<IHB", data, at)
        block = _BLOCK - at % _BLOCK
        if block < 7 or kind == 0:  # the rest of the block is padding
            at += block
            continue
        part = data[at + 7 : at + 7 + length]
        size = min(7 + length, block, len(data) - at)  # an entry lies in one block, or has a part in each
        at += size
        if checksum != zlib.crc32(bytes([kind]) + part):
            log.damage[file] += size
            entry = b""
            continue
        entry = part if kind in (_FULL, _FIRST) else entry and entry + part
        if kind in (_FULL, _LAST) and entry:
            yield entry


def _csv(file: Path, _: Any, run: str) -> Iterator[LogRecord]:
    import pandas

    try:
        with file.open(encoding=_ENCODING) as lines:
            separator = max(",;\t", key=lines.readline().count)
        rows = pandas.read_csv(file, sep=separator, header=None, dtype=str, encoding=_ENCODING)
    except ValueError as error:  # empty, not text, or an unclosed quote
        raise RlAccelError(f"{file} is no CSV file ({' '.join(str(error).split())})") from error
    table = rows[1:].set_axis(rows.iloc[0].fillna("Unnamed"), axis=1)  # pandas would rename equal columns
    run_columns = table.loc[:, [name in _STEP_KEYS or name.startswith(f"{run} - " if run else "") for name in table]]
    run_columns = run_columns.rename(columns=lambda name: name.rpartition(" - ")[2])
    if run_columns.columns.duplicated().any() or len(run_columns.columns) < 2 or not set(run_columns) & set(_STEP_KEYS):
        wanted = f"a column {' or '.join(_STEP_KEYS)} and metrics of one run, or {file}:RUN with the name of one"
        raise RlAccelError(f"{file} wants {wanted}, found {', '.join(table)}")
    for cell in filter(_COMMA.fullmatch, run_columns.fillna("").to_numpy().ravel()):
        if separator == ";" or not _THOUSANDS.fullmatch(cell):
            raise RlAccelError(f"{file} wants numbers with a decimal point, found {cell}")
    run_columns = run_columns.apply(lambda cells: pandas.to_numeric(cells.str.replace(",", ""), errors="coerce"))
    records = [record for row in run_columns.to_dict("records") for record in _record(row)]
    is_newest_first = all(later < sooner for (sooner, _), (later, _) in itertools.pairwise(records))
    yield from reversed(records) if is_newest_first else records


def _slime(file: Path, *_: Any) -> Iterator[LogRecord]:
    step, shown, rows = 0, "", [0]  # text of the line so far; number of characters of each row
    for line in _lines(file):
        if not shown and ": {" not in line:  # most lines of a large log
            continue
        text = ESCAPE.sub("", line.rstrip("\n"))
        if begun := _SLIME_LINE.search(text):
            step, shown, rows = int(begun[1]), begun[2], [len(text)]
        elif PROCESS.match(text) or len(text) > rows[0] + 1 or 2 * rows[-1] < rows[0] or len(rows) == _MOST_ROWS:
            shown = ""  # a new line of the log: rows that a terminal has wrapped are equally long, except the last
        else:
            shown, rows = shown + text, [*rows, len(text)]
        if "}" in text and shown and (metrics := _metrics(shown)):
            shown = ""
            yield from _record({"_step": step, **metrics})


def _metrics(shown: str) -> dict[str, float]:
    """Returns the metrics in a text that begins with a printed Python dict; {} for any other text."""
    code = _OBJECT.sub("None", shown[: shown.rfind("}") + 1])
    try:
        tree = ast.parse(code, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    pairs = zip(tree.keys, tree.values, strict=True) if isinstance(tree, ast.Dict) else ()
    return {str(key.value): _number(value) for key, value in pairs if isinstance(key, ast.Constant)}


def _number(value: ast.expr) -> float:
    """Returns the number in code such as ``0.5``, ``-inf``, ``np.int64(1)`` or ``tensor(0.5, ...)``; NaN for other code."""
    try:
        return float(ast.unparse(value.args[0] if isinstance(value, ast.Call) and value.args else value))
    except ValueError:
        return math.nan


def _record(row: Mapping[str, Any]) -> Iterator[LogRecord]:
    """Yields the step and the finite numbers of a log row; nothing if the row has no step or no numbers.

    Skips slime's rows about optimizer steps, which have the key ``train/step``.
    """
    numbers = {
        name: float(value) for name, value in row.items() if isinstance(value, int | float) and math.isfinite(value)
    }
    steps = [numbers[key] for key in _STEP_KEYS if key in numbers]
    other_names = [name for name in numbers if name == _STEP_METRIC or name not in _STEP_KEYS]
    metrics = {name: numbers[name] for name in other_names if not name.startswith(("_", "Unnamed"))}
    if steps and metrics and "train/step" not in row:
        yield int(steps[0]), metrics


def _json(file: Path, *_: Any) -> Iterator[LogRecord]:
    with _opened(file) as lines:
        for line in lines:
            with contextlib.suppress(*BAD_RECORD):
                rows = json.loads(line) if '"_step"' in line else []
                for row in rows if isinstance(rows, list) else [rows]:
                    yield from _record(row)


_CONSOLES = ("*.log", "*.out", "*.err", "*.txt")
_KINDS: dict[str, tuple[tuple[str, ...], str, Callable[[Path, Logged, str], Iterator[LogRecord]], str]] = {
    "verl's file logger": (("*.jsonl",), "*", _verl, "parts"),
    "TensorBoard": (("*tfevents*",), "*tfevents*", _tensorboard, "parent"),
    "W&B": (("*.wandb",), "*.wandb", _wandb, "name"),
    "a CSV of W&B": ((), "*.csv", _csv, "parts"),
    "verl's console": (_CONSOLES, "*", _verl_console, "parts"),
    "slime's console": (_CONSOLES, "*", _slime, "parts"),
    "W&B's rows in JSON": (("wandb-summary.json", "*.jsonl"), "*", _json, "parts"),
}
"""Kinds of logs, the most detailed first.

Values: patterns of files that are read in a folder; pattern of a file that the user names; reader; attribute of the path that
is equal for all files of one run (``parts``: a run has one file). A restart adds a TensorBoard file to the same folder, or a W&B
file of the same name in another folder."""
