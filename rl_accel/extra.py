"""Import of the libraries that only reports and the A/B runner need, with an error that says how to get them."""

import importlib
from typing import Any

from rl_accel.errors import RlAccelError


def needs(module: str) -> Any:
    """Import a module of the ``report`` extra.

    Raises:
        RlAccelError: it is not installed; the message says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RlAccelError(
            f"this command of rl-accel needs {module.split('.')[0]}: in a checkout of rl-accel, pip install '.[report]'"
        ) from error
