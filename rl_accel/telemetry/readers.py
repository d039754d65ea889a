"""Reads the log of a run that was launched elsewhere: verl's file logger, TensorBoard, W&B's CSV, consoles of verl and slime."""

import csv
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import rich.progress
from rich.console import Console

from rl_accel.errors import RlAccelError
from rl_accel.telemetry.logs import LogRecord, merged, parse_log_line, read_console, read_slime_console
from rl_accel.telemetry.run_log import Logged, head_of

_STEP_KEYS = ("rollout/step", "eval/step", "_step", "Step", "step", "training/global_step")
"""Columns that may hold the step number of a CSV row, the most reliable first."""
_ENCODING = "utf-8-sig"
_LARGE = 50_000_000
"""Bytes from which reading a log takes seconds, and therefore shows a progress bar."""
_OTHERS = {
    r'\A:W&B|"_wandb"|"_runtime"': "it is W&B's own file: export the run's history as CSV",
    r"\A\x1f\ufffd|\A\(\ufffd/\ufffd|\A\ufffd7zXZ": "it is compressed",
    r"\x00": "it is binary: wanted plain text in UTF-8",
    r"\A\s*\Z": "it is empty",
    r"rlvr_pipeline|agentic_pipeline|\bpipeline step \d+ finished": "it is a log of ROLL",
    r"timing/make_experience|openrlhf|Episode \[\d+/\d+\]": "it is a log of OpenRLHF",
    r"completions/mean_length|'completion_length'": "it is a log of TRL",
    r"\(AReaL\)|\btimeperf/": "it is a log of AReaL",
    r"timing/train/total_step_time|nemo_rl": "it is a log of NeMo-RL",
    r'\A\{"(?:log|message|msg)":': "a log collector wrapped its lines in JSON: give what the container printed",
    r"\A\d{13} \S+ \d+\n": "it is a metric of MLflow",
}
"""Mapping from patterns of a file's text to the reason why it holds no metrics of verl or slime."""


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
    batches = [metrics["train/global_batch_size"] for _, metrics in records if "train/global_batch_size" in metrics]
    log.responses = round(sum(batches) / len(log.steps))
    return log


def _read(path: str, log: Logged) -> list[LogRecord]:
    """Returns the log records at ``path``. Fills in ``source``, ``files`` and ``workers`` of ``log``.

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
    for kind, (patterns, reader) in _KINDS.items():
        try:
            read_files = {file: list(reader(file, log, run)) for file in _files_of(place, kind, patterns)}
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            raise RlAccelError(f"{path} is of {kind}: to read it, pip install {package}") from error
        with_metrics = {file: records for file, records in read_files.items() if records}
        on_top = {file: records for file, records in with_metrics.items() if file.parent == place}
        chosen = on_top or with_metrics
        found_runs = {file.parent if kind == _TENSORBOARD else file for file in chosen}
        if len(found_runs) > 1:
            names = ", ".join(map(str, list(chosen)[:4])) + (f" and {len(chosen) - 4} more" if len(chosen) > 4 else "")
            raise RlAccelError(f"{path} holds several runs, wanted one of {names}; paths joined by commas are one run")
        if chosen:
            log.source = log.source or kind
            log.files += chosen
            return [record for records in chosen.values() for record in records]
    raise RlAccelError(
        f"{path} holds no metrics of verl or slime{_reason(place)}; wanted what verl or slime printed, the file of"
        " verl's file logger, TensorBoard's folder, or the CSV of a run's history that W&B exports"
    )


def _files_of(place: Path, kind: str, patterns: Sequence[str]) -> list[Path]:
    """Returns the files at ``place`` that may be logs of the ``kind``. A file that is named may have any name, in a text log."""
    if place.is_dir():
        files = sorted(file for pattern in patterns for file in place.rglob(pattern) if file.is_file())
    else:
        by_name = [known for known in (_TENSORBOARD, _CSV) if any(map(place.match, _NAMED[known]))]
        files = [place] if kind in (by_name or _TEXTS) else []
    unique = {file.resolve(): file for file in reversed(files)}  # a link beside its file
    return [file for file in reversed(unique.values()) if kind == _TENSORBOARD or "\0" not in head_of(file, 8192)]


def _reason(place: Path) -> str:
    """Returns the reason why there are no metrics at ``place``, as ": " and a clause; "" if it is unknown."""
    files = [place] if place.is_file() else sorted(file for file in place.rglob("*") if file.is_file())
    for file in files[:100]:
        text = head_of(file)
        reason = next((reason for pattern, reason in _OTHERS.items() if re.search(pattern, text)), "")
        if reason:
            return f": {reason}" if file == place else f": {file}: {reason}"
    return ""


def _lines(file: Path) -> Iterator[str]:
    """Yields the lines of a text log. Shows a progress bar if the log is large."""
    options: dict[str, Any] = {"encoding": _ENCODING, "errors": "replace", "newline": "\n"}
    if file.stat().st_size < _LARGE:  # a bar, even a hidden one, slows reading down
        opened: Any = file.open(**options)
    else:
        options |= {"description": file.name, "transient": True, "console": Console(stderr=True)}
        opened = rich.progress.open(file, "rt", **options)
    with opened as lines:
        yield from lines


def _verl(file: Path, _log: Logged, _run: str) -> Iterator[LogRecord]:
    for line in _lines(file):
        # files of responses or prompts may be large, and are not worth parsing
        if '"data"' in line and (record := parse_log_line(line)) and record[1]:
            yield record


def _tensorboard(file: Path, _log: Logged, _run: str) -> Iterator[LogRecord]:
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    events = EventAccumulator(str(file), size_guidance={SCALARS: 0}).Reload()
    scalars = [(event, tag) for tag in events.Tags()[SCALARS] for event in events.Scalars(tag)]
    for event, tag in sorted(scalars, key=lambda pair: (pair[0].wall_time, pair[0].step)):
        yield event.step, {tag: event.value}


def _csv(file: Path, _log: Logged, run: str) -> Iterator[LogRecord]:
    try:
        with file.open(newline="", encoding=_ENCODING) as lines:
            header, *rows = csv.reader(lines, strict=True)
    except (ValueError, csv.Error) as error:  # empty, not text, or an unclosed quote
        raise RlAccelError(f"{file} is no CSV file ({error})") from error
    names: dict[int, str] = {}
    for index, column in enumerate(header):
        run_of_column, _, name = column.rpartition(" - ")
        is_of_run = run_of_column == run or not run
        is_mean = not column.endswith(("__MIN", "__MAX"))
        if column in _STEP_KEYS or (is_of_run and is_mean):
            names[index] = name
    steps = [name for name in _STEP_KEYS if name in names.values()]
    if len(set(names.values())) < len(names) or len(names) < 2 or not steps:
        wanted = f"a column {' or '.join(_STEP_KEYS)} and metrics of one run, or {file}:RUN with the name of one"
        raise RlAccelError(f"{file} wants {wanted}, found {', '.join(header)}")
    records = []
    for row in rows:
        numbers = {names[index]: _cell(cell) for index, cell in enumerate(row) if index in names}
        known = {name: value for name, value in numbers.items() if math.isfinite(value)}
        step = next((known[name] for name in steps if name in known), None)
        metrics = {name: value for name, value in known.items() if name not in steps and not name.startswith("_")}
        metrics.pop("", None)  # the number of the row
        if step is not None and metrics and "train/step" not in known:  # that counts optimizer steps
            records.append((int(step), metrics))
    yield from sorted(records, key=lambda record: record[0])


def _cell(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _verl_console(file: Path, log: Logged, _run: str) -> Iterator[LogRecord]:
    yield from read_console(_lines(file), log.workers)


def _slime_console(file: Path, _log: Logged, _run: str) -> Iterator[LogRecord]:
    yield from read_slime_console(_lines(file))


_CONSOLES = ("*.log", "*.out", "*.err", "*.txt")
_TENSORBOARD = "TensorBoard"
_CSV = "a CSV of W&B"
_TEXTS = ("verl's file logger", "verl's console", "slime's console")
_NAMED = {_TENSORBOARD: ["*tfevents*"], _CSV: ["*.csv"]}
"""Patterns of the names of files that are only read as logs of one kind."""
_KINDS: dict[str, tuple[Sequence[str], Callable[[Path, Logged, str], Iterator[LogRecord]]]] = {
    "verl's file logger": (["*.jsonl"], _verl),
    _TENSORBOARD: (["*tfevents*"], _tensorboard),
    _CSV: ([], _csv),
    "verl's console": (_CONSOLES, _verl_console),
    "slime's console": (_CONSOLES, _slime_console),
}
"""Kinds of logs, the most detailed first: patterns of files that are read in a folder, and reader."""
