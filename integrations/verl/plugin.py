"""Plug-in of entry-point group ``verl.plugins``. ``import verl`` imports this module in every process, including Ray actors.

verl logs exceptions raised during this import at DEBUG level only. A requested feature must never fail silently, so every
exception becomes a ``SystemExit`` with a message of one line, which verl does not catch. Without flags, this module only
arranges that flags are read from a trainer's configuration (see :mod:`rl_accel.patches.verl.config_intake`).
"""

import atexit
import contextlib
import logging


def _warn_of_unread_flags() -> None:
    """Logs a warning if nothing in the Ray job has read the flags on the command line, as with verl's main_eval. Runs at exit."""
    flags = config_intake.unread_flags()
    if flags and propagate.is_connected():
        with contextlib.suppress(Exception):  # the cluster may have ended
            if FRAMEWORK not in (propagate.received() or ""):  # a trainer in an actor publishes what it has read
                logging.getLogger("rl_accel").warning("rl-accel: nothing in this program has read %s", " ".join(flags))


try:
    from rl_accel import process_start  # noqa: F401  # before code of the user changes what it stores
    from rl_accel.integrations.ray import propagate
    from rl_accel.patches.verl import config_intake
    from rl_accel.runtime import FRAMEWORK, RUNTIME

    RUNTIME.adopt(propagate.received())
    atexit.register(_warn_of_unread_flags)
except Exception as error:
    from rl_accel.errors import RlAccelError

    kind = "" if isinstance(error, RlAccelError) else f"flags cannot be read: {type(error).__name__}: "
    raise SystemExit(f"rl-accel: {kind}{error}") from error
