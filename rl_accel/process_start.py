"""Working folder and environment variables of this process at its start, before code of the user has changed them.

A reward function is imported in several processes. Each import must find what the first import has found.
"""

import os

try:
    _FOLDER = os.getcwd()
except OSError:  # the folder has been removed
    _FOLDER = ""
_VARIABLES = dict(os.environ)


def folder() -> str:
    """Returns the working folder that this process had at its start; "" if this folder does not exist."""
    return _FOLDER if os.path.isdir(_FOLDER) else ""


def removed_variables() -> dict[str, str]:
    """Returns the environment variables that this process had at its start but no longer has."""
    return {name: value for name, value in _VARIABLES.items() if name not in os.environ}
