"""What verl's workers make of a response, and verl's rule for groups of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Stored:
    """A scored response.

    Attributes:
        keys: where its trajectories lie in TransferQueue; more than one if the agent loop had several outputs.
        metric: what group filtering looks at, if it is on and the judge gave it.
    """

    keys: tuple[str, ...]
    metric: float | None = None


def varies(prompt_id: str, group: Sequence[Stored]) -> bool:
    """verl's rule (``_dapo_filtered_keys``): a group whose metric is the same throughout teaches nothing.

    Raises:
        RuntimeError: the metric is missing.
    """
    values = [stored.metric for stored in group]
    if None in values:
        raise RuntimeError(
            "algorithm.filter_groups.metric must name a metric that the reward function returns; the responses of "
            f"prompt {prompt_id} came without it"
        )
    return len(values) < 2 or float(np.std(values)) != 0.0
