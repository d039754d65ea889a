"""Adapts the tensor-parallel size of the rollout to the number of preemptions, on verl: ``+rl_accel.tp_replan.enable=True``.

:func:`wire` checks the configuration in the driver process. In the trainer process, :class:`StepObserver` asks the planner for a
size after each logged step. With action=restart, :func:`restart` saves a checkpoint and ends the run. Then
``rl_accel.integrations.ray.restart_note`` notifies the driver process, and ``rl_accel.relaunch`` starts the run with the new size.
"""

import functools
import json
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import OmegaConf

from rl_accel.errors import refuse
from rl_accel.features import TpReplanFlags
from rl_accel.integrations.ray import restart_note
from rl_accel.integrations.verl.engines import counted_engines, engine_of, read_servers
from rl_accel.log import warn_once
from rl_accel.parallel.model_memory import FLAG, TpBounds, read_configuration
from rl_accel.parallel.tp_planner import PlannedRun, TPDecision
from rl_accel.patches.seams import step_observer
from rl_accel.patches.verl import config_intake
from rl_accel.patches.verl.interfaces import Trainer
from rl_accel.patches.verl.verl_run import ROLLOUT, VerlRun
from rl_accel.relaunch import OVERRIDES_VAR
from rl_accel.telemetry.server_counters import Counters

logger = logging.getLogger("rl_accel")

_refuse = functools.partial(refuse, FLAG)
TP_KEY = "actor_rollout_ref.rollout.tensor_model_parallel_size"
_STEP = "training/global_step"


# In the driver


def wire(run: VerlRun, flags: TpReplanFlags) -> None:
    """Checks the configuration of ``run`` and makes the rollout servers count preemptions. Idempotent.

    With the flag ``action=restart``, also arranges that this driver process can ask ``rl-accel run`` for a restart.

    Raises:
        ConfigError: a setting conflicts with this feature, or no tensor-parallel size is possible.
    """
    engine, restarts = engine_of(run.config), flags.action == "restart"
    if engine.read_counters is None:
        wanted = f"one of {', '.join(counted_engines())}"
        _refuse(f"{ROLLOUT}.name", wanted, run.get(f"{ROLLOUT}.name"), "preemptions of others are not known")
    run.require_off(FLAG, f"{ROLLOUT}.disaggregation.enabled")
    if restarts:
        _check_checkpoints(run)
    bounds_of(run.config, flags)
    if engine.counting is not None:
        if restarts:
            run.require_chosen(FLAG, *engine.counting)
        run.set(*engine.counting)
    if restarts and run.in_driver:
        _check_appended(run)
        restart_note.arm()


def _check_appended(run: VerlRun) -> None:
    """Raises ConfigError if a restarted run has the old tensor-parallel size, because its command ignores appended overrides."""
    for override in json.loads(os.environ.get(OVERRIDES_VAR, "[]")):
        key, _, wanted = override.partition("=")
        if key == TP_KEY and wanted != str(run.get(TP_KEY)):
            reason = 'the command ignores what rl-accel run appends to it; a script passes this on by "$@", as its last words'
            _refuse(TP_KEY, wanted, run.get(TP_KEY), reason)


def bounds_of(config: Any, flags: TpReplanFlags) -> TpBounds:
    """Returns the tensor-parallel sizes that are possible for the rollout in verl's ``config``.

    Raises:
        ConfigError: no size is possible, or the configured size is not among the possible sizes.
    """
    from verl.utils.fs import copy_to_local

    run = VerlRun(config)
    gpus, others = run.gpus, run.gpus_besides_tp
    if gpus % others:
        _refuse(f"{ROLLOUT}.data_parallel_size x pipeline_model_parallel_size", f"a divisor of {gpus} GPUs", others)
    is_quantised = bool(run.get(f"{ROLLOUT}.quantization"))
    longest = run.get("data.max_prompt_length", 0) + run.get("data.max_response_length", 0)
    bounds = TpBounds(
        flags,
        gpus // others,
        run.get("trainer.n_gpus_per_node", 1),
        model=read_configuration(str(run.get("actor_rollout_ref.model.path", "")), is_quantised, copy_to_local),
        max_tokens=run.get(f"{ROLLOUT}.max_model_len", 0) or longest or None,
        memory_share=float(run.get(f"{ROLLOUT}.gpu_memory_utilization", 0.9)),
        bytes_per_value=4 if run.get(f"{ROLLOUT}.dtype") == "float32" else 2,
    )
    tp = run.get(TP_KEY, 1)
    if tp not in bounds.sizes:
        _refuse(TP_KEY, f"one of {', '.join(map(str, bounds.sizes))}", tp, bounds.obstacles_of(tp))
    return bounds


def _check_checkpoints(run: VerlRun) -> None:
    for model in ("actor_rollout_ref.actor", "critic"):
        section = f"{model}.checkpoint"
        run.require_off(FLAG, f"{section}.async_save", "a restart needs a checkpoint that is complete")
        for key in (f"{section}.save_contents", f"{section}.load_contents"):
            contents = run.get(key)
            if contents is not None and not {"model", "optimizer", "extra"} <= set(contents):
                _refuse(key, "model, optimizer and extra", list(contents), "a restart would change training")
    if not run.get("trainer.default_local_dir"):
        _refuse("trainer.default_local_dir", "a folder", None)


# In the trainer's process


class StepObserver:
    """Passes each step's metrics to the planner of tensor-parallel sizes, and logs or carries out the planner's decisions.

    ``find_trainer`` returns verl's trainer, or None if this process has none.
    """

    def __init__(self, flags: TpReplanFlags, find_trainer: Callable[[], Trainer | None]) -> None:
        self._flags, self._find_trainer = flags, find_trainer
        self._trainer: Trainer | None = None
        self._counters: Counters
        self._run: PlannedRun

    def __call__(self, _step: int, data: Mapping[str, Any]) -> dict[str, float]:
        """Passes the metrics ``data`` of a logged step to the planner.

        In a step with a validation, preemptions count as unknown, because some may be of the validation.

        Returns:
            The metrics ``tp_replan/tp`` (current size), ``wanted_tp`` (advised size), ``changes`` (number of changes so far), and
            ``preemptions`` if known. {} without ``training/global_step`` in ``data`` (a validation only), or without a trainer.
        """
        trainer = self._find_trainer()
        if trainer is None:
            return {}
        if trainer is not self._trainer:
            bounds, folder = bounds_of(trainer.config, self._flags), trainer.config.trainer.get("default_local_dir")
            self._counters = Counters()
            self._run = PlannedRun(bounds, self._flags.max_changes, folder)
            self._trainer = trainer
        servers = trainer.llm_server_manager.server_addresses
        preemptions = self._counters.take(read_servers(engine_of(trainer.config), servers))
        if _STEP not in data:
            return {}
        step, tp = int(data[_STEP]), int(OmegaConf.select(trainer.config, TP_KEY))
        if preemptions and any(key.startswith("val-") for key in data):
            preemptions = None  # the number includes preemptions of the validation in this step
        seconds, tokens = float(data.get("timing_s/gen") or 0.0), _tokens_of(data)
        if not (seconds and tokens):
            message = "rl-accel: tp_replan decides nothing: step %d has no timing_s/gen or no count of tokens"
            warn_once(message, message, step)
        change, numbers = self._run.take_in(step, data, tp=tp, preemptions=preemptions, seconds=seconds, tokens=tokens)
        if change is not None:
            kind = "advice" if self._flags.action == "advise" else "decision"
            logger.warning("rl-accel: tp_replan: %s after step %d: %s", kind, step, change.reason)
            if self._flags.action == "restart":
                restart(trainer, step, change)
        return {f"tp_replan/{name}": value for name, value in numbers.items()}


def _tokens_of(data: Mapping[str, Any]) -> float:
    """Returns the number of response tokens in the batch of a step, from the step's metrics ``data``; 0 if unknown."""
    both, response = data.get("perf/total_num_tokens"), data.get("response_length/mean")
    prompt = data.get("prompt_length/mean")
    if not both or not response or prompt is None:
        return 0.0
    return float(both) * float(response) / (float(response) + float(prompt))


def restart(trainer: Trainer, step: int, decision: TPDecision) -> None:
    """Saves a checkpoint and ends the run after ``step``, so that ``rl-accel run`` resumes it with another tensor-parallel size.

    Must be called when the metrics of ``step`` are logged. If ``step`` is the last step or saving fails, only logs a warning.
    """
    if step >= min(trainer.total_training_steps, trainer.steps_per_epoch * trainer.config.trainer.total_epochs):
        logger.warning("rl-accel: tp_replan: step %d is the last, nothing is restarted", step)
        return
    overrides = _overrides(trainer, decision.tp)
    try:
        _save(trainer, step)
        restart_note.publish({"step": step, "overrides": overrides, "reason": decision.reason})
    except Exception:  # the storage or a worker failed; training goes on at the old size
        problem = f"step {step} could not be saved; going on at the old size"
        logger.warning("rl-accel: tp_replan: no restart, %s", problem, exc_info=True)
        return
    trainer.total_training_steps = step  # verl's V1 trainers read this number before every step, and end normally
    words = f"this launch ends after step {step}, the next one: {' '.join(overrides)}"
    logger.warning("rl-accel: tp_replan: step %d is saved; %s", step, words)


def _overrides(trainer: Trainer, tp: int) -> list[str]:
    """Returns the overrides of verl's configuration that resume this run with the tensor-parallel size ``tp``."""
    # Named, because the name of the folder may depend on the time of the launch.
    folder = os.path.abspath(trainer.config.trainer.default_local_dir).replace("\\", "\\\\").replace("'", "\\'")
    return [
        f"{TP_KEY}={tp}",
        "trainer.resume_mode=auto",
        f"trainer.default_local_dir='{folder}'",
        "trainer.val_before_train=False",
    ]


def _save(trainer: Trainer, step: int) -> None:
    every = trainer.config.trainer.save_freq
    if every > 0 and step % every == 0:
        return  # the trainer has saved this step
    trainer.checkpoint_manager.sleep_replicas()  # as verl does, because saving may need the memory of the replicas
    try:
        trainer._save_checkpoint()
    except BaseException:
        trainer.checkpoint_manager.update_weights(trainer.global_steps)  # wakes the replicas, as after each step
        raise


SWITCHES = (step_observer("tp_replan", lambda flags: StepObserver(flags, config_intake.trainer)),)
