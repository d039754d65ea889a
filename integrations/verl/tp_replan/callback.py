"""Shows the planner each step of the trainer, and says or does what it decides."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_accel.features.tp_replan import TpReplanFlags
from rl_accel.integrations.verl.server_counters import read_servers
from rl_accel.integrations.verl.tp_replan import STATE_FILE
from rl_accel.integrations.verl.tp_replan.live import change
from rl_accel.integrations.verl.tp_replan.restart import restart
from rl_accel.integrations.verl.tp_replan.wiring import TP_KEY, bounds_of
from rl_accel.parallel import tp_state_file
from rl_accel.parallel.tp_decisions import Observation
from rl_accel.parallel.tp_planner import TpPlanner
from rl_accel.parallel.tp_rounds import kind_of, tokens_generated
from rl_accel.telemetry.server_counters import Counters

logger = logging.getLogger("rl_accel")

_STEP = "training/global_step"


class TpReplan:
    """An observer of what the trainer logs, in its process.

    Args:
        flags: of this feature.
        find_trainer: returns verl's trainer.
    """

    def __init__(self, flags: TpReplanFlags, find_trainer: Any = None) -> None:
        from rl_accel.patches.verl import config_intake

        self._flags = flags
        self._find = find_trainer or config_intake.trainer
        self._trainer: Any = None
        self._counters: Counters
        self._planner: TpPlanner | None = None
        self._mute = ""

    def __call__(self, _step: int, data: Mapping[str, Any]) -> dict[str, float]:
        """Take in the numbers of a step. What has no ``training/global_step`` is a validation: only its preemptions are set aside.

        Returns:
            ``tp_replan/tp``, ``wanted_tp`` and ``changes``; ``tp_replan/preemptions`` if they are known.
        """
        trainer = self._find()
        if trainer is None:
            return {}
        if trainer is not self._trainer:
            self._begin(trainer)
        preemptions, kv_use = self._counters.take()
        if _STEP not in data:
            return {}
        step, tp = int(data[_STEP]), int(_select(trainer.config, TP_KEY))
        if preemptions and any(key.startswith("val-") for key in data):
            preemptions = None  # some of them are of the validation
        if self._planner is None:
            self._planner = self._resume(trainer, step)
        numbers = {"tp": float(tp), "wanted_tp": float(tp)}
        if preemptions is not None:
            numbers["preemptions"] = float(preemptions)
        seconds, tokens = data.get("timing_s/gen"), tokens_of(data)
        if seconds and tokens:
            seen = Observation(
                kind_of(data),
                tp=tp,
                preemptions=preemptions,
                rollout_seconds=float(seconds),
                tokens=tokens,
                kv_use=kv_use,
            )
            numbers["wanted_tp"] = float(self._decide(trainer, self._planner, seen, step))
        elif not self._mute:
            self._mute = f"step {step} has no timing_s/gen or no count of tokens"
            logger.warning("rl-accel: tp_replan decides nothing: %s", self._mute)
        numbers["changes"] = float(self._planner.state_dict()["changes"])
        return {f"tp_replan/{name}": value for name, value in numbers.items()}

    def _begin(self, trainer: Any) -> None:
        self._trainer, self._planner, self._counters = trainer, None, _counters(trainer)

    def _decide(self, trainer: Any, planner: TpPlanner, seen: Observation, step: int) -> int:
        decision = planner.step(seen)
        if decision.change == "keep":
            logger.debug("rl-accel: tp_replan: step %d: %s", step, decision.reason)
            self._save(trainer, planner, step)
            return decision.tp
        advice = "advice" if self._flags.action == "advise" else "decision"
        logger.warning(
            "rl-accel: tp_replan: %s after step %d: %s; expected: %s", advice, step, decision.reason, decision.expected
        )
        self._save(trainer, planner, step)
        if self._flags.action == "restart":
            restart(trainer, step, decision)
        elif self._flags.action == "live" and change(trainer, step, decision):
            self._counters = _counters(trainer)
        return decision.tp

    def _resume(self, trainer: Any, step: int) -> TpPlanner:
        planner = TpPlanner(bounds_of(trainer.config, self._flags))
        if planner.bounds.note:
            logger.info("rl-accel: tp_replan: %s", planner.bounds.note)
        file = _state_file(trainer)
        if step > 1 and file is not None:
            tp_state_file.load(file, planner)
        return planner

    def _save(self, trainer: Any, planner: TpPlanner, step: int) -> None:
        file = _state_file(trainer)
        if file is not None:
            tp_state_file.save(file, planner, step)


def tokens_of(data: Mapping[str, Any]) -> int | None:
    """Return the tokens generated in a step: as tail batching counted them, else those of the responses trained on."""
    generated = tokens_generated(data)
    if not generated:
        both, response, prompt = (
            data.get(key) for key in ("perf/total_num_tokens", "response_length/mean", "prompt_length/mean")
        )
        if not both or not response or prompt is None:
            return None
        generated = float(both) * float(response) / (float(response) + float(prompt))
    return max(1, round(float(generated)))


def _counters(trainer: Any) -> Counters:
    """Return the counters of servers that have just been launched."""
    engine = str(_select(trainer.config, "actor_rollout_ref.rollout.name"))
    return Counters(lambda: read_servers(engine, trainer.llm_server_manager.server_addresses, reset_peak=True))


def _state_file(trainer: Any) -> Path | None:
    folder = _select(trainer.config, "trainer.default_local_dir")
    return Path(folder) / STATE_FILE if folder else None


def _select(config: Any, key: str) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.select(config, key, default=None)
