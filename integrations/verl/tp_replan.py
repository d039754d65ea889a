"""Adapts the tensor-parallel size of the rollout to the number of preemptions, on verl: ``+rl_accel.tp_replan.enable=True``.

:func:`wire` checks the configuration in the driver process. In the trainer process, :class:`StepObserver` asks the planner for a
size after each logged step. With action=restart, :func:`restart` saves a checkpoint and ends the run, and ``rl-accel run``
(``rl_accel.relaunch``) starts the run with the new size.
"""

import functools
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

from rl_accel.errors import refuse
from rl_accel.features import TpReplanFlags
from rl_accel.files import write_atomically
from rl_accel.integrations.verl.engines import counted_engines, engine_of, read_servers
from rl_accel.parallel.tp_planner import TpChange, TpPlanner
from rl_accel.parallel.tp_sizes import FLAG, possible_sizes, read_configuration
from rl_accel.patches.seams import step_observer
from rl_accel.patches.verl import config_intake
from rl_accel.patches.verl.interfaces import Trainer
from rl_accel.patches.verl.verl_run import ROLLOUT, VerlRun
from rl_accel.relaunch import NOTE, OVERRIDES_VAR, expect
from rl_accel.rollout.round_driver import METRICS_PREFIX as TAIL_BATCHING
from rl_accel.rollout.tail_decisions import RoundKind
from rl_accel.telemetry.server_counters import Counters

logger = logging.getLogger("rl_accel")

_refuse = functools.partial(refuse, FLAG)
TP_KEY = f"{ROLLOUT}.tensor_model_parallel_size"
_STEP = "training/global_step"


# In the driver


def wire(run: VerlRun, flags: TpReplanFlags) -> None:
    """Checks the configuration of ``run`` and makes the rollout servers count preemptions. Idempotent.

    With the flag ``action=restart``, also tells ``rl-accel run`` where the trainer may ask for a restart.

    Raises:
        ConfigError: a setting conflicts with this feature, or no tensor-parallel size is possible.
    """
    engine = engine_of(run.config)
    if engine.read_counters is None:
        wanted = f"one of {', '.join(counted_engines())}"
        _refuse(f"{ROLLOUT}.name", wanted, run.get(f"{ROLLOUT}.name"), "preemptions of others are not known")
    run.require_off(FLAG, f"{ROLLOUT}.disaggregation.enabled")
    restarts = flags.action == "restart"
    if restarts:
        _check_checkpoints(run)
    sizes_of(run.config, flags)
    if engine.counting is not None:
        if restarts:
            run.require_chosen(FLAG, *engine.counting)
        run.set(*engine.counting)
    if restarts and run.in_driver:
        _check_appended(run)
        expect(Path(run.get("trainer.default_local_dir")).absolute() / NOTE)


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


def _check_appended(run: VerlRun) -> None:
    """Raises ConfigError if a restarted run has the old tensor-parallel size, because its command ignores appended overrides."""
    for override in json.loads(os.environ.get(OVERRIDES_VAR, "[]")):
        key, _, wanted = override.partition("=")
        if key == TP_KEY and wanted != str(run.get(TP_KEY)):
            reason = 'the command ignores what rl-accel run appends to it; a script passes this on by "$@", as its last words'
            _refuse(TP_KEY, wanted, run.get(TP_KEY), reason)


def sizes_of(config: Any, flags: TpReplanFlags) -> list[int]:
    """Returns the tensor-parallel sizes that are possible for the rollout in verl's ``config``, ascending.

    Raises:
        ConfigError: no size is possible, or the configured size is not among the possible sizes.
    """
    from verl.utils.fs import copy_to_local

    run = VerlRun(config)
    gpus = run.gpus
    others = run.dp_times_pp
    if gpus % others:
        _refuse(f"{ROLLOUT}.data_parallel_size x pipeline_model_parallel_size", f"a divisor of {gpus} GPUs", others)
    sizes = possible_sizes(
        flags,
        world_size=gpus // others,
        gpus_per_node=run.get("trainer.n_gpus_per_node", 1),
        model=read_configuration(str(run.get("actor_rollout_ref.model.path", "")), copy_to_local),
    )
    tp = run.get(TP_KEY, 1)
    possible = [size for size, reasons in sizes.items() if not reasons]
    if tp not in possible:
        _refuse(TP_KEY, f"one of {', '.join(map(str, possible))}", tp, sizes.get(tp, f"there are {len(sizes)} GPUs"))
    return possible


# In the trainer's process


class StepObserver:
    """Passes each step's preemptions to the planner of tensor-parallel sizes, and logs or carries out the planner's decisions.

    ``find_trainer`` returns verl's trainer, or None if this process has none.
    """

    def __init__(self, flags: TpReplanFlags, find_trainer: Callable[[], Trainer | None]) -> None:
        self._flags = flags
        self._find_trainer = find_trainer
        self._trainer: Trainer | None = None
        self._counters: Counters
        self._planner: TpPlanner

    def __call__(self, _step: int, data: Mapping[str, Any]) -> dict[str, float]:
        """Passes the metrics ``data`` of a logged step to the planner.

        In a step with a validation, preemptions count as unknown, because some may be of the validation.

        Returns:
            The metrics ``tp_replan/tp`` (current size), ``wanted_tp`` (advised size) and, if known, ``preemptions``. {} without
            ``training/global_step`` in ``data`` (a validation only), or without a trainer.
        """
        trainer = self._find_trainer()
        if trainer is None:
            return {}
        tp = int(VerlRun(trainer.config).get(TP_KEY))
        if trainer is not self._trainer:
            self._counters = Counters()
            self._planner = TpPlanner(sizes_of(trainer.config, self._flags), tp)
            self._trainer = trainer
        servers = trainer.llm_server_manager.server_addresses
        preemptions = self._counters.take(read_servers(engine_of(trainer.config), servers))
        if _STEP not in data:
            return {}
        if preemptions and any(key.startswith("val-") for key in data):
            preemptions = None
        numbers = {"tp_replan/tp": float(tp), "tp_replan/wanted_tp": float(tp)}
        if preemptions is not None:
            numbers["tp_replan/preemptions"] = float(preemptions)
        change = self._planner.step(_kind_of(data), preemptions)
        if change is not None:
            numbers["tp_replan/wanted_tp"] = float(change.tp)
            step = int(data[_STEP])
            logger.warning("rl-accel: tp_replan: %s after step %d: %s", self._flags.action, step, change.reason)
            if self._flags.action == "restart":
                restart(trainer, step, change)
        return numbers


def _kind_of(data: Mapping[str, Any]) -> str:
    """Returns the kind of round of tail batching in a step, from the metrics ``data`` of the step; "all" without tail batching."""
    return next((kind for kind in get_args(RoundKind) if data.get(f"{TAIL_BATCHING}{kind}_round")), "all")


def restart(trainer: Trainer, step: int, change: TpChange) -> None:
    """Saves a checkpoint and ends the run after ``step``, so that ``rl-accel run`` resumes it with another tensor-parallel size.

    Must be called when the metrics of ``step`` are logged. If ``step`` is the last step or saving fails, only logs a warning.
    """
    if step >= min(trainer.total_training_steps, trainer.steps_per_epoch * trainer.config.trainer.total_epochs):
        logger.warning("rl-accel: tp_replan: step %d is the last, nothing is restarted", step)
        return
    folder = os.path.abspath(trainer.config.trainer.default_local_dir)
    overrides = _overrides(folder, change)
    note = {"step": step, "overrides": overrides, "reason": change.reason}
    try:
        _save(trainer, step)
        write_atomically(Path(folder) / NOTE, json.dumps(note))
    except Exception:  # the storage or a worker failed; training goes on at the old size
        problem = f"step {step} could not be saved; going on at the old size"
        logger.warning("rl-accel: tp_replan: no restart, %s", problem, exc_info=True)
        return
    trainer.total_training_steps = step  # verl's V1 trainers read this number before every step, and end normally
    following = f"this launch ends after step {step}, the next one: {' '.join(overrides)}"
    logger.warning("rl-accel: tp_replan: step %d is saved; %s", step, following)


def _overrides(folder: str, change: TpChange) -> list[str]:
    """Returns the overrides of verl's configuration that resume this run with another tensor-parallel size.

    They name the ``folder`` of the checkpoints, because its name may depend on the time of the launch.
    """
    quoted = folder.replace("\\", "\\\\").replace("'", "\\'")
    overrides = [
        f"{TP_KEY}={change.tp}",
        "trainer.resume_mode=auto",
        f"trainer.default_local_dir='{quoted}'",
        "trainer.val_before_train=False",
    ]
    if change.min_tp > 1:
        overrides.append(f"++{FLAG}.min_tp={change.min_tp}")
    return overrides


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
