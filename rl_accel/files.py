"""Writes of files and of lines that are never half done, and JSON without NaN and infinities, which some JSON parsers reject."""

import json
import math
import os
from pathlib import Path
from typing import Any

BAD_RECORD = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
"""Exceptions that reading a damaged JSON record can raise."""


def strict_json(value: Any) -> str:
    """Returns ``value`` as indented JSON. Infinities and NaN, which JSON cannot represent, become null."""
    return json.dumps(_finite(value), indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes ``content`` (text in UTF-8) to ``path`` atomically: readers see the complete old or new file. Creates missing folders.

    Raises OSError if ``path`` cannot be written; the old file is then unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def append_line(path: Path, line: str) -> None:
    """Appends ``line`` and a line break to the file ``path``. Creates missing folders.

    Raises OSError if not all of the line can be written, for example on a full disk. The file is then unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        rest = memoryview(line.encode() + b"\n")
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except BaseException:
            file.truncate(size)
            raise
