"""The entry point of group ``verl.plugins``: ``import verl`` imports this module in every process, Ray actors included.

verl swallows exceptions raised here at DEBUG level. A feature that was asked for must never fail silently, so an
error becomes ``SystemExit`` with one line, which verl does not catch. With no flag anywhere this only has flags read
from the configuration of a trainer (see :mod:`rl_accel.patches.verl.config_intake`).
"""

from rl_accel.errors import RlAccelError
from rl_accel.integrations.ray import propagate
from rl_accel.runtime import RUNTIME

try:
    RUNTIME.adopt(propagate.received())
except RlAccelError as error:
    raise SystemExit(f"rl-accel: {error}") from error
