"""Old log-probabilities from the actor update itself, in verl's trainers, for a batch that gets one optimizer step.

Instead of a forward pass, the trainer stores NaN as ``old_log_probs``. The workers replace them
(:mod:`rl_accel.patches.verl.reuse_in_worker`). After the update, verl's own functions compute all metrics that need old
log-probabilities, from those that the update returns.

The first update of a run is verl's, and asks the workers whether the next ones may do so.
"""

import inspect
import math
import time
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl_accel.patches.patch import Patch
from rl_accel.patches.verl.reuse_in_worker import ASK, KEY, REUSE, SHARE, WORKS
from rl_accel.patches.view import View
from rl_accel.telemetry import metrics as telemetry

_FORWARD_SHARE = 1 / 3
"""Upper bound of the share of the forward pass in the seconds of an update. A backward pass takes twice as long, or longer."""


@dataclass
class _Run:
    """State of one trainer.

    Attributes:
        works: answer of the workers; None before they were asked.
        is_deferred: True from the time a forward pass is left out until the update of the same batch.
        seconds_per_token: lowest seconds per token of verl's forward passes.
        seconds: seconds that replaced the forward pass of the deferred batch so far.
    """

    works: bool | None = None
    is_deferred: bool = False
    seconds_per_token: float = math.inf
    seconds: float = 0.0

    def note_forward(self, started: float, tokens: int) -> None:
        """Takes note of a forward pass of verl over ``tokens`` tokens, which began at ``started`` and ends now."""
        self.seconds_per_token = min(self.seconds_per_token, (time.perf_counter() - started) / max(tokens, 1))

    def log_savings(self, tokens: int, share: float, update_seconds: float) -> None:
        """Logs the savings of a batch of ``tokens`` tokens, of which the ``share`` was trained, in ``update_seconds``."""
        forward_seconds = min(self.seconds_per_token * tokens * share, update_seconds * _FORWARD_SHARE)
        telemetry.put("reuse_log_probs/share", share)
        telemetry.add("reuse_log_probs/seconds", self.seconds)
        telemetry.add("reuse_log_probs/seconds_saved", forward_seconds - self.seconds)
        self.seconds = 0.0


_runs: weakref.WeakKeyDictionary[Any, _Run] = weakref.WeakKeyDictionary()


def _run_of(trainer: Any) -> _Run:
    return _runs.setdefault(trainer, _Run())


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
    def metrics_of(_result: Any, metrics: Any) -> Any:
        """Returns the dict in which verl's method has put the metrics of the update."""
        return metrics

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
    def metrics_of(result: Any) -> Any:
        return result.meta_info["metrics"]

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


def _given(metrics: Any) -> tuple[Any, ...]:
    """Returns the arguments after ``batch`` with which verl has called a method: ``metrics`` on V1, none on the legacy trainer."""
    return () if metrics is None else (metrics,)


def _deferring(kind: Any, original: Any) -> Any:
    def _compute_old_log_prob(self: Any, batch: Any, metrics: Any = None) -> Any:
        run = _run_of(self)
        given = _given(metrics)
        started = time.perf_counter()
        if not run.works or not gets_one_step(self, len(batch)):
            result = original(self, batch, *given)
            run.note_forward(started, kind.tokens(batch))
            return result
        result = kind.defer(batch)
        run.is_deferred = True
        run.seconds = time.perf_counter() - started
        return result

    return _compute_old_log_prob


def _reusing(kind: Any, original: Any) -> Any:
    def _update_actor(self: Any, batch: Any, metrics: Any = None) -> Any:
        run = _run_of(self)
        given = _given(metrics)
        details = getattr(batch, kind.details)
        if not run.is_deferred:
            if run.works is not None:
                return original(self, batch, *given)
            details[KEY] = ASK
            result = original(self, batch, *given)
            del details[KEY]
            run.works = bool(np.mean(kind.metrics_of(result, *given).pop(f"actor/{WORKS}", 0.0)))
            return result
        updates: list[Any] = []

        def update_and_keep(rows: Any) -> Any:
            updates.append(self.actor_rollout_wg.update_actor(rows))
            return kind.output_of(updates[0])

        run.is_deferred = False
        details[KEY] = REUSE
        started = time.perf_counter()
        workers = View(self.actor_rollout_wg, update_actor=update_and_keep)
        result = original(View(self, actor_rollout_wg=workers), batch, *given)
        updated = time.perf_counter()
        del details[KEY]
        of_update = kind.metrics_of(result, *given)
        forward = inspect.unwrap(type(self)._compute_old_log_prob)
        of_update |= kind.late_metrics(self, forward, batch, updates[0])
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
