"""Reads the metrics of a verl run, from the file that verl's file logger writes or from verl's console output."""

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rl_accel.telemetry.stage_clock import PREFIX

LogRecord = tuple[int, dict[str, float]]
"""Number of a step, and the metrics that verl logged for this step, by name."""

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PROCESS = re.compile(r"^\([\w:]+[^()]*pid=[^()]*\)\s?")
"""Pattern of the prefix of each line from a Ray worker, such as ``(TaskRunner pid=3165)``."""
_STEP = re.compile(r"\bstep:(\d+) - (.*)")
_SEPARATOR = re.compile(r"\s+-(?:\s+|(?=[A-Za-z]))")
_VALUE = re.compile(r"\s*(?:np\.\w+\()?([-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf))\)?\s*")
_BEGUN = re.compile(r"[^:]*(?::\s*(?:np(?:\.\w*)?\(?)?[-+\d.ena]*\)?(?:\s+-?\s*)?)?")
"""Pattern of a logged metric whose end may be cut off, such as the last metric in a line."""
_OLD_PREFIX = "timing/"
"""Prefix of the timer metrics in verl's logs of 2024."""


def read_log(path: Path) -> dict[int, dict[str, float]]:
    """Returns the metrics of each step in a log, by step number. Several records of a step (training, validation) are merged.

    Args:
        path: file that verl's file logger has written, or a file with verl's console output, such as ``output.log`` of a W&B run.

    Raises:
        OSError: the file cannot be read.
    """
    steps: dict[int, dict[str, float]] = {}
    with path.open("rb") as file:
        for record in filter(None, map(parse_log_line, file)):
            steps.setdefault(record[0], {}).update(record[1])
    if not steps:
        with path.open(errors="replace") as lines:
            for step, metrics in read_console(lines):
                steps.setdefault(step, {}).update(metrics)
    return dict(sorted(steps.items()))


def parse_log_line(line: bytes) -> LogRecord | None:
    """Returns the step number and the numeric metrics in a line of the form ``{"step": int, "data": {name: value}}``.

    The value null is returned as NaN. Returns None for any other line.
    """
    try:
        entry: Any = json.loads(line)
        numbers = {
            str(name): math.nan if value is None else float(value)  # the writer turns NaN into null
            for name, value in entry["data"].items()
            if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        }
        return int(entry["step"]), numbers
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def read_console(lines: Iterable[str]) -> Iterator[LogRecord]:
    """Yields the number and the metrics of each step in console output, in the order of the lines.

    A step has a line such as ``(TaskRunner pid=7) step:3 - timing_s/gen:4.2 - critic/vf_loss:np.float64(0.1)``. Colours and Ray's
    prefixes are removed. Lines that a terminal has wrapped are joined. All other lines are skipped.
    """
    step = ""
    for line in lines:
        text = _PROCESS.sub("", _ESCAPE.sub("", line.rstrip("\n")))
        if _STEP.search(text):
            yield from _record(step)
            step = text
            continue
        joined = step + (f" {text}" if text.startswith("- ") else text)  # spaces at the end of a row may be lost
        if step and _is_whole(joined):
            step = joined
        else:
            yield from _record(step)
            step = ""
    yield from _record(step)


def _is_whole(line: str) -> bool:
    """True if ``line``, joined from several rows of a console, holds only metrics. The end of the last metric may be cut off."""
    _, *parts = _SEPARATOR.split(line[line.index("step:") :])
    pairs = [part.rpartition(":") for part in parts[:-1]]
    return all(":" not in name and _VALUE.fullmatch(value) for name, _, value in pairs) and bool(
        _BEGUN.fullmatch(parts[-1])
    )


def _record(text: str) -> Iterator[LogRecord]:
    found = _STEP.search(text)
    if found is None:
        return
    metrics = {}
    for part in _SEPARATOR.split(found[2].rstrip()):
        name, _, value = part.rpartition(":")
        with contextlib.suppress(ValueError):  # a version or a date, such as 1.2.3
            if match := _VALUE.fullmatch(value):
                metrics[re.sub(f"^{_OLD_PREFIX}", PREFIX, name)] = float(match[1])
    if _OLD_PREFIX in text and f"{PREFIX}step" not in metrics:  # logs of 2024 do not time the step itself
        metrics[f"{PREFIX}step"] = sum(value for name, value in metrics.items() if name.startswith(PREFIX))
    if metrics:
        yield int(found[1]), metrics
