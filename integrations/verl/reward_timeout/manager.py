"""Reward manager that verl loads in each reward worker, with time limits for the reward function.

:class:`RewardTimeoutManager` wraps the configured reward manager, which does everything except the scoring. The method ``score`` of
:class:`RewardTimeoutManager` replaces the user's reward function, or verl's own.
"""

import functools
import inspect
import itertools
import logging
import os
from collections.abc import Awaitable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from omegaconf import OmegaConf
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls, limited
from verl.protocol import DataProto
from verl.utils.import_utils import load_extern_object

from rl_accel import process_start
from rl_accel.errors import ConfigError
from rl_accel.features import RewardTimeoutFlags
from rl_accel.integrations.ray import grader_cluster
from rl_accel.integrations.ray.reward_anchors import StoreClient
from rl_accel.integrations.verl import grader_process
from rl_accel.integrations.verl.reward_timeout import MANAGER, SECTION
from rl_accel.integrations.verl.reward_timeout.code_rewards import (
    DATA_SOURCES,
    prime_graders,
    score_fusion,
    score_prime_code,
)
from rl_accel.integrations.verl.reward_timeout.validation import VALIDATION
from rl_accel.integrations.verl.reward_worker_proxy import SUCCESSOR
from rl_accel.patches.seams import extends
from rl_accel.patches.verl import interfaces
from rl_accel.reward.adaptive_timeout import FULL_BUDGET, PROGRAM_BUDGET, AdaptiveTimeout
from rl_accel.reward.anchor_store import LocalAnchors
from rl_accel.reward.execution import ExecutionResult, Limits, run_within
from rl_accel.reward.limited_executor import LimitedExecutor, prompt_key
from rl_accel.reward.sandbox import Graders, SandboxError
from rl_accel.reward.scores import Scores

if TYPE_CHECKING:
    RewardManagerBase = interfaces.RewardManagerBase
else:
    from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

logger = logging.getLogger("rl_accel")

_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
_VERLS_OWN = "verl.utils.reward_score:default_compute_score"
_AWAITED_SLOTS = 1 << 20  # some of these functions wait until all responses of a batch have arrived
"""Maximum number of async reward functions that run at once in each reward process: in effect unlimited, as in verl."""
_FUSION_SLOTS = 256
"""Maximum number of requests to a remote sandbox at once in each reward process."""
_WARN_AFTER_UNCALLED = 8
"""Number of responses after which a warning is logged if the reward manager has called its reward function for none of them."""


@dataclass
class _Response:
    """Response that the running asyncio task scores.

    Attributes:
        prompt: key of the prompt.
        teach: True if the time limits learn from the response; False for validation responses.
        calls: number of calls of the reward function for the response so far.
        refusal: error because of which the function could not be called. A manager may take it for an error of the function.
    """

    prompt: str
    teach: bool = True
    calls: int = 0
    refusal: SandboxError | None = None


_RESPONSE: ContextVar[_Response | None] = ContextVar("rl_accel_response", default=None)


@extends(interfaces.RewardManagerBase)
class RewardTimeoutManager(RewardManagerBase):
    """Reward manager that runs the user's configured manager with a time limit for each execution of the reward function.

    The configured manager (naive, dapo, gdpo, remote, rate_limited or a user's class) still computes the scores, with two changes.
    ``naive`` replaces ``remote``, because the reward function runs in other processes anyway. The ``reward.timeout`` of
    ``rate_limited`` is only the default of the full budget.

    A response whose execution was stopped gets ``timeout_score``. With the flag ``score_errors``, so does a response for which the
    reward function raised an exception or returned an unusable value. Without the flag, both are passed on unchanged.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        section = config.reward[SECTION]
        self._flags = flags = RewardTimeoutFlags(**section.flags)
        self.anchors = LocalAnchors(AdaptiveTimeout(flags))
        self._store_client = StoreClient(self.anchors, section.anchors)
        if ray.is_initialized() and SUCCESSOR in (ray.get_runtime_context().get_actor_name() or ""):
            self.anchors.count("reward_workers_lost")
        self._program_slots = flags.workers or _share_of_cores(config.reward.num_workers)
        self._slots = flags.workers or min(32, (os.cpu_count() or 1) + 4)
        limits = Limits(memory=flags.memory_mb << 20)
        self._configured = section.manager
        self.held = _configured_manager(
            config,
            tokenizer=tokenizer,
            compute_score=self.score,
            reward_router_address=reward_router_address,
            reward_model_tokenizer=reward_model_tokenizer,
        )
        full, is_limited = flags.maximum or FULL_BUDGET, isinstance(self.held, limited.RateLimitedRewardManager)
        if is_limited:
            rate_limited: interfaces.RateLimitedRewardManager = self.held
            full = flags.maximum or rate_limited.timeout or FULL_BUDGET
            rate_limited.timeout = None  # without a limit in asyncio.wait_for
        for_programs = flags.maximum or PROGRAM_BUDGET
        self._program_executor = LimitedExecutor(self.anchors, self._program_slots, limits, for_programs)
        self._fusion_executor = LimitedExecutor(self.anchors, _FUSION_SLOTS, limits, for_programs)
        self._executor = LimitedExecutor(self.anchors, self._slots, limits, full)
        # In a rate-limited manager, calls wait for their turn before they are executed.
        adapts, queues = flags.limit_waiting, not is_limited
        self._awaited_executor = LimitedExecutor(self.anchors, _AWAITED_SLOTS, limits, full, adapts, queues)
        self._scores = Scores(flags, self.anchors, (), ("score",), ("acc", "score"), numbers_only=True)
        self._tokenizer = {} if reward_model_tokenizer is None else {"reward_model_tokenizer": reward_model_tokenizer}
        self._graders: dict[str, Graders] = {}
        self._deaths = 0
        # Counts responses that the manager has scored without the reward function; None once that has been called.
        self._uncalled: Iterator[int] | None = itertools.count(1)
        if not (self._is_verls_own or inspect.iscoroutinefunction(self.compute_score)):
            self._function.warm_up()  # verl's own function may score only code, which other processes run

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Scores the last response of ``data``, as in the base class. Cancelling this call kills the running execution.

        Raises:
            ConfigError: the user's own reward manager calls the reward function without awaiting it.
        """
        columns = data.non_tensor_batch
        validation = columns.pop(VALIDATION, np.array([False]))
        row = {
            name: columns[name][-1]
            for name in ("data_source", "reward_model", "raw_prompt", "extra_info")
            if name in columns
        }
        truth = row.get("reward_model")
        truth = truth.get("ground_truth") if isinstance(truth, dict) else truth
        prompt = _prompt_of(row.get("data_source"), truth, row.get("raw_prompt"), row.get("extra_info"))
        response = _Response(prompt, not bool(validation[-1]))
        _RESPONSE.set(response)
        self._store_client.use()
        try:
            result: dict[str, Any] = await self.held.run_single(data)
        except (TypeError, AttributeError) as error:
            if response.calls or "coroutine" not in str(error):
                raise
            raise self._never_awaited() from error
        finally:
            self._store_client.use()
        if response.refusal:
            raise response.refusal
        if inspect.iscoroutine(result["reward_score"]):
            result["reward_score"].close()
            raise self._never_awaited()
        if self._uncalled is not None and (count := next(self._uncalled)) == _WARN_AFTER_UNCALLED:
            text = "rl-accel: reward_timeout has nothing to limit: %s has scored %d responses without its compute_score"
            logger.warning(text, type(self.held).__name__, count)
        return result

    def _never_awaited(self) -> ConfigError:
        name, path = self._configured.name, self._configured.path
        return ConfigError(
            f"rl_accel.reward_timeout wants a reward manager that awaits its compute_score if it is a coroutine function, "
            f"as verl's do; found {name} of {path or 'verl'}, now held by {MANAGER}"
        )

    async def score(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the configured reward function within a time limit. Takes the arguments of verl's reward functions.

        Returns:
            A reward as verl's reward managers expect: a number, or a dict with the key ``score``.

        Raises:
            SandboxError: the reward function cannot be imported in a separate process.
            Exception: the exception that the reward function raised.
        """
        # A user's manager may pass other arguments than verl's; these names only serve to identify prompt and source.
        arguments = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
        source = str(arguments.get("data_source"))
        response = _RESPONSE.get() or _Response(
            _prompt_of(source, arguments.get("ground_truth"), None, arguments.get("extra_info"))
        )
        prompt, teach = response.prompt, response.teach
        # A user's manager may call the function for several parts of a score, of which each takes its own time.
        case = str(response.calls) if response.calls else ""
        response.calls += 1
        self._uncalled = None
        awaits = inspect.iscoroutinefunction(self.compute_score)
        executor, run = (self._awaited_executor, self._await) if awaits else (self._executor, self._run_in_process)
        try:
            if self._is_verls_own and source in DATA_SOURCES:
                result = ExecutionResult(verdict="done", value=await self._score_code(prompt, teach, arguments))
            else:
                result = await executor.execute(
                    prompt, case, functools.partial(run, args, kwargs, source), self._scores.is_correct, teach
                )
        except SandboxError as error:
            response.refusal = error
            raise
        deaths = sum(graders.deaths for graders in self._graders.values())
        self.anchors.count("workers_replaced", deaths - self._deaths)
        self._deaths = deaths
        return self._scores.reward_of(result, source, teach)

    async def close(self) -> None:
        """Ends all grader processes and stops running executions of reward functions."""
        graders, self._graders = self._graders, {}
        for pool in graders.values():
            await pool.close()

    async def _score_code(self, prompt: str, teach: bool, arguments: dict[str, Any]) -> float:
        """Scores one response with verl's own code rewards, with a separate execution for each test case."""
        options = self.compute_score.keywords if isinstance(self.compute_score, functools.partial) else {}
        if options.get("sandbox_fusion_url"):
            execute = functools.partial(self._fusion_executor.execute, prompt, teach=teach)
            return await score_fusion(execute, options, self._flags.early_stop, arguments)
        if "prime_code" not in self._graders:
            self._graders["prime_code"] = prime_graders(self._program_slots, self._flags.isolation)
        execute = functools.partial(self._program_executor.execute, prompt, teach=teach)
        return await score_prime_code(execute, self._graders["prime_code"], self._flags.early_stop, arguments)

    @property
    def _is_verls_own(self) -> bool:
        function = self.compute_score
        inner = function.func if isinstance(function, functools.partial) else function
        if hasattr(inner, "__wrapped__"):  # a function of the user, with the name of verl's
            return False
        return inner is None or f"{inner.__module__}:{inner.__qualname__}" == _VERLS_OWN

    async def _await(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], _source: str, limits: Limits
    ) -> ExecutionResult:
        return await run_within(self.compute_score(*args, **kwargs), limits, self._target[0])

    def _run_in_process(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], source: str, limits: Limits
    ) -> Awaitable[ExecutionResult]:
        return self._function.call({**kwargs, **self._target[1]}, replace(limits, kind=source), args)

    @functools.cached_property
    def _function(self) -> Graders:
        """Grader processes that call a synchronous reward function."""
        function = self._graders[self._target[0]] = Graders(
            self._target[0],
            self._slots,
            in_thread=self._configured["name"] != "remote",  # as in verl
            computing=self._program_slots,
            environment={**process_start.removed_variables(), **grader_cluster.environment()},
            setup=grader_process.SETUP,
            constants={**self._tokenizer, **self._target[1]},
            folder=process_start.folder(),
        )
        return function

    @functools.cached_property
    def _target(self) -> tuple[str, dict[str, Any]]:
        """Import path of the reward function, and the configured ``reward_kwargs``, which override keyword arguments of a call."""
        if self._is_verls_own:
            return _VERLS_OWN, {}
        custom = OmegaConf.select(self.config, "reward.custom_reward_function", default=None) or {}
        if not custom.get("path"):  # code of the user has replaced verl's function
            function: Any = self.compute_score
            return f"{function.__module__}:{function.__qualname__}", {}
        path = custom["path"]
        if path.startswith("pkg://"):
            module = path.removeprefix("pkg://").replace("/", ".")
        else:
            module = str(Path(process_start.folder(), path.removeprefix("file://")).absolute())
        return f"{module}:{custom['name']}", dict(custom.get("reward_kwargs") or {})


def _configured_manager(config: Any, **arguments: Any) -> Any:
    """Creates the reward manager that the user configured; verl's ``naive`` manager in place of ``remote``."""
    configured, original = config.reward[SECTION].manager, config.copy()
    section = original.reward.reward_manager
    section.source, section.name, section.module.path = (configured[key] for key in ("source", "name", "path"))
    if configured.source == "importlib":
        manager_class = load_extern_object(module_path=configured.path, object_name=configured.name)
    else:
        manager_class = get_reward_manager_cls("naive" if configured.name == "remote" else configured.name)
    return manager_class(config=original, **arguments)


def _share_of_cores(reward_workers: int) -> int:
    """Returns the number of executions that each reward worker may run at once: its share of the node's CPU cores, at least 1.

    ``reward_workers`` is the number of reward workers on all nodes together.
    """
    nodes = 1
    if ray.is_initialized():
        nodes = sum(1 for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0)
    return max(1, len(os.sched_getaffinity(0)) // max(1, -(-reward_workers // max(nodes, 1))))


def _prompt_of(data_source: Any, ground_truth: Any, raw_prompt: Any, extra_info: Any) -> str:
    """Returns the key of a prompt for the time limits, computed from data source, ground truth and text of the prompt.

    If ``raw_prompt`` has no text, ``extra_info["index"]`` takes its place.
    """
    texts = list(_texts(raw_prompt))
    index = extra_info.get("index") if isinstance(extra_info, dict) and not texts else None
    return prompt_key(str(data_source), ground_truth, texts, index)


def _texts(messages: Any) -> Iterable[str]:
    for message in messages if messages is not None and not isinstance(messages, str) else [messages]:
        content = message.get("content") if isinstance(message, dict) else message
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):  # not images, which have no stable text
                yield text
