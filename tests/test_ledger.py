"""Tests that the ledger finds what each feature costs and gives."""

import runpy
from pathlib import Path

from rl_accel.features import FEATURES

LEDGER = Path(__file__).resolve().parents[1] / "docs" / "ledger.py"


def test_each_feature_has_lines_of_its_own_tests_and_a_row_of_the_readme(capsys):
    ledger = runpy.run_path(str(LEDGER))
    for feature in FEATURES:
        own = ledger["reach_of"](ledger["roots_of"](feature))
        assert ledger["lines_of"](own) > 0, feature.name
        assert ledger["test_seconds"](own, feature.name) > 0, feature.name
        assert ledger["readme_row"](feature.name)[0] != "not in README", feature.name
    ledger["main"]()
    printed = capsys.readouterr().out
    assert [feature.name for feature in FEATURES if feature.name not in printed] == []
