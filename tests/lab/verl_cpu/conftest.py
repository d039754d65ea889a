import pytest

from rl_accel.patches.verl.verl_run import VerlRun


@pytest.fixture
def configured(monkeypatch):
    """``configured(*overrides)`` returns the configuration that ``python -m verl.trainer.main_ppo`` composes from ``overrides``."""
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return lambda *overrides: VerlRun.compose("verl.trainer.main_ppo", overrides).config
