"""Following the file of verl's ``file`` logger while it grows."""

from pathlib import Path

from rl_accel.telemetry.steps_file import LogRecord, parse_log_line


class Tail:
    """Reads the lines a growing file has gained since the last call; a half-written last line waits for its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bad_lines = 0
        self._offset = 0

    def read(self) -> list[LogRecord]:
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
            record = parse_log_line(line)
            if record is None:
                self.bad_lines += 1
            else:
                records.append(record)
        return records
