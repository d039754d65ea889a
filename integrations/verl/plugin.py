"""Plug-in of entry-point group ``verl.plugins``. ``import verl`` imports this module in every process, including Ray actors.

verl logs exceptions raised during this import at DEBUG level only. A requested feature must never fail silently, so an
error becomes a ``SystemExit`` with a message of one line, which verl does not catch. Without flags, this module only
arranges that flags are read from a trainer's configuration (see :mod:`rl_accel.patches.verl.config_intake`).
"""

from rl_accel.errors import RlAccelError
from rl_accel.integrations.ray import propagate
from rl_accel.runtime import RUNTIME

try:
    RUNTIME.adopt(propagate.received())
except RlAccelError as error:
    raise SystemExit(f"rl-accel: {error}") from error
