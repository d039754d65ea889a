"""Says what the next launch should use, and writes it down in the form that slime's ``--sglang-config`` reads."""

import logging
import os
from pathlib import Path
from typing import Any

import yaml

from rl_accel.integrations.slime.tp_replan import CONFIG_FILE
from rl_accel.integrations.slime.tp_replan.layout import Layout
from rl_accel.parallel.tp_decisions import Decision

logger = logging.getLogger("rl_accel")


def advise(args: Any, config_file: str | None, layout: Layout, rollout: int, decision: Decision) -> None:
    """Log one line, and write the file. Where slime could not read it, or nothing can be written, the line says so.

    Args:
        args: slime's.
        config_file: where to write; None: in ``--save``, if there is one.
        layout: how the engines stand.
        rollout: the number of the rollout just made.
        decision: of the planner, a change.
    """
    size = decision.tp * layout.pipeline
    flag = f"--rollout-num-gpus-per-engine {size}"
    file = Path(config_file) if config_file else Path(args.save) / CONFIG_FILE if args.save else None
    if file is None:
        own = getattr(args, "sglang_config", None)
        words = f"{flag}, and num_gpus_per_engine: {size} in {own}" if own else flag
    else:
        words = f"--sglang-config {file} {flag}"
        reason = f"after rollout {rollout}: {decision.reason}"
        try:
            _write(file, layout.at(decision.tp, args.rollout_num_gpus_per_engine), f"# {reason}\n# {words}\n", args)
        except Exception as error:  # of the file system, or of slime about the content; advice is not worth a training
            words = f"{flag} (no file: {file} could not be written: {error})"
    logger.warning(
        "rl-accel: tp_replan: advice after rollout %d: %s; expected: %s; for the next launch: %s",
        rollout,
        decision.reason,
        decision.expected,
        words,
    )


def _write(file: Path, document: dict[str, Any], comment: str, args: Any) -> None:
    """Write the file whole or not at all, and only if slime's own reader takes it and finds every GPU in it."""
    from slime.backends.sglang_utils.sglang_config import SglangConfig

    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f"{file.name}.tmp")
    try:
        fresh.write_text(comment + yaml.safe_dump(document, sort_keys=False))
        gpus = SglangConfig.from_yaml(str(fresh)).total_num_gpus
        if gpus != args.rollout_num_gpus:
            raise ValueError(f"it has {gpus} GPUs, and --rollout-num-gpus is {args.rollout_num_gpus}")
        os.replace(fresh, file)
    finally:
        fresh.unlink(missing_ok=True)
