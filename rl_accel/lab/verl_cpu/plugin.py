"""An entry point of group ``verl.plugins``: registers the CPU platform while verl is imported, if ``VERL_PLATFORM=cpu``.

verl swallows exceptions raised here at DEBUG level, so an error becomes ``SystemExit`` with one line, which it does not catch.
"""

import os

if os.environ.get("VERL_PLATFORM") == "cpu":
    try:
        from rl_accel.lab import verl_cpu

        verl_cpu.activate()
    except Exception as error:
        raise SystemExit(f"rl-accel: the CPU platform cannot begin: {type(error).__name__}: {error}") from error
