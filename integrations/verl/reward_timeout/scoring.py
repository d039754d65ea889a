"""The function that scores in place of the user's: finds out what to run and how, and always returns a score."""

import functools
import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rl_accel.integrations.verl.reward_timeout import prime_code
from rl_accel.integrations.verl.reward_timeout.functions import AsyncFunction, Call, SyncFunction
from rl_accel.integrations.verl.reward_timeout.fusion import Fusion
from rl_accel.integrations.verl.reward_timeout.outcome import Substitutes
from rl_accel.integrations.verl.reward_timeout.prime_code import PrimeCode
from rl_accel.integrations.verl.reward_timeout.wiring import Wired
from rl_accel.reward.anchor_store import Replica
from rl_accel.reward.graders import Graders
from rl_accel.reward.limited_executor import LimitedExecutor
from rl_accel.reward.program import Limits

logger = logging.getLogger("rl_accel")

CALL: ContextVar[Call | None] = ContextVar("rl_accel_reward_call", default=None)
"""Set by the reward manager for the response that it has scored."""

ASYNC_SLOTS = 256
"""Async functions and requests to a remote sandbox use no cores; so many go on at once in each reward process."""

_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
_DEFAULT = "verl.utils.reward_score:default_compute_score"


class Scorer:
    """Scores within limits, as ``compute_score`` would without any.

    A response whose execution was stopped gets ``timeout_score``. So does one whose function raises or returns None, NaN or
    anything else that is no score: verl's own managers let the exception fail the response, and with it the whole prompt. That is
    counted as ``errors`` (``eval_errors`` in a validation), and the first of each kind is logged.

    Args:
        compute_score: what verl's ``load_reward_manager`` hands to a reward manager.
        config: verl's.
        wired: our part of it.
        replica: anchors and counts.
        slots: executions at once.
    """

    def __init__(
        self, compute_score: Callable[..., Any] | None, config: Any, wired: Wired, replica: Replica, slots: int
    ) -> None:
        self._compute_score = compute_score
        self._config = config
        self._flags = wired.flags
        self._replica = replica
        limits = Limits(memory=wired.flags.memory_mb << 20)
        self._local = LimitedExecutor(replica, slots, limits)
        self._remote = LimitedExecutor(replica, ASYNC_SLOTS, limits)
        self._slots = slots
        self._substitutes = Substitutes()
        self._warned: set[str] = set()
        self._graders: list[Graders] = []
        self._deaths = 0

    async def score(self, *args: Any, **kwargs: Any) -> Any:
        """Return what verl's reward managers expect of a reward function: a number, or a dict with a ``score``.

        Raises:
            SandboxError: the function cannot be imported in a process of its own.
        """
        arguments = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
        data_source = str(arguments.get("data_source"))
        call = CALL.get()
        if call is None:
            call = Call(prompt_key(data_source, arguments.get("ground_truth"), None, arguments.get("extra_info")), True)
        outcome = await self._runner(data_source).run(call, arguments)
        deaths = sum(graders.deaths for graders in self._graders)
        self._replica.count("workers_replaced", deaths - self._deaths)
        self._deaths = deaths
        trouble = outcome.trouble()
        if not trouble:
            self._substitutes.learn(data_source, outcome.value)
            return outcome.value
        if not outcome.stopped:
            self._replica.count("errors" if call.teach else "eval_errors")
            self._warn(trouble)
        elif not outcome.stopped.startswith("timeout"):
            self._warn(f"its process was stopped ({outcome.stopped})")
        return self._substitutes.make(data_source, self._flags.timeout_score)

    async def close(self) -> None:
        """End all processes. What is being scored is stopped."""
        graders, self._graders = self._graders, []
        for pool in graders:
            await pool.close()

    def _runner(self, data_source: str) -> Any:
        function = self._compute_score
        if function is not None and inspect.iscoroutinefunction(function):
            return self._custom_async
        if not self._is_default:
            return self._custom_sync
        if data_source not in prime_code.DATA_SOURCES:
            return self._default
        return self._fusion if self._fusion_options.get("sandbox_fusion_url") else self._prime_code

    @property
    def _is_default(self) -> bool:
        function = self._compute_score
        inner = function.func if isinstance(function, functools.partial) else function
        return inner is None or f"{inner.__module__}:{inner.__qualname__}" == _DEFAULT

    @property
    def _fusion_options(self) -> dict[str, Any]:
        return dict(self._compute_score.keywords) if isinstance(self._compute_score, functools.partial) else {}

    @functools.cached_property
    def _custom_async(self) -> AsyncFunction:
        assert self._compute_score is not None
        return AsyncFunction(self._remote, self._compute_score, self._flags.correct_above)

    @functools.cached_property
    def _custom_sync(self) -> SyncFunction:
        custom = OmegaConf.select(self._config, "reward.custom_reward_function", default=None) or {}
        if custom.get("path"):
            target, fixed = target_of(custom["path"], custom["name"]), dict(custom.get("reward_kwargs") or {})
        else:  # a manager of the user's brings a function of its own
            function: Any = self._compute_score
            target, fixed = f"{function.__module__}:{function.__qualname__}", {}
        return self._sync(target, fixed)

    @functools.cached_property
    def _default(self) -> SyncFunction:
        return self._sync(_DEFAULT, {})

    @functools.cached_property
    def _prime_code(self) -> PrimeCode:
        self._graders.append(prime_code.graders(self._slots))
        return PrimeCode(self._local, self._graders[-1], self._flags.early_stop)

    @functools.cached_property
    def _fusion(self) -> Fusion:
        return Fusion(self._remote, self._fusion_options, self._flags.early_stop, threads=64)

    def _sync(self, target: str, fixed: dict[str, Any]) -> SyncFunction:
        self._graders.append(Graders(target, self._slots))
        return SyncFunction(self._local, self._graders[-1], self._flags.correct_above, fixed)

    def _warn(self, trouble: str) -> None:
        kind = trouble.split(":")[0]
        if kind not in self._warned and len(self._warned) < 100:
            self._warned.add(kind)
            logger.warning(
                "rl-accel: the reward function gave no score: %s. Such responses get %g, and are counted; this is said once",
                trouble,
                self._flags.timeout_score,
            )


def target_of(path: str, name: str) -> str:
    """Return verl's ``custom_reward_function.path`` and ``name`` as a target of :class:`Graders`."""
    if path.startswith("pkg://"):
        return f"{path.removeprefix('pkg://').replace('/', '.')}:{name}"
    return f"{Path(path.removeprefix('file://')).absolute()}:{name}"


def prompt_key(data_source: Any, ground_truth: Any, raw_prompt: Any, extra_info: Any) -> str:
    """Return what names a prompt in every epoch, run and process: a digest of its data source, ground truth and text.

    Without the prompt's messages the ``index`` of ``extra_info`` tells prompts with the same ground truth apart.
    """
    texts = list(_texts(raw_prompt))
    index = None if texts else (extra_info or {}).get("index")
    told = json.dumps([str(data_source), ground_truth, texts, index], default=repr, sort_keys=True)
    return hashlib.blake2b(told.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _texts(messages: Any) -> Iterable[str]:
    for message in messages if messages is not None and not isinstance(messages, str) else [messages]:
        content = message.get("content") if isinstance(message, dict) else message
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):  # not images, which have no text that stays the same
                yield text
