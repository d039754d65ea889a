"""The tables of keys in the pages of features name every flag, with its default."""

import json
import re

import pytest

from rl_accel.config import describe_flags


@pytest.mark.parametrize(
    ("page", "section"), [("tail-batching.md", "tail_batching"), ("reward-timeout.md", "reward_timeout")]
)
def test_a_page_has_all_keys_with_their_defaults(repo, page, section):
    rows = re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \| \S", (repo / "docs" / page).read_text(), re.MULTILINE)
    wanted = {
        key.removeprefix(f"{section}."): json.loads(default)
        for key, default, _ in describe_flags()
        if key.startswith(f"{section}.")
    }
    found = {name: default.strip() for name, default in rows if name in wanted}
    assert found == {name: "null" if default is None else str(default) for name, default in wanted.items()}
