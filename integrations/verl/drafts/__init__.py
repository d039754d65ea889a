"""Drafts on verl with vLLM: ``+rl_accel.drafts.enable=True``.

:func:`wire` has vLLM draft with :class:`~rl_accel.drafts.drafter.Drafter`, by verl's ``engine_kwargs``, and sends the responses of
a prompt to the same replica, by verl's ``router_config_path``. In the trainer process :class:`Exchange` gives every replica what
the others have finished, and makes numbers of what the drafters count.
"""

import functools
import logging
import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict

from rl_accel.errors import refuse
from rl_accel.features import DraftsFlags
from rl_accel.patches.seams import Registration, Seams
from rl_accel.patches.verl import config_intake
from rl_accel.telemetry import metrics

logger = logging.getLogger("rl_accel")

SEAMS: Seams = {
    "verl.workers.rollout.router:GlobalRequestLoadBalancer.acquire_server": ("self", "request_id"),
    "verl.workers.rollout.router:GlobalRequestLoadBalancer.require_acquire_fields": ("self",),
    "verl.workers.rollout.llm_server:LLMServerManager.get_replicas": ("self",),
}
"""verl 0.9.1 has them."""
TRIED = ("0.29.0",)
"""Versions of vLLM. Its interface for drafters has no promise, and 0.30.0 fails with any speculative decoding on a CPU."""
ROUTER = Path(__file__).with_name("router.yaml")
CHECKED_STEPS = 3
LARGEST_DIFFERENCE = 0.05
"""Mean difference between the probabilities of engine and trainer above which the first steps are wrong; bfloat16 gives 0.01."""
_FLAG = "rl_accel.drafts"
_ROLLOUT = "actor_rollout_ref.rollout"
_VLLM = f"{_ROLLOUT}.engine_kwargs.vllm"
_WORKER = "rl_accel.integrations.verl.drafts.worker.DraftsWorkerExtension"
_refuse = functools.partial(refuse, _FLAG)


# In the driver


def wire(config: Any, flags: DraftsFlags) -> None:
    """Have the rollout of ``config`` (verl's, changed in place) draft. Idempotent.

    Raises:
        ConfigError: something in ``config`` cannot go together with drafts.
    """

    def get(key: str, default: Any = None) -> Any:
        return OmegaConf.select(config, key, default=default)

    if not get("trainer.use_v1", False):
        _refuse("trainer.use_v1", True, get("trainer.use_v1"))
    if get(f"{_ROLLOUT}.name") != "vllm":
        _refuse(f"{_ROLLOUT}.name", "vllm", get(f"{_ROLLOUT}.name"), "no other engine takes a drafter of ours")
    version = _vllm_version()
    if version not in TRIED:
        _refuse("vLLM", " or ".join(TRIED), version, "others were not tried")
    if get(f"{_ROLLOUT}.mtp.enable", False) and get(f"{_ROLLOUT}.mtp.enable_rollout", False):
        _refuse(f"{_ROLLOUT}.mtp.enable_rollout", False, True, "an engine has one drafter")
    settings = {name: value for name, value in asdict(flags).items() if name != "enable"}
    ours: dict[str, Any] = {
        f"{_VLLM}.speculative_config": {
            "method": "custom_class",
            "model": "rl_accel.drafts.drafter.Drafter",
            "num_speculative_tokens": flags.max_tokens,
        },
        f"{_VLLM}.worker_extension_cls": _WORKER,
        f"{_VLLM}.additional_config": {"rl_accel_drafts": settings},
        f"{_ROLLOUT}.router_config_path": str(ROUTER),
    }
    for key, value in ours.items():
        found = get(key)
        found = OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
        if found not in (None, value):
            _refuse(key, None, found, "drafts set it")
    with open_dict(config):
        for key, value in ours.items():
            OmegaConf.update(config, key, value, force_add=True)


def refuse_unwired(config: Any) -> None:
    """Stop a trainer whose rollout nobody has told to draft.

    Raises:
        ConfigError: its driver has not called ``validate_config``.
    """
    found = OmegaConf.select(config, f"{_VLLM}.worker_extension_cls", default=None)
    if found != _WORKER:
        reason = "verl's validate_config sets it, which the driver must call before the trainer starts"
        _refuse(f"{_VLLM}.worker_extension_cls", _WORKER, found, reason)


def _vllm_version() -> str | None:
    try:
        return metadata.version("vllm").partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


# In the trainer process


class Exchange:
    """Observes the steps of a run. After each, in a thread, replicas tell each other what they have finished.

    Its numbers are those of the last exchange that is over: a step late, and nobody waits.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._finished: dict[Any, list[tuple[bytes, bytes]]] = {}
        self._counted: dict[Any, Counter[str]] = {}
        self._new: Counter[str] = Counter()
        self._steps = 0

    def __call__(self, _step: int, logged: Mapping[str, Any]) -> dict[str, float]:
        """Return the numbers by name; {} for what is not a step of training.

        Raises:
            StopTraining: drafted responses of the first steps have other probabilities than the trainer finds.
        """
        trainer = config_intake.trainer()
        if trainer is None or "timing_s/gen" not in logged:
            return {}
        self._steps += 1
        if self._steps <= CHECKED_STEPS:
            check(logged)
        if self._thread is not None and self._thread.is_alive():
            return {}
        new, self._new = self._new, Counter()
        servers = [replica.server_handle for replica in trainer.llm_server_manager.get_replicas()]
        self._thread = threading.Thread(target=self._exchange, args=(servers,), daemon=True)
        self._thread.start()
        return numbers(new)

    def _exchange(self, servers: list[Any]) -> None:
        import ray

        calls = {}
        for server in servers:
            others = [r for other, finished in self._finished.items() if other != server for r in finished]
            calls[server] = server.collective_rpc.remote(method="exchange_drafts", args=(others,))
        self._finished.clear()
        for server, call in calls.items():
            try:
                finished, counters = ray.get(call)[0]
            except ray.exceptions.RayError as error:
                logger.warning("rl-accel: drafts: a rollout server does not answer: %s", str(error).splitlines()[-1])
                continue
            if len(servers) > 1:
                self._finished[server] = finished
            counted = Counter(counters)
            self._new.update(counted - self._counted.get(server, Counter()))
            self._counted[server] = counted


def check(logged: Mapping[str, Any]) -> None:
    """Compare the engine's probabilities of sampled tokens with the trainer's, if the run logs them.

    Raises:
        StopTraining: they are too far apart, or not numbers.
    """
    difference = logged.get("training/rollout_probs_diff_mean")
    if difference is not None and not difference <= LARGEST_DIFFERENCE:
        raise metrics.StopTraining(
            f"{_FLAG}: the engine's probabilities of its tokens differ from the trainer's by {difference:.3g} on average, "
            f"wanted at most {LARGEST_DIFFERENCE:g}; train without drafts, and report it with the version of vLLM"
        )


def numbers(counted: Mapping[str, float]) -> dict[str, float]:
    """Return ``drafts/<name>`` of what drafters counted, see :meth:`~rl_accel.drafts.drafter.Drafter.counters`."""
    found = {name: counted.get(name, 0) for name in ("drafted", "accepted", "stopped")}
    found |= {name: value for name, value in counted.items() if name.startswith(("drafted_", "accepted_"))}
    steps = {name: value for name, value in counted.items() if name.startswith("row_steps_from_")}
    for name, value in steps.items():
        found[name.replace("row_steps", "tokens_a_step")] = counted[name.replace("row_steps", "tokens")] / value
    if steps:
        found["tokens_a_step"] = counted["tokens"] / math.fsum(steps.values())
    if counted.get("drafted"):
        found["acceptance"] = counted["accepted"] / counted["drafted"]
    return {f"drafts/{name}": float(value) for name, value in found.items()}


SWITCHES = (
    Registration(
        name="verl.drafts.exchange",
        target="verl.utils.tracking:Tracking",
        register=lambda _flags: metrics.observe("drafts", Exchange()),
        unregister=lambda: metrics.observe("drafts", None),
        owner=__name__,
        find=lambda: metrics.observer("drafts"),
    ),
)
