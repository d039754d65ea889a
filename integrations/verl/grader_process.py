"""Prepares a new grader process as verl prepares its reward workers, see :attr:`rl_accel.reward.worker.Start.setup`."""

import importlib
import os
from collections.abc import Mapping

from rl_accel.integrations.ray import grader_cluster

SETUP = f"{__name__}:prepare"


def prepare(environment: Mapping[str, str]) -> None:
    """Connects the process to the job's Ray cluster when needed, and imports verl if it then imports modules of the user.

    Such a module (``VERL_USE_EXTERNAL_MODULES``) may change what the grader uses, for example a registry.
    """
    grader_cluster.connect_when_needed(environment)
    if os.environ.get("VERL_USE_EXTERNAL_MODULES"):
        importlib.import_module("verl")
