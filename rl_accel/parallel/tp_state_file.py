"""The file that keeps what the planner knows from one step, and one launch, to the next."""

import json
import logging
import os
from pathlib import Path

from rl_accel.parallel.tp_planner import TpPlanner

logger = logging.getLogger("rl_accel")


def load(file: Path, planner: TpPlanner) -> None:
    """Give ``planner`` what was saved; one line of warning if that cannot be used."""
    if not file.is_file():
        return
    try:
        planner.load_state_dict(json.loads(file.read_text())["planner"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("rl-accel: tp_replan begins anew, %s cannot be used: %s", file, error)


def save(file: Path, planner: TpPlanner, step: int) -> None:
    """Save what ``planner`` knows after ``step``, whole or not at all; one line of warning if that cannot be."""
    fresh = file.with_suffix(".tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps({"step": step, "planner": planner.state_dict()}))
        os.replace(fresh, file)
    except OSError as error:
        logger.warning("rl-accel: tp_replan: %s could not be written: %s", file, error)
