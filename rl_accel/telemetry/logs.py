"""Parsers for verl's file logger and for the consoles of verl and slime, and the merge of a run's log records."""

import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rl_accel.files import BAD_RECORD

LogRecord = tuple[int, dict[str, float]]
"""Number of a step and the metrics that were logged for it, by name."""

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])")
"""Pattern of a terminal's control sequence, such as a colour."""
_BAR = re.compile(r"\r?(?:[A-Z][\w ]{0,80}:)?\s*\d+%+\|[^|\r\n]{0,200}\|[^\]\r\n]{0,200}\]\r?")
"""Pattern of a progress bar of tqdm, which may stand anywhere in a line."""
PROCESS = re.compile(r"\([\w:]+[^()]*pid=[^()]*\)\s?")
"""Pattern of the prefix that Ray writes before each line of a worker, such as ``(TaskRunner pid=3165)``."""
_STEP = re.compile(r"\bstep:(\d+) - (.*)")
_NEXT_STEP = re.compile(r"(?<=[\d)\]])\s+(?=step:\d+ - )")
"""Pattern of the space between two steps in one console line."""
_SEPARATOR = re.compile(r"\s+-(?:\s+|(?=[A-Za-z]))")
_NUMBER = r"(?:[a-z]\w*(?:\.\w+)?\()?([-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|nan|inf))(?![\w./:-])"
"""Pattern of a printed number, also within ``np.float64(…)`` or ``tensor(…)``; not of the start of a version, date or path."""
_METRIC = re.compile(rf"(.+?):\s*{_NUMBER}")
"""Pattern of a metric on verl's console. Its name may hold colons and spaces."""
_WIDEST_TERMINAL = 500
"""Characters in the longest row of a console that a terminal may have wrapped. Lines of verl's metrics are longer."""
MOST_ROWS = 200
"""Maximum number of console rows in the metrics of one step. Bounds the search for an end that is missing."""
_SLIME_LINE = re.compile(r"\b(?:rollout|perf|eval|passrate|multi_turn|step) (\d+): (\{.*)")
_SLIME_METRIC = re.compile(rf"'([^']*/[^']*)':\s*{_NUMBER}")
"""Pattern of a metric in slime's printed dicts. The names of slime's metrics have a slash."""


def read_log(path: Path) -> dict[int, dict[str, float]]:
    """Returns the metrics of each step in a file of verl's file logger, by step number.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return merged(filter(None, map(parse_log_line, file)))[0]


def merged(records: Iterable[LogRecord]) -> tuple[dict[int, dict[str, float]], list[int]]:
    """Merges the log records of a run. Returns the metrics by step number, and the steps at which the run was restarted.

    If a metric is logged for step 7 and then again for step 5, the run was restarted at step 5. Earlier metrics of this step and of
    later steps are discarded. If the second record holds only validation metrics, the run was restarted at step 6: a resumed run
    first validates the step of its checkpoint. slime's ``train/*`` metrics are left out, because they count optimizer steps.
    """
    steps: dict[int, dict[str, float]] = {}
    last: dict[str, int] = {}
    restarts = []
    for step, metrics in records:
        numbers = {name: value for name, value in metrics.items() if not name.startswith("train/")}
        if any(last.get(name, step) > step for name in numbers):
            first = step + all(name.startswith("val") for name in numbers)
            restarts.append(first)
            steps = {earlier: metrics for earlier, metrics in steps.items() if earlier < first}
            last = {name: earlier for name, earlier in last.items() if earlier < first}
        if numbers:
            steps.setdefault(step, {}).update(numbers)
            last |= dict.fromkeys(numbers, step)
    return dict(sorted(steps.items())), restarts


def parse_log_line(line: str | bytes) -> LogRecord | None:
    """Returns the step and the numeric metrics in a line ``{"step": int, "data": {name: value}}``; None for any other line.

    The value null is returned as NaN.
    """
    try:
        entry: Any = json.loads(line)
        numbers = {
            str(name): math.nan if value is None else float(value)  # the writer turns NaN into null
            for name, value in entry["data"].items()
            if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        }
        return int(entry["step"]), numbers
    except BAD_RECORD:
        return None


def read_console(lines: Iterable[str], workers: list[str] | None = None) -> Iterator[LogRecord]:
    """Yields the number and the metrics of each step in verl's console output, in the order of the lines.

    A step has a line such as ``(TaskRunner pid=7) step:3 - timing_s/gen:4.2 - critic/vf_loss:np.float64(0.1)``. All other lines are
    skipped. If a terminal has wrapped the lines, their rows are joined. If the last line has no line end, its last metric is left
    out.

    The names of verl's metrics have a slash. If any line has such a name, lines without a slash are skipped as parts of printed
    responses.

    If the list ``workers`` is given, Ray's prefix of each process that logged a step is appended, once for consecutive steps.
    """
    steps = _rows_of_steps(lines)
    widths = [len(rows[0]) for _, rows in steps if "/" in rows[0]]
    # a terminal cuts all lines at one width, and verl's lines are longer than two rows of it
    is_wrapped = (
        any(len(rows) > 2 for _, rows in steps)
        and max(widths, default=0) < _WIDEST_TERMINAL
        and min(widths, default=0) >= max(widths, default=0) - 1
    )
    records = []
    for process, rows in steps:
        line = _joined(rows) if is_wrapped else rows[0]
        found = map(_record, _NEXT_STEP.split(line))
        records += [(process, record) for record in found if record]
    has_slashes = any("/" in name for _, (_, metrics) in records for name in metrics)
    for process, (step, metrics) in records:
        if not has_slashes or any("/" in name for name in metrics):
            if workers is not None and [process] != workers[-1:]:
                workers.append(process)
            yield step, metrics


def _rows_of_steps(lines: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Returns Ray's prefix ("" if there is none) and the console rows of each step: the row with its number, and those behind it
    which belong to it if a terminal has wrapped the line: as long as the row before is as wide as the first, but for a space.
    """
    steps: list[tuple[str, list[str]]] = []
    is_open = False
    for line in lines:
        if "step:" not in line and not is_open:  # most lines of a large log
            continue
        for row in plain_rows(line):
            if begun := _STEP.search(row):
                # a container, a node or a logger may have put other text, such as the time, before Ray's prefix
                prefix = PROCESS.search(row, 0, begun.start())
                steps.append((prefix[0] if prefix else "", [row]))
                is_open = True
            elif is_open and row:
                rows = steps[-1][1]
                is_open = len(rows[-1]) >= len(rows[0]) - 1 and len(rows) < MOST_ROWS and not PROCESS.match(row)
                if is_open:
                    rows.append(row)
    return steps


def plain_rows(line: str) -> list[str]:
    """Returns the console rows in ``line``, without colours, other control sequences and progress bars.

    If there is no line end, the console stops here, and what stands behind the last " - " may be cut off: it is left out.
    """
    if not line.endswith("\n"):
        line = line.rpartition(" - ")[0]
    text = _ESCAPE.sub("", line.rstrip("\n"))
    if "%|" in text:
        text = _BAR.sub("", text)
    return text.split("\r")


def _joined(rows: Iterable[str]) -> str:
    text = ""
    for row in rows:
        text += f" {row}" if row.startswith("- ") else row  # a space at the end of a row may be lost
    return text


def _record(line: str) -> LogRecord | None:
    """Returns the step number and the metrics in the log line of a step; None if there are no metrics."""
    step = _STEP.search(line)
    if step is None:
        return None
    matches = map(_METRIC.match, _SEPARATOR.split(step[2]))
    metrics = {match[1]: float(match[2]) for match in matches if match}
    return (int(step[1]), metrics) if metrics else None


def read_slime_console(lines: Iterable[str]) -> Iterator[LogRecord]:
    """Yields the number and the metrics in each dict of metrics that slime prints, such as ``perf 3: {'perf/step_time': 4.2}``.

    The dict may go on in the next rows. ``step N`` counts optimizer steps, whose metrics begin with ``train/``.
    """
    number = 0
    rows: list[str] = []
    for line in lines:
        if not rows and ": {" not in line:  # most lines of a large log
            continue
        for row in plain_rows(line if line.endswith("\n") else f"{line}\n"):
            if begun := _SLIME_LINE.search(row):
                number = int(begun[1])
                rows = [begun[2]]
            elif PROCESS.match(row) or len(rows) == MOST_ROWS:
                rows = []  # its end is missing
            elif rows:
                rows.append(row)
            text = "".join(rows) if "}" in row else ""
            if text and text.count("{") <= text.count("}"):
                rows = []
                numbers = [(name, float(value)) for name, value in _SLIME_METRIC.findall(text)]
                if metrics := {name: value for name, value in numbers if math.isfinite(value)}:
                    yield number, metrics
