"""Parsers for the output of verl's file logger and of verl's console, and the merge of a run's log records."""

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_accel.files import BAD_RECORD
from rl_accel.telemetry.stage_clock import PREFIX

LogRecord = tuple[int, dict[str, float]]
"""Number of a step and the metrics that were logged for it, by name."""

ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-~])")
"""Pattern of a terminal's control sequence, such as a colour."""
PROCESS = re.compile(r"\([\w:]+[^()]*pid=[^()]*\)\s?")
"""Pattern of the prefix that Ray writes before each line of a worker, such as ``(TaskRunner pid=3165)``."""
_FOREIGN = re.compile(r"(?:^|\s)\[|\(\w+ pid=|(?:[A-Z][\w ]{0,80}:\s*|^|\s)\d+%\|")
"""Pattern of the beginning of another program's text in a line of metrics: a note of Ray, another worker, or a progress bar."""
_STEP = re.compile(r"\bstep:(\d+) - (.*)")
_NEXT_STEP = re.compile(r"(?<=[\d)\]])\s+(?=step:\d+ - )")
"""Pattern of the space between two steps in one console line. It follows a value, or the end of another program's text."""
_SEPARATOR = re.compile(r"\s+-(?:\s+|(?=[A-Za-z]))")
_VALUE = r"\s*(?:[a-z]\w*(?:\.\w+)?\()?([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))(?:,[^()]*)?\)?\s*"
"""Pattern of the value of a metric, such as ``0.5``, ``np.float64(0.5)`` or ``tensor(0.5, device='cuda:0')``."""
_METRIC = re.compile(f"(.*):{_VALUE}")
_BEGUN = re.compile(r"[^:]*(?::\s*(?:[a-z][\w.]{0,15}(?:\([^()]*)?|[-+\d.einfa]*)\)?(?:\s+-?\s*)?)?")
"""Pattern of a whole metric, or of the first part of a metric whose rest is in the next row of a terminal."""
_WIDEST = 1000
"""Largest assumed width of a terminal in characters. If console output has a longer line, no terminal has wrapped its lines.
Chosen by hand."""
_OLD_PREFIX = "timing/"
"""Prefix of the timer metrics in verl's logs of 2024, in place of ``timing_s/``."""


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
    """Yields the number and the metrics of each step in console output, in the order of the lines.

    A step has a line such as ``(TaskRunner pid=7) step:3 - timing_s/gen:4.2 - critic/vf_loss:np.float64(0.1)``. All other lines are
    skipped. Lines that a terminal has wrapped are joined. If the last line has no line end, its last metric is left out.

    The names of verl's metrics have a slash. If any line has such a name, lines without a slash are skipped as parts of printed
    responses.

    If the list ``workers`` is given, Ray's prefix of each process that logged a step is appended, once for consecutive steps.
    """
    steps: list[_Step] = []
    is_open, longest = False, 0
    for line in lines:
        if len(line) > longest:
            longest = max(longest, len(ESCAPE.sub("", line.rstrip("\n"))))
        if "step:" not in line and not is_open:  # most lines of a large log
            continue
        text, is_ended = ESCAPE.sub("", line.rstrip("\n")), line.endswith("\n")
        begun = _STEP.search(text)
        # a container, a node or a logger may have put other text, such as the time, before Ray's prefix
        prefix = PROCESS.search(text, 0, begun.start()) if begun else PROCESS.match(text)
        worker = prefix[0] if prefix else ""
        if begun:
            *whole, last = map(_before_other_output, _NEXT_STEP.split(begun[0]))
            steps += [_Step(step, worker, True, [len(text)]) for step in whole]
            steps.append(_Step(last, worker, is_ended, [len(text)]))
            is_open = True
        elif worker:  # Ray writes a prefix before each line, not before each row
            is_open = is_open and worker != steps[-1].process
        elif is_open:
            is_open = steps[-1].add(_before_other_output(text), len(text), is_ended)
    # rows are as wide as the terminal; next to a longer line, a row such as "42" is a number that something has printed
    is_wrapped = longest < _WIDEST and all(step.rows[0] >= longest - 1 for step in steps if step.doubtful)
    records = []
    for step in steps:
        is_single = step.doubtful and not is_wrapped
        if record := _record(step.doubtful, True) if is_single else _record(step.text, step.is_ended):
            records.append((step.process, record, any("/" in name for name in record[1])))
    has_slashes = any(has_slash for *_, has_slash in records)
    for worker, record, has_slash in records:
        if has_slash or not has_slashes:
            if workers is not None and [worker] != workers[-1:]:
                workers.append(worker)
            yield record


@dataclass
class _Step:
    """Log line of a training step in a console. A terminal may have wrapped the line into several rows.

    Attributes:
        text: the joined rows, without text of other programs.
        process: Ray's prefix of the line, which names the process that wrote it; "" if there is none.
        is_ended: False if the console ends without a line end after the last row.
        rows: number of characters of each row.
        doubtful: text of the first row, if the second row may be output of another program; otherwise "".
    """

    text: str
    process: str
    is_ended: bool
    rows: list[int]
    doubtful: str = ""

    def add(self, row: str, width: int, is_ended: bool) -> bool:
        """Adds the next row of the console. Returns False, and changes nothing, if the row does not belong to this line.

        ``row`` is the row without text of other programs. ``width`` is the number of characters of the whole row.
        """
        if not row:
            self.is_ended = True
            return True
        joined = self.text + (f" {row}" if row.startswith("- ") else row)  # spaces at the end of a row may be lost
        # all rows but the last are as wide as the terminal, on which some characters take two columns
        if len(row) > 2 * self.rows[0] or 2 * self.rows[-1] < self.rows[0] or not _is_whole(joined):
            return False
        self.doubtful = self.text if len(self.rows) == 1 and ":" not in row else ""
        self.text, self.is_ended = joined, is_ended
        self.rows.append(width)
        return True


def _before_other_output(text: str) -> str:
    """Returns the part of ``text`` before the output of another program, such as a progress bar."""
    foreign = _FOREIGN.search(text) if "[" in text or "pid=" in text or "%|" in text else None
    return text[: foreign.start()].rstrip() if foreign else text


def _is_whole(line: str) -> bool:
    """Returns True if ``line`` consists of metrics only. The last metric may be incomplete."""
    _, *parts = _SEPARATOR.split(line)
    metrics = [_METRIC.fullmatch(part) for part in parts[:-1]]
    return all(metric and ":" not in metric[1] for metric in metrics) and bool(_BEGUN.fullmatch(parts[-1]))


def _record(line: str, is_ended: bool) -> LogRecord | None:
    """Returns the step number and the metrics in the log line of a step; None if there are no metrics.

    If ``is_ended`` is False, leaves out the last metric, whose end may be missing.
    """
    step = _STEP.search(line)
    if step is None:
        return None
    metrics = {}
    parts = _SEPARATOR.split(step[2].rstrip())
    for part in parts if is_ended else parts[:-1]:
        with contextlib.suppress(ValueError):  # a version or a date, such as 1.2.3
            if match := _METRIC.fullmatch(part):
                metrics[re.sub(f"^{_OLD_PREFIX}", PREFIX, match[1])] = float(match[2])
    if _OLD_PREFIX in line and f"{PREFIX}step" not in metrics and is_ended:  # logs of 2024 do not time the step itself
        metrics[f"{PREFIX}step"] = sum(value for name, value in metrics.items() if name.startswith(PREFIX))
    return (int(step[1]), metrics) if metrics else None
