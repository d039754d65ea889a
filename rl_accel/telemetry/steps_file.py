"""The files that ``rl-accel profile`` reads, a line a step: ours with all responses' times, and that of verl's ``file`` logger."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_accel.files import write_atomically
from rl_accel.telemetry.stage_clock import Response

FILE_NAME = "rl_accel_telemetry.jsonl"
"""Of our file, in verl's ``trainer.default_local_dir``."""

LogRecord = tuple[int, dict[str, float]]
"""A step and its metrics, as verl logs them."""

_DIGITS = 4


@dataclass(frozen=True)
class Step:
    """One step, as it is kept.

    Attributes:
        step: its number.
        stages: seconds of each stage.
        slots: requests that all engines run at once; None if unknown.
        preemptions: during the step, by the servers' own counters; None if unknown.
        window_known: whether the responses began with the stage, as they do in synchronous training.
        responses: all that ended in this step, times in seconds since the first of them began.
    """

    step: int
    stages: Mapping[str, float]
    slots: int | None
    preemptions: float | None
    window_known: bool
    responses: Sequence[Response]


class StepsFile:
    """Appends steps to ``path``. What an earlier run left there of the same or later steps is dropped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rewound = False

    def add(self, step: Step) -> None:
        """Append ``step``.

        Raises:
            OSError: the file cannot be written.
        """
        if not self._rewound:
            self._rewind(step.step)
            self._rewound = True
        line = {
            "step": step.step,
            "stages": step.stages,
            "slots": step.slots,
            "preemptions": step.preemptions,
            "window_known": step.window_known,
            **_packed(step.responses),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def _rewind(self, step: int) -> None:
        lines = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
        earlier = [line for line in lines if line.endswith("\n") and (_step_of(line) or step) < step]
        write_atomically(self._path, "".join(earlier))


def read(path: Path) -> dict[int, Step]:
    """Return the steps of a file of ours by number; lines that are not whole are left out.

    Raises:
        OSError: the file cannot be read.
    """
    steps = {}
    for line in path.read_text(errors="replace").splitlines():
        try:
            entry = json.loads(line)
            number = int(entry["step"])
            steps[number] = Step(
                number,
                {str(stage): float(seconds) for stage, seconds in entry["stages"].items()},
                entry["slots"],
                entry["preemptions"],
                bool(entry["window_known"]),
                _unpacked(entry),
            )
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            continue
    return dict(sorted(steps.items()))


def read_log(path: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of each step from the file of verl's logger; records of one step (training, validation) are merged."""
    steps: dict[int, dict[str, float]] = {}
    with path.open("rb") as file:
        for line in file:
            record = parse_log_line(line)
            if record is not None:
                steps.setdefault(record[0], {}).update(record[1])
    return dict(sorted(steps.items()))


def parse_log_line(line: bytes) -> LogRecord | None:
    """Return the numbers of a line ``{"step": int, "data": {name: value}}``, null as NaN; None if it is no such line."""
    try:
        entry = json.loads(line)
        numbers = {
            str(name): math.nan if value is None else float(value)  # the writer turns NaN into null
            for name, value in entry["data"].items()
            if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        }
        return int(entry["step"]), numbers
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return None


def _packed(responses: Sequence[Response]) -> dict[str, Any]:
    """Columns instead of objects, names and prompts by number: a response takes some 40 bytes."""
    start = min((response.began for response in responses), default=0.0)
    prompts = {prompt: index for index, prompt in enumerate(dict.fromkeys(r.prompt for r in responses))}
    servers = {name: index for index, name in enumerate(sorted({r.server for r in responses if r.server is not None}))}

    def since(moment: float | None) -> float | None:
        return None if moment is None else round(moment - start, _DIGITS)

    rows = [
        [
            prompts[r.prompt],
            *map(since, (r.began, r.generated, r.rewarded, r.ended)),
            r.tokens,
            None if r.server is None else servers[r.server],
            r.outcome,
        ]
        for r in responses
    ]
    return {"server_names": list(servers), "responses": rows}


def _unpacked(entry: Mapping[str, Any]) -> list[Response]:
    names = entry["server_names"]
    return [
        Response(
            str(prompt), began, generated, rewarded, ended, tokens, None if server is None else names[server], outcome
        )
        for prompt, began, generated, rewarded, ended, tokens, server, outcome in entry["responses"]
    ]
