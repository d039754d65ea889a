"""Our adapters against the facts of slime that were recorded at a commit; with a checkout, those facts against it."""

import importlib.util
import json
from pathlib import Path

import pytest

from rl_accel.switch import SwitchState

_SPEC = importlib.util.spec_from_file_location("slime_facts", Path(__file__).with_name("facts.py"))
facts = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(facts)
RECORDED = json.loads(facts.FILE.read_text())


@pytest.mark.parametrize("where", sorted(facts.wanted()))
def test_each_function_has_the_parameters_that_we_pass(where):
    assert RECORDED["functions"][where] == facts.wanted()[where]


def test_every_place_that_a_patch_writes_to_holds_the_function_by_name():
    assert RECORDED["imported_by_name"]
    assert all(RECORDED["imported_by_name"].values())
    assert RECORDED["scans"] == ["chunked_discounted_returns", "chunked_gae"]


def test_fields_states_and_flags_that_we_use_are_there():
    assert RECORDED["sample_fields"] == sorted(facts.sample_fields())
    assert RECORDED["statuses"] == sorted(facts.CHECKS[0].attributes["slime.utils.types:Sample.Status"])
    assert RECORDED["flags"] == sorted({*facts.arguments(), "rollout_global_dataset"})


def test_the_recorded_facts_are_those_of_the_checkout(slime_root):
    recorded = {key: value for key, value in RECORDED.items() if key != "commit"}
    assert facts.facts_of(slime_root) == recorded, f"slime has changed since {RECORDED['commit']}"


def test_the_slime_that_is_imported_fits(slime_root):
    for check in facts.CHECKS:
        check.apply(None)
        assert check.state() is SwitchState.APPLIED
        check.revert()


def test_a_slime_that_has_changed_is_refused_by_name(slime_root, monkeypatch):
    from slime.rollout import sglang_rollout

    from rl_accel.errors import PatchRefused

    monkeypatch.setattr(sglang_rollout, "generate_and_rm", lambda args, samples: None)
    with pytest.raises(
        PatchRefused, match=r"generate_and_rm\(args, sample, sampling_params, evaluation\), found \(args, samp"
    ):
        facts.CHECKS[0].apply(None)
