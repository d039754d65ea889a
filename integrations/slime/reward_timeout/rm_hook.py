"""Grades responses on slime with adaptive time limits. The functions in this file follow the order in which a sample is processed.

For each sample, slime calls :func:`mark_evaluation` and then :func:`grade`, in the same asyncio task. A grader that awaits
something runs on slime's event loop. The program of a code reward runs in the sandbox. Any other grader runs in a separate process
that can be killed (``grader_worker``).
"""

import ast
import asyncio
import copy
import functools
import inspect
import logging
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
from rl_accel.integrations.ray.reward_anchors import Collector, StoreClient, flush_here, in_this_job
from rl_accel.integrations.slime.hooks import flags_of
from rl_accel.integrations.slime.reward_timeout import RM_HOOK, check, grader_worker
from rl_accel.integrations.slime.rollout_log import LoggedRollout
from rl_accel.log import warn_once
from rl_accel.reward.adaptive_timeout import FULL_BUDGET, PROGRAM_BUDGET, AdaptiveTimeout, LocalAnchors
from rl_accel.reward.graders import Graders
from rl_accel.reward.limited_executor import (
    ExecutionResult,
    LimitedExecutor,
    Limits,
    gather_until,
    prompt_key,
    run_within,
)
from rl_accel.reward.sandbox import Sandbox, cases_of, execute_program, program_of
from rl_accel.reward.scores import Scores
from rl_accel.switch import forget_when_off

_MOST_WORKERS = 16
"""Upper bound of the default number of grader processes. Each process takes some 250 MiB of memory."""
_MOST_AWAITED = 1 << 20
"""Maximum number of graders that run on slime's event loop at once: in effect unlimited, as in slime. Such graders mostly wait."""

EVALUATION: ContextVar[bool] = ContextVar("evaluation", default=False)
"""True if the current asyncio task grades an evaluation sample. :func:`mark_evaluation` sets it. slime calls :func:`grade` in the
same task, so :func:`grade` never sees the value of another sample."""
_LAST_GRADED: ContextVar[tuple[Any, int]] = ContextVar("graded", default=(None, 0))
"""Sample that the current asyncio task has graded last, and the number of its earlier gradings. A generate function may grade a
sample after each turn, and each of these gradings has its own time limit."""


def mark_evaluation(args: Any, sample: Any, evaluation: bool = False, rollout_id: int | None = None) -> None:
    """Notes for :func:`grade` whether a sample belongs to an evaluation (slime's ``--rollout-sample-hook-path``)."""
    EVALUATION.set(evaluation)
    # slime copies --custom-rm-path to evaluation samples before it reads rl-accel's YAML file, and would call that function.
    if sample.custom_rm_path is not None and sample.custom_rm_path in (RM_HOOK, flags_of(args)[REWARD_TIMEOUT].grader):
        sample.custom_rm_path = None


async def grade(args: Any, sample: Any, **kwargs: Any) -> Any:
    """Returns the reward of a sample, or the rewards of a list of samples (slime's ``--custom-rm-path``).

    Raises:
        ConfigError: a flag is wrong, or no grader is configured.
        Exception: the grader raised this exception.
        SandboxError: no grader process can be started.
    """
    loop = asyncio.get_running_loop()
    if (grading := OPEN.get(loop)) is None:
        for ended in [known for known in OPEN if known.is_closed()]:
            OPEN.pop(ended).abandon()
        grading = OPEN[loop] = Grading(args)
    return await grading.grade(args, sample, kwargs)


@dataclass(frozen=True)
class GraderSpec:
    """Grader of a sample: the user's ``function`` or, if None, slime's own grader.

    A grader that ``awaits`` something runs on slime's event loop, any other in a separate process.
    """

    name: str  # dotted path of the user's grader, or slime's ``rm_type``
    function: Callable[..., Any] | None = None
    awaits: bool = False
    takes_lists: bool = False  # whether it gets a list of samples as a whole; else it is called for each sample


class Grading:
    """Grader processes, sandbox, and anchors (longest correct executions, from which limits follow) of one event loop.

    Raises:
        ConfigError: a flag is wrong.
    """

    def __init__(self, args: Any) -> None:
        self.flags = flags = flags_of(args)[REWARD_TIMEOUT]
        check(args, flags)
        self.anchors = LocalAnchors(AdaptiveTimeout(flags))
        path = str(Path(args.save) / "rl_accel_reward_anchors.json") if args.save else None
        self.store_client = StoreClient(self.anchors, path)
        self._workers = flags.workers or min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
        limits = Limits(memory=flags.memory_mb << 20)
        full = flags.maximum or FULL_BUDGET
        for_programs = flags.maximum or PROGRAM_BUDGET
        self._program_executor = LimitedExecutor(self.anchors, self._workers, limits, for_programs)
        self._executor = LimitedExecutor(self.anchors, self._workers, limits, full)
        self._awaited_executor = LimitedExecutor(self.anchors, _MOST_AWAITED, limits, full, flags.limit_waiting)
        # Keys of the score in a reward, as in slime: one key for training, and perhaps another key for evaluations.
        keys = [key for key in (args.reward_key, args.eval_reward_key) if key]
        number_keys = keys[:1] or ["acc", "score"]
        self._scores = Scores(
            flags,
            self.anchors,
            keys=keys,
            number_keys=number_keys,
            correct_keys=number_keys,
            numbers_only=False,
            exchange=self.store_client.exchange,
        )
        self._provider = grader_worker.Provider()
        self._pools: dict[str | None, Graders] = {}
        self._sandbox: Sandbox | None = None

    async def grade(self, args: Any, given: Any, kwargs: dict[str, Any]) -> Any:
        """Returns the reward of the sample ``given``, or the rewards if ``given`` is a list. Cancelling stops the graders."""
        self.store_client.use()
        is_list = isinstance(given, list)
        # In a list, slime calls the function in a sample's custom_rm_path for each sample.
        if is_list and not (given and self.flags.grader and self._spec_of(args, given[0]).takes_lists):
            return await gather_until(self.grade(args, sample, kwargs) for sample in given)
        size = len(given) if is_list else None
        teach = not EVALUATION.get()
        sample = given
        while isinstance(sample, list):  # with --group-rm, a generate function may have made a list of each sample
            sample = sample[0]
        spec = self._spec_of(args, sample)
        prompt = prompt_key(sample.prompt, sample.label)
        graded, gradings = _LAST_GRADED.get()
        gradings = gradings + 1 if graded is given else 0
        _LAST_GRADED.set((given, gradings))
        in_loop = spec.awaits or (is_list and sample is not given[0])

        async def run(limits: Limits) -> ExecutionResult:
            if not in_loop:
                return await self._run_in_process(spec, args, given, kwargs, limits)
            if spec.function is not None:
                return await run_within(spec.function(args, given, **kwargs), limits)
            own_args = copy.copy(args)
            own_args.custom_rm_path = None
            return await run_within(rm_hub.async_rm(own_args, given, **kwargs), limits)

        if spec.name == "code":
            result = await self._run_program(prompt, sample, teach)
        else:
            executor = self._awaited_executor if in_loop else self._executor
            case = f"{spec.name}/{size or 1}" + (f"/{gradings}" if gradings else "")
            is_correct = functools.partial(self._scores.is_correct, size=size)
            result = await executor.execute(prompt, case, run, is_correct, teach)
        if spec.function is None and result.reason.startswith("NotImplementedError"):
            raise ConfigError(
                f"rl_accel.reward_timeout wants an --rm-type that slime has, found {spec.name!r}: {result.reason}"
            )
        return await self._scores.reward_of(result, spec.name, teach, size)

    def _spec_of(self, args: Any, sample: Any) -> GraderSpec:
        path = self.flags.grader or sample.custom_rm_path  # slime itself ignores custom_rm_path in a list
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

    async def _run_in_process(
        self, spec: GraderSpec, args: Any, given_samples: Any, kwargs: dict[str, Any], limits: Limits
    ) -> ExecutionResult:
        """Runs a grader in a separate process, and applies its changes to the samples in this process."""
        path = spec.name if spec.function else None  # slime's own graders share one pool of processes
        if path not in self._pools:
            self._pools[path] = Graders(
                grader_worker.MAKE,
                self._workers,
                arguments={"grader": path, "rm_type": args.rm_type},
                defaults=in_this_job(),
            )
        is_list = isinstance(given_samples, list)
        samples = given_samples if is_list else [given_samples]
        packed = tuple(grader_worker.pack_sample(sample, whole=path is not None) for sample in samples)
        call = {"samples": packed, "single": not is_list, "kwargs": kwargs}
        provide = functools.partial(self._provider.provide, args)
        result = await self._pools[path].call(call, replace(limits, kind=spec.name), provide=provide)
        if result.verdict != "done":
            return result
        value, changes, order = result.value
        for sample, changed in zip(samples, changes, strict=True):
            fields = vars(sample)
            fields |= {key: grader_worker.unsent_restored(item, fields.get(key)) for key, item in changed.items()}
        samples[:] = [samples[place] for place in order]  # slime assigns the rewards in this order
        return replace(result, value=value)

    async def _run_program(self, prompt: str, sample: Any, teach: bool) -> ExecutionResult:
        """Runs the program of a response on ``metadata["test_cases"]`` in the sandbox. The score is the share of passed cases."""
        try:
            cases, addition = cases_of((sample.metadata or {}).get("test_cases"))
        except ValueError as error:
            return ExecutionResult(verdict="error", reason=f"ValueError: {error}", error=error)
        if (program := program_of(sample.response)) is None:
            return ExecutionResult(verdict="done", value=0.0)
        self._sandbox = self._sandbox or Sandbox(self._workers, self.flags.isolation)
        results = await execute_program(
            self._program_executor,
            self._sandbox,
            prompt,
            code=program + addition,
            cases=cases,
            teach=teach,
            early_stop=self.flags.early_stop,
        )
        passed = sum(result.verdict == "passed" for result in results)
        return ExecutionResult(verdict="done", value=passed / len(cases))

    def abandon(self) -> None:
        """Ends all grader processes and the sandbox after the event loop has been closed."""
        for pool in self._open():
            pool.abandon()

    async def close(self) -> None:
        """Ends all grader processes and the sandbox, including graders that are still running."""
        await self.store_client.close()
        for pool in self._open():
            await pool.close()

    def _open(self) -> "list[Graders | Sandbox]":
        pools: list[Graders | Sandbox] = [*self._pools.values()]
        return [*pools, self._sandbox] if self._sandbox else pools


OPEN: dict[asyncio.AbstractEventLoop, Grading] = {}
"""Grader processes, sandbox and limits of each event loop. slime has one event loop, or two with fully asynchronous rollouts."""


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
    # Many graders are coroutine functions because slime wants one, and block the event loop without awaiting anything.
    is_async = inspect.iscoroutinefunction(called)
    awaits = is_async and _awaits(called)
    if not awaits:
        where = "in processes of its own, which share no state with this process"
        logging.getLogger("rl_accel").info("rl-accel: reward_timeout runs %s, which awaits nothing, %s", path, where)
    # The function that a decorator wraps may be a coroutine function, although the decorated function is none.
    return GraderSpec(path, function, awaits, inspect.iscoroutinefunction(inspect.unwrap(called)))


def _awaits(function: Any) -> bool:
    """Returns whether a coroutine function awaits anything, by its source code; True if the source code is not available."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return True
    waits = (ast.Await, ast.AsyncFor, ast.AsyncWith)
    return any(isinstance(node, waits) or getattr(node, "is_async", False) for node in ast.walk(tree))


_collect = Collector()


def _close_all() -> None:
    """Closes the :class:`Grading` (grader processes and sandbox) of each event loop, when the last feature is turned off.

    The processes end in the background. Also forgets which anchor store (Ray actor) sent the last counts of executions.
    """
    global _collect
    _collect = Collector()
    while OPEN:
        loop, grading = OPEN.popitem()
        if loop.is_running():
            asyncio.run_coroutine_threadsafe(grading.close(), loop)


forget_when_off.append(_close_all)


def numbers_of(rollout: LoggedRollout) -> dict[str, float]:
    """Returns metrics about the gradings of the whole job since the last call, for slime's rollout log.

    Must not be called on an event loop, because it waits for the event loops of this process.
    """
    flush_here()
    numbers = _collect(rollout.number, rollout.metrics)
    if not numbers and not OPEN:
        message = "rl-accel: reward_timeout has nothing to do: %s has graded no sample with slime's reward functions"
        warn_once("no grading", message, f"--rollout-function-path {rollout.args.rollout_function_path}")
    return {f"rl_accel/{name}": number for name, number in numbers.items()}
