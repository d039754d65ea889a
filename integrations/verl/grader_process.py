"""Prepares a new grader process as verl prepares its reward workers, see :attr:`rl_accel.reward.worker.Start.setup`."""

import importlib
import os
from collections.abc import Mapping

from rl_accel.integrations.ray import grader_cluster

SETUP = f"{__name__}:prepare"


def prepare(environment: Mapping[str, str]) -> None:
    """Prepares a grader process: a later call of ``ray.init`` joins the Ray job, and modules of the user are imported.

    The import of verl imports these modules, which ``VERL_USE_EXTERNAL_MODULES`` names. A grader may need them, for example because
    they add to a registry.
    """
    grader_cluster.connect_when_needed(environment)
    if os.environ.get("VERL_USE_EXTERNAL_MODULES"):
        importlib.import_module("verl")
