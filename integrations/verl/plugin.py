"""The entry point of group ``verl.plugins``: ``import verl`` imports this module in every process, Ray actors included.

verl swallows exceptions raised here at DEBUG level. A feature that was asked for must never fail silently, so an
error becomes ``SystemExit`` with one line, which verl does not catch. With no flag anywhere this only leaves import
hooks behind that look for ``rl_accel`` in the configuration of a trainer.
"""

import os

from rl_accel.errors import RlAccelError


def _start() -> None:
    from rl_accel.integrations.ray import propagate
    from rl_accel.patches.verl import config_intake

    config_intake.watch()
    payload = propagate.received()
    if payload or os.environ.get("RL_ACCEL_CONFIG"):
        from rl_accel.runtime import RUNTIME

        RUNTIME.adopt(payload)


try:
    _start()
except RlAccelError as error:
    raise SystemExit(f"rl-accel: {error}") from error
