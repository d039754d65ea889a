"""Tests every patch on real verl: applied and reverted at every binding, its fingerprint, and its refusals."""

import dataclasses
import importlib
import pkgutil

import pytest
import torch

from rl_accel.errors import NotInThisVersion, PatchRefused
from rl_accel.features import FEATURES, FLAG_READER, METRICS_LOGGER, GaeFlags, SamplerFlags
from rl_accel.patches.patch import Patch
from rl_accel.patches.upstream import fingerprint
from rl_accel.patches.verl import advantages, gae, sampler
from rl_accel.switch import SwitchState

FLAGS = {"verl.gae": GaeFlags(), "verl.sampler": SamplerFlags()}
PATCHES = (*gae.SWITCHES, *advantages.SWITCHES, *sampler.SWITCHES)
every_patch = pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)


def held_by(patch) -> list:
    """What every binding of ``patch`` holds."""
    held = []
    for where in (patch.target, *patch.bindings):
        name, _, key = where.rstrip("]").partition("[")
        result = pkgutil.resolve_name(name)
        held.append(result[key] if key else result)
    return held


@every_patch
def test_in_and_out_of_every_binding_of_a_body_that_was_tested_with(patch):
    before = held_by(patch)
    assert not patch.fingerprints or fingerprint(before[0]) in patch.fingerprints
    try:
        patch.apply(FLAGS.get(patch.name))
        held = held_by(patch)
        assert patch.state() is SwitchState.APPLIED
        assert all(now is held[0] and now is not then for now, then in zip(held, before, strict=True))
    finally:
        patch.revert()
    assert patch.state() is SwitchState.WAITING
    assert all(now is then for now, then in zip(held_by(patch), before, strict=True))


@pytest.mark.parametrize("patch", [*gae.SWITCHES, *advantages.SWITCHES], ids=lambda patch: patch.name)
def test_a_twin_that_disagrees_by_one_bit_is_refused(patch):
    def one_bit_off(original, settings):
        good = patch.make(original, settings)

        def replacement(*args, **kwargs):
            result = good(*args, **kwargs)
            if isinstance(result, tuple):
                return torch.nextafter(result[0], torch.tensor(torch.inf)), result[1]
            return torch.nextafter(result, torch.tensor(torch.inf))

        return replacement

    wrong = dataclasses.replace(patch, make=one_bit_off)
    before = held_by(wrong)
    with pytest.raises(PatchRefused, match="outputs differ"):
        wrong.apply(FLAGS.get(patch.name))
    assert all(now is then for now, then in zip(held_by(wrong), before, strict=True))


def test_every_patch_that_ships_says_when_it_can_go():
    modules = {m for feature in FEATURES for listed in feature.switches.values() for m in listed}
    modules |= {FLAG_READER, METRICS_LOGGER}
    patches = [s for m in sorted(modules) for s in importlib.import_module(m).SWITCHES if isinstance(s, Patch)]
    assert len(patches) > len(PATCHES)
    for patch in patches:
        assert patch.remove_when, patch.name
        assert patch.upstream == "none" or patch.upstream.startswith("https://github.com/"), patch.name


@every_patch
def test_an_old_verl_is_refused(monkeypatch, patch):
    monkeypatch.setattr(importlib.import_module("verl"), "__version__", "0.5.0")
    refusal = NotInThisVersion if patch.independent else PatchRefused
    with pytest.raises(refusal, match=r"supports verl>=.*, running 0\.5\.0"):
        patch.apply(FLAGS.get(patch.name))
