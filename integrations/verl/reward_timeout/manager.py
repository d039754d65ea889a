"""Reward manager that verl loads in each reward worker, with time limits for the reward function.

:class:`RewardTimeoutManager` holds the reward manager that the user configured, and gives it the method ``score`` as reward
function. This method runs the user's reward function, or verl's own, within time limits.
"""

import functools
import inspect
import itertools
import logging
import os
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from omegaconf import OmegaConf
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls, limited
from verl.protocol import DataProto
from verl.utils.import_utils import load_extern_object

from rl_accel import process_start
from rl_accel.errors import ConfigError
from rl_accel.features import REWARD_TIMEOUT
from rl_accel.integrations.ray import reward_anchors
from rl_accel.integrations.verl.reward_timeout import MANAGER, SECTION, code_rewards
from rl_accel.integrations.verl.reward_worker_proxy import SUCCESSOR, VALIDATION
from rl_accel.patches.verl import interfaces
from rl_accel.reward.adaptive_timeout import FULL_BUDGET, PROGRAM_BUDGET, AdaptiveTimeout, LocalAnchors
from rl_accel.reward.graders import Graders, SandboxError
from rl_accel.reward.limited_executor import ExecutionResult, LimitedExecutor, Limits, prompt_key, run_within
from rl_accel.reward.sandbox import Sandbox
from rl_accel.reward.scores import Scores
from rl_accel.runtime import RUNTIME

if TYPE_CHECKING:
    RewardManagerBase = interfaces.RewardManagerBase
else:
    from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

logger = logging.getLogger("rl_accel")

_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
_VERLS_OWN = "verl.utils.reward_score:default_compute_score"
_AWAITED_SLOTS = 1 << 20
"""Maximum number of async reward functions that run at once in each reward worker: in effect unlimited, as in verl. Some of these
functions wait until all responses of a batch have arrived."""
_FUSION_SLOTS = 256
"""Maximum number of requests to a remote sandbox at once in each reward worker. Chosen by hand."""
_WARN_AFTER_UNCALLED = 8
"""Number of scored responses after which a warning is logged if the reward function was called for none of them. Chosen by hand."""


@dataclass
class _Response:
    """Response that the running asyncio task scores, with the key of its prompt."""

    prompt: str
    teach: bool = True  # False for a validation response, from which no time limits are learned
    calls: int = 0  # of the reward function for this response so far
    refusal: SandboxError | None = None  # the held manager may catch it as an error of the reward function


_RESPONSE: ContextVar[_Response | None] = ContextVar("rl_accel_response", default=None)


class RewardTimeoutManager(RewardManagerBase):
    """Reward manager that runs the configured manager, with a time limit for each execution of the reward function.

    The configured manager (of verl or the user) still computes the scores, with two changes. verl's manager ``naive`` replaces its
    manager ``remote``, because the reward function runs in other processes anyway. verl's manager ``rate_limited`` no longer stops
    calls after ``reward.timeout`` seconds; this setting is only the default of the full budget (the longest limit).

    A response whose execution was stopped gets ``timeout_score``. With the flag ``score_errors``, so does a response for which the
    reward function raised an exception or returned an unusable value. Without the flag, both are passed on unchanged.

    Takes the arguments of every reward manager of verl. ``given``: further arguments, passed to the configured manager.
    """

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any, **given: Any) -> None:
        super().__init__(config, tokenizer, compute_score)
        section = config.reward[SECTION]
        self._flags = RUNTIME.flags_of(REWARD_TIMEOUT)
        self.anchors = LocalAnchors(AdaptiveTimeout(self._flags))
        self._store_client = reward_anchors.StoreClient(self.anchors, section.anchors)
        if ray.is_initialized() and SUCCESSOR in (ray.get_runtime_context().get_actor_name() or ""):
            self.anchors.count("reward_workers_lost")
        self._program_slots = self._flags.workers or _share_of_cores(config.reward.num_workers)
        self._configured = section.manager
        self.held = _configured_manager(config, tokenizer=tokenizer, compute_score=self.score, **given)
        self._awaits = inspect.iscoroutinefunction(compute_score)
        self._options = compute_score.keywords if isinstance(compute_score, functools.partial) else {}
        self._slots = self._flags.workers or min(32, (os.cpu_count() or 1) + 4)
        self._executor = self._executor_of_functions()
        self._program_executor = LimitedExecutor(
            self.anchors,
            slots=_FUSION_SLOTS if self._options.get("sandbox_fusion_url") else self._program_slots,
            limits=Limits(memory=self._flags.memory_mb << 20),
            maximum=self._flags.maximum or PROGRAM_BUDGET,
        )
        self._scores = Scores(
            self._flags,
            self.anchors,
            keys=(),
            number_keys=("score",),
            correct_keys=("acc", "score"),
            numbers_only=True,
            exchange=self._store_client.exchange,
        )
        self._is_verls_own = _is_verls_own(compute_score)
        self._target, self._reward_kwargs = _target_of(config, compute_score)
        tokenizers = {k: v for k, v in given.items() if k == "reward_model_tokenizer" and v is not None}
        self._constants = tokenizers | self._reward_kwargs
        self._pools: dict[str, Graders | Sandbox] = {}
        self._deaths = 0
        # Counts responses that the manager has scored without the reward function; None once that has been called.
        self._uncalled: Iterator[int] | None = itertools.count(1)

    def _executor_of_functions(self) -> LimitedExecutor:
        full = self._flags.maximum
        is_limited = isinstance(self.held, limited.RateLimitedRewardManager)
        if is_limited:
            rate_limited: interfaces.RateLimitedRewardManager = self.held
            full = full or rate_limited.timeout
            rate_limited.timeout = None  # without a limit in asyncio.wait_for
        return LimitedExecutor(
            self.anchors,
            slots=_AWAITED_SLOTS if self._awaits else self._slots,
            maximum=full or FULL_BUDGET,
            adapts=self._flags.limit_waiting if self._awaits else True,
            queues=not is_limited,  # a rate-limited manager queues calls before they are executed
        )

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Scores the last response of ``data``, as in the base class. Cancelling this call kills the running execution.

        Raises:
            ConfigError: the user's own reward manager calls the reward function without awaiting it.
        """
        row = {name: column[-1] for name, column in data.non_tensor_batch.items()}
        is_validation = data.non_tensor_batch.pop(VALIDATION, None) is not None
        truth = row.get("reward_model")
        truth = truth.get("ground_truth") if isinstance(truth, dict) else truth
        prompt = _prompt_of(row.get("data_source"), truth, row.get("raw_prompt"), row.get("extra_info"))
        response = _Response(prompt, teach=not is_validation)
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
        """Calls the reward function within a time limit, with the same arguments. Returns its reward, or a substitute.

        Raises:
            SandboxError: the reward function cannot be imported in a separate process, or an argument cannot be sent there.
            Exception: the exception that the reward function raised.
        """
        # A user's manager may pass other arguments than verl's; these names only serve to identify prompt and source.
        arguments = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
        source = str(arguments.get("data_source"))
        response = _RESPONSE.get() or _Response(
            _prompt_of(source, arguments.get("ground_truth"), None, arguments.get("extra_info"))
        )
        prompt = response.prompt
        teach = response.teach
        # A user's manager may call the function for several parts of a score, of which each takes its own time.
        case = str(response.calls) if response.calls else ""
        response.calls += 1
        self._uncalled = None

        async def run(limits: Limits) -> ExecutionResult:
            if self._awaits:
                return await run_within(self.compute_score(*args, **kwargs), limits)
            return await self._function.call({**kwargs, **self._reward_kwargs}, replace(limits, kind=source), args)

        try:
            if self._is_verls_own and source in code_rewards.DATA_SOURCES:
                result = ExecutionResult(verdict="done", value=await self._score_code(prompt, teach, arguments))
            else:
                result = await self._executor.execute(prompt, case, run, self._scores.is_correct, teach)
        except SandboxError as error:
            response.refusal = error
            raise
        deaths = sum(pool.deaths for pool in self._pools.values())
        self.anchors.count("workers_replaced", deaths - self._deaths)
        self._deaths = deaths
        return await self._scores.reward_of(result, source, teach)

    async def close(self) -> None:
        """Ends all processes of graders and programs, and stops running executions."""
        pools = list(self._pools.values())
        self._pools.clear()
        for pool in pools:
            await pool.close()

    async def _score_code(self, prompt: str, teach: bool, arguments: dict[str, Any]) -> float:
        """Scores one response with verl's own code rewards, with a separate execution for each test case."""
        execute = functools.partial(self._program_executor.execute, prompt, teach=teach)
        if self._options.get("sandbox_fusion_url"):
            return await code_rewards.score_fusion(execute, self._options, self._flags.early_stop, arguments)
        return await code_rewards.score_prime_code(execute, self._judge, self._flags.early_stop, arguments)

    @functools.cached_property
    def _judge(self) -> Sandbox:
        """Sandbox in which verl's own grading code runs programs."""
        judge = self._pools["prime_code"] = code_rewards.prime_sandbox(self._program_slots, self._flags.isolation)
        return judge

    @functools.cached_property
    def _function(self) -> Graders:
        """Grader processes that call a synchronous reward function, prepared as verl prepares its reward workers."""
        function = self._pools[self._target] = Graders(
            self._target,
            self._slots,
            in_thread=self._configured["name"] != "remote",  # as in verl
            computing=self._program_slots,
            environment=process_start.removed_variables(),
            defaults=reward_anchors.in_this_job(),
            modules=("verl",) if os.environ.get("VERL_USE_EXTERNAL_MODULES") else (),  # verl imports these modules
            constants=self._constants,
            folder=process_start.folder(),
        )
        return function


def _is_verls_own(function: Any) -> bool:
    inner = function.func if isinstance(function, functools.partial) else function
    if hasattr(inner, "__wrapped__"):  # a function of the user, with the name of verl's
        return False
    return inner is None or f"{inner.__module__}:{inner.__qualname__}" == _VERLS_OWN


def _target_of(config: Any, function: Any) -> tuple[str, dict[str, Any]]:
    """Returns the import path of the reward ``function``, and verl's setting ``reward_kwargs``.

    ``reward_kwargs`` are keyword arguments that override those of each call.
    """
    if _is_verls_own(function):
        return _VERLS_OWN, {}
    custom = OmegaConf.select(config, "reward.custom_reward_function", default=None) or {}
    if not (path := custom.get("path")):  # code of the user has replaced verl's function
        return f"{function.__module__}:{function.__qualname__}", {}
    if path.startswith("pkg://"):
        module = path.removeprefix("pkg://").replace("/", ".")
    else:
        module = str(Path(process_start.folder(), path.removeprefix("file://")).absolute())
    return f"{module}:{custom['name']}", dict(custom.get("reward_kwargs") or {})


def _configured_manager(config: Any, **arguments: Any) -> Any:
    configured = config.reward[SECTION].manager
    original = config.copy()
    section = original.reward.reward_manager
    section.source, section.name, section.module.path = (configured[key] for key in ("source", "name", "path"))
    if configured.source == "importlib":
        manager_class = load_extern_object(module_path=configured.path, object_name=configured.name)
    else:
        manager_class = get_reward_manager_cls("naive" if configured.name == "remote" else configured.name)
    return manager_class(config=original, **arguments)


def _share_of_cores(reward_workers: int) -> int:
    """Returns the number of this node's cores for each reward worker, with ``reward_workers`` spread over all nodes; at least 1."""
    nodes = 1
    if ray.is_initialized():
        nodes = sum(1 for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0)
    return max(1, len(os.sched_getaffinity(0)) // max(1, -(-reward_workers // max(nodes, 1))))


def _prompt_of(data_source: Any, ground_truth: Any, raw_prompt: Any, extra_info: Any) -> str:
    """Returns the key under which time limits of a prompt are learned.

    If the prompt has no text, ``extra_info["index"]`` identifies it.
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
