"""Old log-probabilities from the actor update itself, in verl's trainers, for a batch that gets one optimizer step.

Instead of a forward pass, the trainer stores NaN as ``old_log_probs``. The workers replace them
(:mod:`rl_accel.patches.verl.reuse_in_worker`). After the update, verl's own functions compute all metrics that need old
log-probabilities, from those that the update returns.

The first update of a run is verl's, and asks the workers whether later ones may do so. :func:`wire` checks the configuration.
"""

import inspect
import math
import time
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl_accel.errors import refuse
from rl_accel.features import LosslessFlags
from rl_accel.patches.patch import Patch
from rl_accel.patches.verl import trials
from rl_accel.patches.verl.reuse_in_worker import ASK, FLAG, KEY, REUSE, SHARE, WORKS, require_no_jump
from rl_accel.patches.verl.verl_run import ROLLOUT, VerlRun
from rl_accel.patches.view import View
from rl_accel.telemetry import metrics as telemetry

_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"
_OFF = {
    "algorithm.use_kl_in_reward": "the penalty needs old log-probabilities before the update",
    "distillation.enabled": "its loss was not tried",
    f"{_ACTOR}.calculate_sum_pi_squared": "verl's forward pass computes it",
    f"{_ACTOR}.fsdp_config.qat.enable": "quantisation observes each forward pass",
    f"{_ACTOR}.megatron.dynamic_context_parallel": "a response is split among ranks",
    f"{ROLLOUT}.enable_rollout_routing_replay": "experts of a forward pass are replayed in the update",
    "actor_rollout_ref.model.mtp.enable": "its training was not tried",
}
"""Boolean keys of verl's configuration that must be off, with the reasons."""
_FORWARD_SHARE = 1 / 3
"""Upper bound of the share of the forward pass in the seconds of an update. A backward pass takes twice as long, or longer."""


def wire(run: VerlRun, _flags: LosslessFlags) -> None:
    """Checks that nothing in ``run`` needs old log-probabilities before the update. Changes nothing.

    In the trainer process, also tries the policy loss, if verl's registry of policy losses has it in that process.

    Raises:
        ConfigError: something needs old log-probabilities before the update, or was not tried.
    """
    if run.get(f"{_CORRECTION}.bypass_mode", False):
        return  # verl computes no old log-probabilities, as VerlRun.idle says
    if (strategy := run.get(f"{_ACTOR}.strategy")) not in ("fsdp", "fsdp2", "megatron"):
        refuse(FLAG, f"{_ACTOR}.strategy", "fsdp, fsdp2 or megatron", strategy, "others were not tried")
    for key, reason in _OFF.items():
        run.require_off(FLAG, key, reason)
    for key in (f"{_CORRECTION}.rollout_is", f"{_CORRECTION}.rollout_rs"):
        if value := run.get(key):
            refuse(FLAG, key, None, value, "it needs old log-probabilities before the update")
    mode_key = f"{_ACTOR}.{strategy}.router_replay.mode"
    if (mode := run.get(mode_key, "disabled")) != "disabled":
        refuse(FLAG, mode_key, "disabled", mode, "experts of a forward pass are replayed in the update")
    _check_estimator(run)
    if not run.in_driver:
        _check_trainer(run.trainer)
        if loss := trials.loss_of(run):
            require_no_jump(loss)


def _check_estimator(run: VerlRun) -> None:
    """Refuses an advantage estimator that takes old log-probabilities."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    name = run.get("algorithm.adv_estimator")
    try:
        parameters = inspect.signature(get_adv_estimator_fn(name)).parameters
    except ValueError:  # registered in the trainer's process alone, which checks again
        return
    if "old_log_probs" in parameters:
        refuse(FLAG, "algorithm.adv_estimator", "one without old log-probabilities", name)


def _check_trainer(trainer: Any) -> None:
    """Refuses a trainer whose class replaces a method of verl's between the forward pass and the update."""
    between = "_step_once" if hasattr(trainer, "_step_once") else "fit"  # of the V1 and of the legacy trainer
    for name in ("_compute_old_log_prob", "_compute_advantage", "_update_actor", between):
        method = getattr(type(trainer), name, None)
        if method is not None and not inspect.unwrap(method).__module__.startswith("verl.trainer.ppo."):
            refuse(FLAG, f"{name} of the trainer", "verl's own", type(trainer).__name__, "others may differ")


@dataclass
class _Run:
    """State of one trainer.

    Attributes:
        works: answer of the workers to the last update of verl; False before the first one.
        is_deferred: True from the time a forward pass is left out until the update of the same batch.
        seconds_per_token: lowest seconds per token of verl's forward passes.
        seconds: seconds that replaced the forward pass of the deferred batch so far.
    """

    works: bool = False
    is_deferred: bool = False
    seconds_per_token: float = math.inf
    seconds: float = 0.0

    def log_savings(self, tokens: int, share: float, update_seconds: float) -> None:
        """Logs the savings of a batch of ``tokens`` tokens, of which the ``share`` was trained, in ``update_seconds``."""
        forward_seconds = min(self.seconds_per_token * tokens * share, update_seconds * _FORWARD_SHARE)
        telemetry.put("reuse_log_probs/share", share)
        telemetry.add("reuse_log_probs/seconds", self.seconds)
        telemetry.add("reuse_log_probs/seconds_saved", forward_seconds - self.seconds)
        self.seconds = 0.0


_runs: weakref.WeakKeyDictionary[Any, _Run] = weakref.WeakKeyDictionary()


def gets_one_step(trainer: Any, rows: int) -> bool:
    """Returns whether ``trainer`` will update the actor exactly once on a batch of ``rows`` rows, padding included."""
    if trainer.config.trainer.critic_warmup > trainer.global_steps:
        return False
    actor = trainer.config.actor_rollout_ref.actor
    mini_batch = actor.ppo_mini_batch_size * trainer.config.actor_rollout_ref.rollout.n
    return bool(rows == mini_batch and actor.ppo_epochs == 1)


class _V1:
    """Parts of the feature that differ for verl's V1 trainer, whose batches lie in TransferQueue."""

    details = "extra_info"
    """Name of the attribute of a batch that workers receive with its rows."""

    @staticmethod
    def tokens(batch: Any) -> int:
        """Returns the number of tokens of ``batch``, prompts included."""
        return sum(tag["seq_len"] for tag in batch.tags)

    @staticmethod
    def defer(batch: Any) -> Any:
        """Stores unknown old log-probabilities, and returns what verl's forward pass returns."""
        from verl.trainer.ppo.v1.trainer_base import tq
        from verl.utils import tensordict_utils as tu

        where = {"keys": batch.keys, "partition_id": batch.partition_id}
        mask = tq.kv_batch_get(**where, select_fields=["response_mask"])["response_mask"]
        rows = [torch.full(row.shape, math.nan) for row in mask.unbind()]
        unknown = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        tq.kv_batch_put(**where, fields=tu.get_tensordict({"old_log_probs": unknown}))
        return batch

    @staticmethod
    def output_of(updated: Any) -> Any:
        """Returns what verl reads of the workers' answer ``updated``. They have stored log-probabilities and entropy."""
        return {"metrics": updated.extra_info["metrics"][0]}

    @staticmethod
    def late_metrics(trainer: Any, forward: Any, batch: Any, _updated: Any) -> dict[str, float]:
        """Returns the metrics that verl's method ``forward`` and advantage computation log of old log-probabilities."""
        from verl.protocol import DataProto
        from verl.trainer.ppo.v1.trainer_base import tq

        late: dict[str, float] = {}
        workers = View(trainer.actor_rollout_wg, compute_log_prob=lambda given: given)
        forward(View(trainer, actor_rollout_wg=workers), batch, late)
        fields = ["response_mask", "rollout_log_probs", "old_log_probs"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        return late | _corrections(trainer, DataProto(batch=data.to_padded_tensor()))


class _Legacy:
    """Parts of the feature that differ for verl's legacy trainer. The methods are those of :class:`_V1`."""

    details = "meta_info"

    @staticmethod
    def tokens(batch: Any) -> int:
        return int(batch.batch["attention_mask"].sum())

    @staticmethod
    def defer(batch: Any) -> Any:
        from verl.protocol import DataProto

        unknown = torch.full(batch.batch["responses"].shape, math.nan)
        no_mfu = 0.0
        return DataProto.from_dict({"old_log_probs": unknown, "entropys": unknown.clone()}), no_mfu

    @staticmethod
    def output_of(updated: Any) -> Any:
        return updated

    @staticmethod
    def late_metrics(trainer: Any, forward: Any, batch: Any, updated: Any) -> dict[str, float]:
        from verl.trainer.ppo.core_algos import agg_loss
        from verl.utils.debug.metrics import calculate_debug_metrics

        workers = View(trainer.actor_rollout_wg, compute_log_prob=lambda _given: updated)
        result, _ = forward(View(trainer, actor_rollout_wg=workers), batch)
        batch.batch["old_log_probs"] = result.batch["old_log_probs"]
        actor = trainer.config.actor_rollout_ref.actor
        entropy = agg_loss(
            loss_mat=result.batch["entropys"],
            loss_mask=batch.batch["response_mask"],
            loss_agg_mode=actor.loss_agg_mode,
            loss_scale_factor=actor.loss_scale_factor,
        )
        compared = calculate_debug_metrics(batch) if "rollout_log_probs" in batch.batch else {}
        return {"actor/entropy": entropy.item(), **compared, **_corrections(trainer, batch)}


def _corrections(trainer: Any, data: Any) -> dict[str, float]:
    """Returns verl's metrics ``rollout_corr/*`` for ``data`` (a DataProto); {} if verl logs none."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    config = trainer.config.algorithm.get("rollout_correction")
    if config is None or "rollout_log_probs" not in data.batch:
        return {}
    _, corrections = compute_rollout_correction_and_add_to_batch(data, config)
    return dict(corrections)


def _deferring(kind: Any, original: Any) -> Any:
    def _compute_old_log_prob(self: Any, batch: Any, metrics: Any = None) -> Any:
        run = _runs.setdefault(self, _Run())
        given = () if metrics is None else (metrics,)
        started = time.perf_counter()
        if not run.works or not gets_one_step(self, len(batch)):
            result = original(self, batch, *given)
            per_token = (time.perf_counter() - started) / max(kind.tokens(batch), 1)
            run.seconds_per_token = min(run.seconds_per_token, per_token)
            return result
        result = kind.defer(batch)
        run.is_deferred = True
        run.seconds = time.perf_counter() - started
        return result

    return _compute_old_log_prob


def _reusing(kind: Any, original: Any) -> Any:
    # verl's V1 trainer gives ``metrics``, a dict to fill in; the legacy trainer reads the metrics of what is returned.
    def _update_actor(self: Any, batch: Any, metrics: Any = None) -> Any:
        run = _runs.setdefault(self, _Run())
        given = () if metrics is None else (metrics,)
        details = getattr(batch, kind.details)
        details[KEY] = REUSE if run.is_deferred else ASK
        if not run.is_deferred:
            result = original(self, batch, *given)
            del details[KEY]
            of_update = result.meta_info["metrics"] if metrics is None else metrics
            run.works = bool(np.mean(of_update.pop(f"actor/{WORKS}", 0.0)))
            return result
        updates: list[Any] = []

        def update_and_keep(rows: Any) -> Any:
            updates.append(self.actor_rollout_wg.update_actor(rows))
            return kind.output_of(updates[0])

        run.is_deferred = False
        started = time.perf_counter()
        workers = View(self.actor_rollout_wg, update_actor=update_and_keep)
        result = original(View(self, actor_rollout_wg=workers), batch, *given)
        updated = time.perf_counter()
        del details[KEY]
        of_update = result.meta_info["metrics"] if metrics is None else metrics
        of_update |= kind.late_metrics(self, inspect.unwrap(type(self)._compute_old_log_prob), batch, updates[0])
        run.seconds += time.perf_counter() - updated
        share = float(np.mean(of_update.pop(f"actor/{SHARE}")))
        run.log_savings(kind.tokens(batch), share, updated - started)
        return result

    return _update_actor


def _patch(name: str, target: str, make: Any, kind: Any, *params: str) -> Patch:
    return Patch(
        name=f"verl.reuse_log_probs.{name}",
        target=target,
        supports="verl>=0.9",
        params=("self", "batch", *params),
        make=lambda original, _settings: make(kind, original),
        no_seam="the only extension point is a whole trainer, which a user may have replaced",
        upstream="https://github.com/verl-project/verl/issues/3996",
        remove_when="verl's trainers reuse the log-probabilities of a batch with one optimizer step",
    )


_V1_TRAINER = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
_LEGACY_TRAINER = "verl.trainer.ppo.ray_trainer:RayPPOTrainer"
SWITCHES = (
    _patch("v1_forward", f"{_V1_TRAINER}._compute_old_log_prob", _deferring, _V1, "metrics"),
    _patch("v1_update", f"{_V1_TRAINER}._update_actor", _reusing, _V1, "metrics"),
    _patch("legacy_forward", f"{_LEGACY_TRAINER}._compute_old_log_prob", _deferring, _Legacy),
    _patch("legacy_update", f"{_LEGACY_TRAINER}._update_actor", _reusing, _Legacy),
)
