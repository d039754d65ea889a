"""Tests replicas, server actors and weight updates in a real Ray cluster, driven as verl drives them."""

from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.full
def test_every_check_of_replicas_py_passes(python, model_folder, short_tmp):
    """One cluster for all: the traceback names the check that failed."""
    source = Path(__file__).with_name("replicas.py").read_text()
    platform = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu.plugin"}
    result = python(source, **platform, RAY_TEMP=str(short_tmp), MODEL=str(model_folder))
    assert result.returncode == 0, result.stderr[-4000:]
