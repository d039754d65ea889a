import json
import math

import pytest

from rl_accel.files import strict_json, write_atomically


def test_a_file_is_replaced_and_its_folder_made_and_what_cannot_be_written_changes_nothing(tmp_path):
    path = tmp_path / "a" / "b.json"
    for text in ("one", "zwölf"):
        write_atomically(path, text)
        assert path.read_text(encoding="utf-8") == text
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\udcff")
    assert path.read_text(encoding="utf-8") == "zwölf"
    assert list(path.parent.iterdir()) == [path]


def test_what_json_does_not_have_is_null():
    value = {"a": [math.inf, -math.inf, math.nan, 1.5], 2: (None, "-Infinity")}
    assert json.loads(strict_json(value)) == {"a": [None, None, None, 1.5], "2": [None, "-Infinity"]}
