"""Reading the JSONL that verl's ``file`` logger writes: one ``{"step": int, "data": {name: number}}`` a line."""

import json
import math
from pathlib import Path
from typing import Any

Record = tuple[int, dict[str, float]]


class Tail:
    """Reads the lines a growing file has gained since the last call; a half-written last line waits for its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bad_lines = 0
        self._offset = 0

    def read(self) -> list[Record]:
        """Return the new records in file order; ``[]`` while the file does not exist."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        records = []
        for line in complete.splitlines():
            record = _parse(line)
            if record is None:
                self.bad_lines += 1
            else:
                records.append(record)
        return records


def read_steps(path: Path) -> dict[int, dict[str, float]]:
    """Return step -> metrics, in step order; records of one step (training, validation) are merged."""
    steps: dict[int, dict[str, float]] = {}
    for step, data in Tail(path).read():
        steps.setdefault(step, {}).update(data)
    return dict(sorted(steps.items()))


def _parse(line: bytes) -> Record | None:
    try:
        entry = json.loads(line)
        step, data = entry["step"], entry["data"]
        return int(step), {str(name): _number(value) for name, value in data.items() if _is_metric(value)}
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _is_metric(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)  # the writer turns NaN into null
