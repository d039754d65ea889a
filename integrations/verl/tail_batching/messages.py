"""Data and errors that agent-loop workers send to the trainer process, besides the events of the core."""

from dataclasses import dataclass

RESUME = "Resume from the last checkpoint; no prompt is lost by that"
"""Advice at the end of error messages that end a run."""


@dataclass(frozen=True, slots=True)
class StoredKeys:
    """Entries of one response in TransferQueue (verl's store of trajectories).

    Attributes:
        keys: keys of the response's trajectories; several if the agent loop had several outputs.
        metric: number by which group filtering compares the responses of a prompt; None if filtering is off or the reward
            function returned no such number.
    """

    keys: tuple[str, ...]
    metric: float | None = None


class ServerLost(RuntimeError):
    """Training cannot go on: no server is left, a dead server cannot be restarted, or a server died during a weight update."""
