"""One response's way through grading on slime, from top to bottom.

slime calls :func:`mark_evaluation` for each sample and then :func:`grade`, in the same task. :meth:`Grading.grade` looks up how the
sample is graded, waits for its turn and a time limit (:class:`~rl_accel.reward.limited_executor.LimitedExecutor`), and has the
grader run: in a process that can be killed (``grader_worker``), on slime's event loop if it awaits something, or, for a program
with test cases, in the sandbox. :class:`~rl_accel.reward.scores.Scores` turns the result into a reward, or stands in for one.
"""

import ast
import asyncio
import concurrent.futures
import copy
import functools
import inspect
import os
import textwrap
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime.rollout import rm_hub
from slime.utils.misc import load_function

from rl_accel.errors import ConfigError
from rl_accel.features import REWARD_TIMEOUT
from rl_accel.integrations.ray import grader_cluster
from rl_accel.integrations.ray.reward_anchors import Collector, StoreClient
from rl_accel.integrations.slime.hooks import flags_of
from rl_accel.integrations.slime.reward_timeout import RM_HOOK, check, grader_worker
from rl_accel.integrations.slime.reward_timeout.programs import cases_of, program_of
from rl_accel.integrations.slime.rollout_log import Rollout
from rl_accel.reward.adaptive_timeout import FULL_BUDGET, PROGRAM_BUDGET, AdaptiveTimeout
from rl_accel.reward.anchor_store import Replica
from rl_accel.reward.execution import ExecutionResult, Limits, gather_until, run_within
from rl_accel.reward.limited_executor import LimitedExecutor, execute_program, prompt_key
from rl_accel.reward.sandbox import Graders, Sandbox
from rl_accel.reward.scores import Scores
from rl_accel.switch import forget_when_off

_MOST_WORKERS = 16
"""Each has imported slime, some 250 MiB."""
_MOST_AWAITED = 1 << 20
"""slime does not hold awaited graders back, and they cost this machine nothing."""
_EXCHANGE_SECONDS = 5.0

EVALUATION: ContextVar[bool] = ContextVar("evaluation", default=False)
"""Whether the running task, which slime grades in as well, belongs to an evaluation."""


def mark_evaluation(args: Any, sample: Any, evaluation: bool = False, rollout_id: int | None = None) -> None:
    """slime's ``--rollout-sample-hook-path``: slime tells it, but not the function it calls next, what is an evaluation.

    The samples of an evaluation name a grader of their own, which slime takes from ``--custom-rm-path`` before it reads our file.
    If that is the one under ``grader``, it is left to us, as in training.
    """
    EVALUATION.set(evaluation)
    if sample.custom_rm_path is not None and sample.custom_rm_path in (RM_HOOK, flags_of(args)[REWARD_TIMEOUT].grader):
        sample.custom_rm_path = None


async def grade(args: Any, sample: Any, **kwargs: Any) -> Any:
    """slime's ``--custom-rm-path``: the reward of a sample, or of a list of samples their rewards.

    Raises:
        ConfigError: a flag is wrong, or nothing says how to grade.
        Exception: what the grader raised.
        SandboxError: no process to grade in can be started.
    """
    loop = asyncio.get_running_loop()
    if (grading := OPEN.get(loop)) is None:
        for ended in [known for known in OPEN if known.is_closed()]:
            del OPEN[ended]
        grading = OPEN[loop] = Grading(args)
    return await grading.grade(args, sample, kwargs)


@dataclass(frozen=True)
class GraderSpec:
    """How a sample is graded.

    Attributes:
        name: the dotted path of the user's grader, or slime's ``rm_type``.
        function: the user's grader; None: slime's own.
        awaits: it awaits something, so it runs on slime's event loop. Any other runs in a process that can be killed.
        takes_lists: it is a coroutine function, which slime itself could call: it is given a list where slime would give it one.
    """

    name: str
    function: Callable[..., Any] | None = None
    awaits: bool = False
    takes_lists: bool = False


class Grading:
    """What grades on one event loop.

    Args:
        args: slime's.

    Raises:
        ConfigError: a flag is wrong.
    """

    def __init__(self, args: Any) -> None:
        self.flags = flags = flags_of(args)[REWARD_TIMEOUT]
        check(args, flags)
        self.replica = Replica(AdaptiveTimeout(flags))
        path = str(Path(args.save) / "rl_accel_reward_anchors.json") if args.save else None
        self.store_client = StoreClient(self.replica, path)
        self._workers = flags.workers or min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
        limits = Limits(memory=flags.memory_mb << 20)
        full, for_programs = flags.maximum or FULL_BUDGET, flags.maximum or PROGRAM_BUDGET
        self._program_executor = LimitedExecutor(self.replica, self._workers, limits, for_programs)
        self._executor = LimitedExecutor(self.replica, self._workers, limits, full)
        self._awaited_executor = LimitedExecutor(self.replica, _MOST_AWAITED, limits, full, flags.limit_waiting)
        # As slime looks them up: one key in training, perhaps another in evaluations.
        keys = [key for key in (args.reward_key, args.eval_reward_key) if key]
        number_keys = keys[:1] or ["acc", "score"]
        self._scores = Scores(flags, self.replica, keys, number_keys, number_keys, numbers_only=False)
        self._packed_args = grader_worker.pack(vars(args))
        self._stock_args = copy.copy(args)
        self._stock_args.custom_rm_path = None
        self._graders: dict[str, Graders] = {}

    async def grade(self, args: Any, given: Any, kwargs: dict[str, Any]) -> Any:
        """Return the reward of a sample, or those of a list of samples. Cancelling this stops their graders."""
        self.store_client.use()
        is_list = isinstance(given, list)
        if is_list and not (given and self._spec_of(args, given[0]).takes_lists):
            return await gather_until(self.grade(args, sample, kwargs) for sample in given)
        sample, size, teach = given[0] if is_list else given, len(given) if is_list else None, not EVALUATION.get()
        spec, prompt = self._spec_of(args, sample), prompt_key(sample.prompt, sample.label)
        if spec.name == "code":
            result = await self._run_program(prompt, sample, teach)
        else:
            if spec.awaits:
                executor, run = self._awaited_executor, functools.partial(self._await, spec, args, given, kwargs)
            else:
                executor, run = self._executor, functools.partial(self._run_in_process, spec, given)
            result = await executor.execute(
                prompt,
                f"{spec.name}/{size or 1}",
                run,
                lambda result: self._scores.is_correct(result, size),
                teach,
            )
        if spec.function is None and result.reason.startswith("NotImplementedError"):
            raise ConfigError(
                f"rl_accel.reward_timeout wants an --rm-type that slime has, found {spec.name!r}: {result.reason}"
            )
        return self._scores.reward_of(result, spec.name, teach, size)

    def _spec_of(self, args: Any, sample: Any) -> GraderSpec:
        path = self.flags.grader or sample.custom_rm_path  # slime honours the latter itself, but not in a list
        if path not in (None, RM_HOOK):
            return _spec_of_path(path)
        metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
        rm_type = str(metadata.get("rm_type") or args.rm_type or "").strip()
        if not rm_type:
            raise ConfigError(
                "rl_accel.reward_timeout wants --rm-type, or rl_accel.reward_timeout.grader (what --custom-rm-path named),"
                " found neither"
            )
        return GraderSpec(rm_type, awaits=rm_type.removeprefix("boxed_") == "remote_rm")

    async def _run_in_process(self, spec: GraderSpec, given: Any, limits: Limits) -> ExecutionResult:
        """Run a grader in a process. What it changes in a sample is changed in ours, unless it was stopped."""
        name = spec.name if spec.function else ""  # one kind of process for all of slime's own
        if name not in self._graders:
            arguments = {"args": self._packed_args, "grader": name or None}
            self._graders[name] = Graders(
                grader_worker.MAKE,
                self._workers,
                arguments,
                environment=grader_cluster.environment(),
                setup=grader_cluster.SETUP,
            )
        samples = given if isinstance(given, list) else [given]
        packed = [grader_worker.pack_sample(sample, whole=bool(name)) for sample in samples]
        result = await self._graders[name].call({"samples": packed, "single": given is not samples}, limits)
        if result.verdict != "done":
            return result
        value, changes = result.value
        for sample, changed in zip(samples, changes, strict=True):
            vars(sample).update(changed)
        return replace(result, value=value)

    async def _await(
        self, spec: GraderSpec, args: Any, given: Any, kwargs: dict[str, Any], limits: Limits
    ) -> ExecutionResult:
        """Await a grader on slime's event loop."""
        function = spec.function
        coroutine = function(args, given, **kwargs) if function else rm_hub.async_rm(self._stock_args, given)
        return await run_within(coroutine, limits, spec.name)

    async def _run_program(self, prompt: str, sample: Any, teach: bool) -> ExecutionResult:
        """Score the program in a response by the share of ``metadata["test_cases"]`` that it passes."""
        try:
            cases, addition = cases_of((sample.metadata or {}).get("test_cases"))
        except ValueError as error:
            return ExecutionResult(verdict="error", reason=f"ValueError: {error}", error=error)
        program = program_of(sample.response)
        if program is None:
            return ExecutionResult(verdict="done", value=0.0)
        program, early_stop = program + addition, self.flags.early_stop
        results = await execute_program(
            self._program_executor, self._sandbox, prompt, program, cases, teach, early_stop
        )
        passed = sum(result.verdict == "passed" for result in results)
        return ExecutionResult(verdict="done", value=passed / len(cases))

    @functools.cached_property
    def _sandbox(self) -> Sandbox:
        return Sandbox(self._workers, self.flags.isolation)

    async def close(self) -> None:
        """End all processes, and stop what they grade."""
        await self.store_client.close()
        graders, self._graders = self._graders, {}
        for pool in graders.values():
            await pool.close()
        if "_sandbox" in vars(self):
            await self._sandbox.close()


OPEN: dict[asyncio.AbstractEventLoop, Grading] = {}
"""What grades in this process, by event loop: slime has one, and a second with fully asynchronous rollouts."""


@functools.lru_cache(maxsize=64)
def _spec_of_path(path: str) -> GraderSpec:
    try:
        function = load_function(path)
        called = function.func if isinstance(function, functools.partial) else function
        if not inspect.isroutine(called):
            called = type(called).__call__
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"rl_accel.reward_timeout.grader wants the dotted path of a function, found {path!r}: {error}"
        ) from error
    is_async = inspect.iscoroutinefunction(called)
    return GraderSpec(path, function, is_async and _awaits(called), is_async)


def _awaits(function: Any) -> bool:
    """Whether a coroutine function awaits anything. slime calls coroutine functions only, so many graders are, and block."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return True
    waits = (ast.Await, ast.AsyncFor, ast.AsyncWith)
    return any(isinstance(node, waits) or getattr(node, "is_async", False) for node in ast.walk(tree))


_collect = Collector()


def _close_all() -> None:
    """Forget what grades and what was counted; the processes of graders end in the background."""
    global _collect
    _collect = Collector()
    while OPEN:
        loop, grading = OPEN.popitem()
        if loop.is_running():
            asyncio.run_coroutine_threadsafe(grading.close(), loop)


forget_when_off.append(_close_all)


def numbers_of(rollout: Rollout) -> dict[str, float]:
    """Return what the job has counted since the last call, for slime's log of a rollout. Called outside of the event loops."""
    exchanges = [
        asyncio.run_coroutine_threadsafe(grading.store_client.close(), loop)
        for loop, grading in list(OPEN.items())
        if loop.is_running()
    ]
    concurrent.futures.wait(exchanges, _EXCHANGE_SECONDS)
    return {f"rl_accel/{name}": number for name, number in _collect(rollout.number, rollout.metrics).items()}
