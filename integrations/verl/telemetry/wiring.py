"""Puts agent loops that note completion times into verl's configuration, or says why they cannot."""

import os
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict

from rl_accel.errors import ConfigError
from rl_accel.features.telemetry import TelemetryFlags
from rl_accel.integrations.verl import agent_loop
from rl_accel.integrations.verl.telemetry import FILE, SECTION, WORKER_PART
from rl_accel.patches.seams import Seams

SEAMS: Seams = {
    "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._compute_score": ("self", "outputs", "kwargs"),
    "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopWorkerTQ": None,
}
"""verl 0.9.1 has them."""
_FLAG = "rl_accel.telemetry"


def wire(config: Any, flags: TelemetryFlags) -> None:
    """Choose our agent loops in ``config`` (verl's, changed in place). Idempotent.

    Raises:
        ConfigError: the agent loops are the user's own.
    """
    agent_loop.check(config, _FLAG, "agent loops must note completion times")
    folder = OmegaConf.select(config, "trainer.default_local_dir", default=None) or "."
    with open_dict(config):
        # Absolute: the trainer process may have another working directory than the driver.
        OmegaConf.update(config, SECTION, {"file": str(Path(os.path.abspath(folder)) / FILE)}, merge=False)
    agent_loop.choose(config, WORKER_PART)


def file_of(config: Any) -> Path | None:
    """Return where the steps are kept, None if ``config`` has not been through :func:`wire`."""
    found = OmegaConf.select(config, f"{SECTION}.file", default=None)
    return Path(found) if found else None


def refuse_unwired(config: Any) -> None:
    """Stop a trainer whose configuration nobody has wired.

    Raises:
        ConfigError: its driver has not called ``validate_config``.
    """
    if file_of(config) is None:
        raise ConfigError(
            f"{_FLAG} wants {SECTION} in the configuration of the trainer, found nothing; "
            "verl's validate_config sets it, which the driver must call before it starts the trainer"
        )
