"""Metrics of a run of verl, from the file of its file logger or from its console output."""

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rl_accel.telemetry.stage_clock import PREFIX

LogRecord = tuple[int, dict[str, float]]
"""Number of a step, and the metrics that verl logged for this step."""

_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PROCESS = re.compile(r"^\([\w:]+[^()]*pid=[^()]*\)\s?")
"""Prefix of each line from a Ray worker, such as ``(TaskRunner pid=3165)``."""
_STEP = re.compile(r"\bstep:(\d+) - (.*)")
_SEPARATOR = re.compile(r"\s+-(?:\s+|(?=[A-Za-z]))")
_VALUE = re.compile(r"\s*(?:np\.\w+\()?([-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf))\)?\s*")
_BEGUN = re.compile(r"[^:]*(?::\s*(?:np(?:\.\w*)?\(?)?[-+\d.ena]*\)?(?:\s+-?\s*)?)?")
"""A metric whose end may be cut off."""
_OLD_PREFIX = "timing/"
"""Prefix of the timers in logs of 2024."""


def read_log(path: Path) -> dict[int, dict[str, float]]:
    """Returns the metrics of each step. Records of one step, such as training and validation, are merged.

    Args:
        path: the file of verl's file logger, or its console output, such as ``output.log`` of a W&B run.

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
    """Returns the step and numbers in a line ``{"step": int, "data": {name: value}}``, null as NaN; None for any other line."""
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
    """Yields each step's metrics in the order of the lines.

    A step is a line such as ``(TaskRunner pid=7) step:3 - timing_s/gen:4.2 - critic/vf_loss:np.float64(0.1)``. Colours and Ray's
    prefixes are removed, lines that a terminal has wrapped are joined, everything else is skipped.
    """
    step = ""
    for line in lines:
        text = _PROCESS.sub("", _ESCAPE.sub("", line.rstrip("\n")))
        if _STEP.search(text):
            yield from _record(step)
            step = text
            continue
        joined = step + (f" {text}" if text.startswith("- ") else text)  # spaces at the end of a row may be gone
        if step and _is_whole(joined):
            step = joined
        else:
            yield from _record(step)
            step = ""
    yield from _record(step)


def _is_whole(line: str) -> bool:
    """True if ``line``, joined from several rows, holds only metrics, of which only the last may be cut off."""
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
