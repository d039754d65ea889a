"""Drafts (speculative decoding from other responses) on verl with vLLM: ``+rl_accel.drafts.enable=True``.

:func:`wire` selects :class:`~rl_accel.drafts.drafter.Drafter` in vLLM through verl's ``engine_kwargs``, and a router through verl's
``router_config_path``. The router sends the responses of a prompt to the same replica. In the trainer process, :class:`Exchange`
sends every replica the finished responses of the other replicas, and turns the drafters' counts into metrics.
"""

import functools
import io
import logging
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from rl_accel.drafts.drafter import SETTINGS
from rl_accel.drafts.index import SOURCES
from rl_accel.errors import first_line, refuse
from rl_accel.features import DraftsFlags
from rl_accel.files import write_atomically
from rl_accel.integrations.verl import engines
from rl_accel.patches.seams import step_observer
from rl_accel.patches.verl import config_intake
from rl_accel.patches.verl.interfaces import Trainer
from rl_accel.patches.verl.verl_run import ROLLOUT, ROUTER_KEY, VerlRun
from rl_accel.telemetry import metrics

logger = logging.getLogger("rl_accel")

TRIED = ("0.24.0", "0.29.0")
"""Tested versions of vLLM, oldest first."""
NEWEST = "0.33.0"
"""Newest version of vLLM whose source has the drafter interface of 0.29.0. Versions above are refused, because the interface is
unstable."""
ROUTER = Path(__file__).with_name("router.yaml")
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Full name of vLLM's executor that runs one device in the engine's own process. With verl's choice ``mp``, each decoding step
would ask another process for drafts."""
SIZES = ("tensor_model_parallel", "pipeline_model_parallel", "data_parallel")
HISTORY = "drafts.pt"
"""Name of the file in a checkpoint folder with finished responses, from which a resumed run can draft."""
SAVING_S = 60.0
"""Maximum seconds to wait for a server's finished responses before :data:`HISTORY` is written without them. A server
answers between two steps of its engine; at double, a dead one holds a checkpoint up for two minutes."""
CHECKED_STEPS = 3
LARGEST_DIFFERENCE = 0.05
"""Maximum mean difference between the engine's and the trainer's probabilities (0 to 1) of the sampled tokens, checked in the first
CHECKED_STEPS steps of a run. With bfloat16, 0.01 is usual. A difference above the maximum shows that the engine's speculative
decoding is wrong."""
_FLAG = "rl_accel.drafts"
_VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
_WORKER = "rl_accel.integrations.verl.drafts.worker.DraftsWorkerExtension"
_refuse = functools.partial(refuse, _FLAG)


# In the driver


def wire(run: VerlRun, flags: DraftsFlags) -> None:
    """Sets up drafts (speculative decoding from other responses) in the configuration of the verl run ``run``. Idempotent.

    Raises:
        ConfigError: a setting conflicts with drafts, or vLLM is absent, or older or newer than the tested versions.
    """
    get = run.get
    version = _vllm_version()
    if reason := engines.version_problem("vLLM", version, TRIED, NEWEST):
        _refuse("vLLM", f"{TRIED[0]} to {NEWEST}", version, f"vLLM {reason}")
    if get(f"{ROLLOUT}.mtp.enable"):
        run.require_off(_FLAG, f"{ROLLOUT}.mtp.enable_rollout", "an engine has one drafter")
    settings: dict[str, Any] = {
        f"{_VLLM}.speculative_config": {
            "method": "custom_class",
            "model": "rl_accel.drafts.drafter.Drafter",
            "num_speculative_tokens": flags.max_tokens,
        },
        f"{_VLLM}.worker_extension_cls": _WORKER,
        f"{_VLLM}.additional_config": {SETTINGS: asdict(flags)},
        ROUTER_KEY: str(ROUTER),
    }
    if all(get(f"{ROLLOUT}.{size}_size", 1) == 1 for size in SIZES):
        backend = f"{_VLLM}.distributed_executor_backend"
        settings[backend] = get(backend) or ONE_PROCESS  # an executor that the user has chosen is fine, too
    for key, value in settings.items():
        present = get(key)
        present = OmegaConf.to_container(present) if OmegaConf.is_config(present) else present
        if present not in (None, value):
            _refuse(key, None, present, "drafts set it")
        run.set(key, value)


def check_engine() -> list[tuple[str, str, str]]:
    """Checks the version and the speculative decoding of the installed vLLM, for ``rl-accel doctor``.

    Returns triples: verdict ("works" or "cannot"), what was checked, and reason.
    """
    version = _vllm_version()
    if version is None:  # the CPU build has another name
        return _find_problems()
    if reason := engines.version_problem("vLLM", version, TRIED, NEWEST):
        return [("cannot", f"vllm {version}", reason)]
    if version not in TRIED:
        return [("works", f"vllm {version}", "has the interface; not run here"), *_find_problems()]
    return _find_problems()


def _find_problems() -> list[tuple[str, str, str]]:
    try:
        from vllm import _custom_ops  # noqa: F401 (registers what the kernel calls)
        from vllm.utils.cpu_triton_utils import _expand_kernel_impl as expand
    except ImportError:
        return []
    temperatures = torch.ones(2)
    if hasattr(torch.ops._C, "expand_kernel_impl"):  # a CPU build
        temperatures.zero_()
        expand(temperatures, torch.tensor([0.7]), torch.tensor([2]), 0, 1)
    reason = "vLLM divides logits of drafted tokens by uninitialised memory; the CPU platform repairs it"
    return [] if temperatures.all() else [("cannot", "vllm.speculative_config", reason)]


def _vllm_version() -> str | None:
    try:
        return metadata.version("vllm").partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


# In the trainer process


class Exchange:
    """Sends every rollout replica, after each training step, the responses that the other replicas have finished.

    Each server answers with its finished responses and the drafter's counters. The answers are collected after the next step, so
    that no step waits; metrics are logged one step late. The trainer process waits for answers only to save :data:`HISTORY`.
    """

    def __init__(self, flags: DraftsFlags) -> None:
        self._flags = flags
        self._steps = 0
        self._calls: dict[Any, Any] = {}  # pending call, by server
        self._finished: dict[Any, list[bytes]] = {}
        self._history: deque[bytes] = deque()

    def __call__(self, step: int, logged: Mapping[str, Any]) -> dict[str, float]:
        """Starts an exchange and returns the metrics of the previous one; {} if verl logs something other than a training step.

        ``logged`` are the metrics that verl logs, by name. In the first CHECKED_STEPS steps, raises StopTraining as :func:`check`.
        """
        trainer: Trainer | None = config_intake.trainer()
        if trainer is None or "timing_s/gen" not in logged:
            return {}
        self._steps += 1
        if self._steps <= CHECKED_STEPS:
            check(logged)
        config = trainer.config.trainer
        saving = self._flags.save
        saved = Path(config.default_local_dir, f"global_step_{step}")
        if saving and self._steps == 1:
            before = saved.with_name(f"global_step_{step - 1}")
            file = Path(config.resume_from_path if config.resume_mode == "resume_path" else before, HISTORY)
            if file.is_file():
                self._history.extend(torch.load(file, weights_only=True))
                self._finished[file] = list(self._history)  # the key is no server, so all servers get them
                logger.info("rl-accel: drafts: %d earlier responses from %s", len(self._history), file)
        counted = self._take_answers(0.0)
        for replica in trainer.llm_server_manager.get_replicas():
            if (server := replica.server_handle) not in self._calls:
                others = [r for other, finished in self._finished.items() if other != server for r in finished]
                self._calls[server] = server.collective_rpc.remote(method="exchange_drafts", args=(others,))
        self._finished.clear()
        if saving and saved.is_dir():
            counted += self._take_answers(SAVING_S)
            torch.save(list(self._history), content := io.BytesIO())
            write_atomically(saved / HISTORY, content.getvalue())
        return numbers(counted)

    def _take_answers(self, wait_s: float) -> Counter[str]:
        """Collects the finished responses of all servers that have answered. Returns their drafters' counters, summed by name.

        Waits up to ``wait_s`` seconds for the answer of each server.
        """
        import ray

        counted: Counter[str] = Counter()
        for server, call in list(self._calls.items()):
            if not ray.wait([call], timeout=wait_s)[0]:
                continue
            del self._calls[server]
            try:
                self._finished[server], counts = ray.get(call)[0]
            except ray.exceptions.RayError as error:
                logger.warning("rl-accel: drafts: a rollout server does not answer: %s", first_line(error))
                continue
            counted += counts
            if self._flags.save:
                self._history.extend(self._finished[server])
        size = sum(map(len, self._history))
        while size > self._flags.memory_mb * 2**18:  # as many tokens as an engine's index of memory_mb MiB holds
            size -= len(self._history.popleft())
        return counted


def check(logged: Mapping[str, Any]) -> None:
    """Raises StopTraining if engine and trainer disagree on the probabilities of sampled tokens, see :data:`LARGEST_DIFFERENCE`.

    ``logged`` are verl's metrics, by name. Checks nothing if the mean difference is not among them.
    """
    difference = logged.get("training/rollout_probs_diff_mean")
    if difference is not None and not difference <= LARGEST_DIFFERENCE:
        raise metrics.StopTraining(
            f"{_FLAG}: the engine's probabilities of its tokens differ from the trainer's by {difference:.3g} on average, "
            f"wanted at most {LARGEST_DIFFERENCE:g}; train without drafts, and report it with the version of vLLM"
        )


def numbers(counted: Counter[str]) -> dict[str, float]:
    """Returns the metrics ``drafts/<name>``, such as ``drafts/acceptance`` (accepted share of the drafted tokens).

    ``counted`` maps the names in :meth:`~rl_accel.drafts.drafter.Drafter.take_counts` to sums over all drafters.
    """
    values: dict[str, float] = {"stopped": counted["stopped"]}
    for source in ("", *(f"_{name}" for name in SOURCES)):
        drafted = counted[f"drafted{source}"]
        accepted = counted[f"accepted{source}"]
        values[f"drafted{source}"] = drafted
        values[f"accepted{source}"] = accepted
        if drafted:
            values[f"acceptance{source}"] = accepted / drafted
    steps = {name: value for name, value in counted.items() if name.startswith("row_steps_from_")}
    for name, value in steps.items():
        values[name.replace("row_steps", "tokens_a_step")] = counted[name.replace("row_steps", "tokens")] / value
    if steps:
        values["tokens_a_step"] = counted["tokens"] / sum(steps.values())
        values["tokens_an_engine_step"] = counted["tokens"] / counted["steps"]
    return {f"drafts/{name}": float(value) for name, value in values.items()}


SWITCHES = (step_observer("drafts", Exchange),)
