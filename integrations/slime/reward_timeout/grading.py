"""Chooses how a response is graded, has it graded within its limit, and always has a reward for it."""

import copy
import hashlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from slime.rollout import rm_hub

from rl_accel.errors import ConfigError
from rl_accel.integrations.slime.reward_timeout import JUDGE, arguments
from rl_accel.integrations.slime.reward_timeout.awaited import within
from rl_accel.integrations.slime.reward_timeout.evaluation import EVALUATION
from rl_accel.integrations.slime.reward_timeout.processes import Processes, Run
from rl_accel.integrations.slime.reward_timeout.programs import Programs
from rl_accel.integrations.slime.reward_timeout.scores import Scores
from rl_accel.integrations.slime.reward_timeout.ways import Way, way_of
from rl_accel.reward.anchor_store import Replica
from rl_accel.reward.limited_executor import LimitedExecutor
from rl_accel.reward.program import GradeResult, Limits

logger = logging.getLogger("rl_accel")

_MOST_WORKERS = 16
"""Each has imported slime, some 250 MiB."""
_AT_ONCE = 1 << 20
"""slime does not hold awaited graders back, and they cost this machine nothing."""


class Grading:
    """What grades on one event loop: turns, limits, anchors, and processes.

    Attributes:
        replica: anchors and counts.
        store_client: of the job's store of anchors; None without Ray.

    Args:
        args: slime's.
    """

    def __init__(self, args: Any) -> None:
        self.flags = flags = arguments.flags_of(args)
        arguments.check(args, flags)
        self.replica = Replica(arguments.settings_of(flags))
        limits = Limits(memory=flags.memory_mb << 20)
        workers = flags.workers or min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
        self._bounded = LimitedExecutor(self.replica, workers, limits)
        self._unbounded = LimitedExecutor(self.replica, _AT_ONCE, limits)
        self._processes = Processes(args, workers)
        self._programs = Programs(self._bounded, workers, flags)
        self._stock_args = copy.copy(args)
        self._stock_args.custom_rm_path = None
        self._scores = Scores(flags, [key for key in (args.reward_key, args.eval_reward_key) if key])
        self._warned: set[str] = set()
        self.anchors_path = str(Path(args.save) / "rl_accel_reward_anchors.json") if args.save else None
        self.store_client: Any = None
        if "ray" in sys.modules and sys.modules["ray"].is_initialized():
            from rl_accel.integrations.ray.reward_anchors import StoreClient

            self.store_client = StoreClient(self.replica, self.anchors_path)

    def use(self) -> None:
        """Keep anchors up to date for a while."""
        if self.store_client is not None:
            self.store_client.use()

    def way_of(self, sample: Any) -> Way | None:
        """The user's grader of a sample; None: slime's own, or its test cases."""
        path = self.flags.grader or sample.custom_rm_path  # slime honours the latter itself, but not in a list
        return None if path in (None, JUDGE) else way_of(path)

    async def judge(self, args: Any, sample: Any, kwargs: dict[str, Any]) -> Any:
        """Return the reward of one sample. Cancelling this stops its grader."""
        way = self.way_of(sample)
        if way is not None:
            return (await self._grade(way.path, [sample], self._grading(way, args, sample, kwargs), way.awaits))[0]
        kind = _rm_type(args, sample)
        if not kind:
            raise ConfigError(
                "rl_accel.reward_timeout wants --rm-type, or rl_accel.reward_timeout.grader (what --custom-rm-path named),"
                " found neither"
            )
        if kind == "code":
            return await self._judge_program(sample)
        remote = kind.removeprefix("boxed_") == "remote_rm"
        run = self._remotely(sample, kind) if remote else self._processes.grading(None, sample)
        return (await self._grade(kind, [sample], run, remote))[0]

    async def judge_together(self, args: Any, samples: list[Any], way: Way, kwargs: dict[str, Any]) -> list[Any]:
        """Return the rewards of samples that one call grades."""
        run = self._grading(way, args, samples, kwargs)
        return await self._grade(way.path, samples, run, way.awaits, together=True)

    def _grading(self, way: Way, args: Any, given: Any, kwargs: dict[str, Any]) -> Run:
        if not way.awaits:
            return self._processes.grading(way.path, given)

        async def run(limits: Limits) -> GradeResult:
            return await within(way.function(args, given, **kwargs), limits, way.path)

        return run

    def _remotely(self, sample: Any, kind: str) -> Run:
        async def run(limits: Limits) -> GradeResult:
            return await within(rm_hub.async_rm(self._stock_args, sample), limits, kind)

        return run

    async def _grade(self, name: str, samples: list[Any], run: Run, awaits: bool, together: bool = False) -> list[Any]:
        """Return a usable reward for each sample, whatever becomes of the grader."""
        size, teach = len(samples), not EVALUATION.get()

        def rewards_of(result: GradeResult) -> Any:
            return result.value if together else [result.value]

        def problem_of(result: GradeResult) -> str:
            return result.reason if result.verdict != "done" else self._scores.problem(rewards_of(result), size)

        result = await (self._unbounded if awaits else self._bounded).execute(
            _prompt_key(samples[0]),
            f"{name}/{size}",
            run,
            lambda result: not problem_of(result) and self._scores.any_correct(rewards_of(result)),
            teach,
        )
        problem = problem_of(result)
        if not problem:
            self._scores.remember(name, rewards_of(result))
            return list(rewards_of(result))
        if "." not in name and problem.startswith("NotImplementedError"):  # an rm_type, not a path
            raise ConfigError(f"rl_accel.reward_timeout wants an --rm-type that slime has, found {name!r}: {problem}")
        if result.verdict != "timeout":
            self._note(name, problem, teach)
        return [self._scores.stand_in(name) for _ in samples]

    async def _judge_program(self, sample: Any) -> float:
        teach = not EVALUATION.get()
        try:
            return await self._programs.share(_prompt_key(sample), sample, teach)
        except ValueError as error:
            self._note("code", str(error), teach)
            return self.flags.timeout_score

    def _note(self, name: str, problem: str, teach: bool) -> None:
        self.replica.count("errors" if teach else "eval_errors")
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(
                "rl-accel: %s could not grade a response, which gets %s: %s; from now on this is only counted, as errors",
                name,
                self.flags.timeout_score,
                problem,
            )

    async def flush(self) -> None:
        """Tell the store everything that happened so far."""
        if self.store_client is not None:
            await self.store_client.close()

    async def close(self) -> None:
        """End all processes, and stop what they grade."""
        await self.flush()
        await self._processes.close()
        await self._programs.close()


def _rm_type(args: Any, sample: Any) -> str:
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    return str(metadata.get("rm_type") or args.rm_type or "").strip()


def _prompt_key(sample: Any) -> str:
    """The same for all responses to a prompt, in every epoch."""
    text = json.dumps([sample.prompt, sample.label], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()
