"""Numbers of ``rl-accel bench reward`` from what its arms did."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_accel.lab.bench.reward_run import Arm
from rl_accel.lab.bench.reward_workload import Response

FASTER_GOAL = 3.0
KILLED_GOAL = 0.002


def summarise(batches: Sequence[Sequence[Response]], arms: Mapping[str, Arm], epochs: int) -> dict[str, Any]:
    """Return, by arm: what executions took, which of them were stopped, and what differs from the first arm.

    ``seconds`` are those of all executions, ``epoch_seconds`` of each epoch, ``own_seconds`` those in which they did not wait for a
    processor, which a busy machine does not change; ``step_s`` is the mean time from the start of a batch to its last result;
    ``wrongly_killed`` are correct answers that did not pass; ``struck`` says which limit stopped how many.
    """
    names = list(arms)
    base = arms[names[0]]
    found: dict[str, Any] = {}
    for name, arm in arms.items():
        walls = np.array([result.wall for results in arm.results for result in results])
        per_batch = [sum(result.wall for result in results) for results in arm.results]
        per_epoch = np.array(per_batch).reshape(epochs, -1).sum(1)
        triples = [
            (response, result, other)
            for batch, results, others in zip(batches, arm.results, base.results, strict=True)
            for response, result, other in zip(batch, results, others, strict=True)
        ]
        stopped = [result for _, result, _ in triples if result.verdict == "timeout"]
        killed = sum(response.correct and result.verdict != "passed" for response, result, _ in triples)
        found[name] = {
            "executions": len(triples),
            "seconds": float(walls.sum()),
            "own_seconds": float(sum(result.wall - result.waited for _, result, _ in triples)),
            "epoch_seconds": per_epoch.tolist(),
            "step_s": float(np.mean(arm.makespans)),
            "p50_s": float(np.quantile(walls, 0.5)),
            "p99_s": float(np.quantile(walls, 0.99)),
            "correct": sum(response.correct for response, _, _ in triples),
            "wrongly_killed": killed,
            "changed": sum((result.verdict == "passed") != (other.verdict == "passed") for _, result, other in triples),
            "timeouts": len(stopped),
            "struck": dict(Counter(result.reason.split()[0] for result in stopped)),
            "counts": dict(arm.counts),
            "saved_estimate_s": arm.counts["saved_seconds"],
        }
    first = found[names[0]]
    for row in found.values():
        row["saved_s"] = first["seconds"] - row["seconds"]
        row["times_less"] = first["seconds"] / row["seconds"]
        row["own_times_less"] = first["own_seconds"] / row["own_seconds"]
        row["epoch_times_less"] = [a / b for a, b in zip(first["epoch_seconds"], row["epoch_seconds"], strict=True)]
        row["steps_faster"] = first["step_s"] / row["step_s"]
    return found


def kills_too_many(row: Mapping[str, Any]) -> bool:
    """Whether the share of correct answers that were killed is above the goal. One is never too many: it may be chance."""
    return bool(row["wrongly_killed"] > max(1.0, KILLED_GOAL * row["correct"]))
