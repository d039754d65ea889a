"""Prepares a new grader process as verl prepares its reward workers, see :attr:`rl_accel.reward.worker.Start.setup`."""

import importlib
import os
from collections.abc import Mapping

from rl_accel.integrations.ray import grader_cluster

SETUP = f"{__name__}:prepare"


def prepare(environment: Mapping[str, str]) -> None:
    """Makes a later call of ``ray.init`` in this process join the Ray job, and lets verl import modules of the user.

    ``VERL_USE_EXTERNAL_MODULES`` names these modules. A grader may need them, for example because they add to one of verl's
    registries.
    """
    grader_cluster.connect_when_needed(environment)
    if os.environ.get("VERL_USE_EXTERNAL_MODULES"):
        importlib.import_module("verl")
