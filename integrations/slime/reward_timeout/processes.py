"""Graders that do not await anything: in processes that can be killed."""

from collections.abc import Awaitable, Callable
from typing import Any

from rl_accel.integrations.slime.reward_timeout import worker
from rl_accel.reward.graders import Graders
from rl_accel.reward.program import GradeResult, Limits

Run = Callable[[Limits], Awaitable[GradeResult]]


class Processes:
    """Warm workers for each grader.

    Args:
        args: slime's. Graders get those of them that can be pickled, as they are now.
        workers: calls of a grader at once.
    """

    def __init__(self, args: Any, workers: int) -> None:
        self._args = worker.pack(vars(args))
        self._workers = workers
        self._graders: dict[str | None, Graders] = {}

    def grading(self, path: str | None, given: Any) -> Run:
        """Return a function that grades a sample, or a list of them, within limits.

        What the grader changes in a sample is changed in ours, unless it was stopped.

        Args:
            path: of the grader; None: slime's own, for the sample's ``rm_type``.
            given: the sample or samples.
        """
        if path not in self._graders:
            self._graders[path] = Graders(worker.MAKE, self._workers, {"args": self._args, "grader": path})
        graders = self._graders[path]
        single = not isinstance(given, list)
        samples = [given] if single else given

        async def run(limits: Limits) -> GradeResult:
            packed = [worker.pack_sample(sample, whole=path is not None) for sample in samples]
            result = await graders.call({"samples": packed, "single": single}, limits)
            if result.verdict != "done":
                return result
            value, changes = result.value
            for sample, changed in zip(samples, changes, strict=True):
                vars(sample).update(changed)
            return GradeResult(value, "done", result.wall, result.cpu, result.waited)

        return run

    async def close(self) -> None:
        """End all processes, and stop what they grade."""
        graders, self._graders = self._graders, {}
        for pool in graders.values():
            await pool.close()
