"""Makes the workers of Ray forks: verl imports this module, which VERL_USE_EXTERNAL_MODULES names, before it starts Ray.

FORKING is the command that starts a fork. A program of another environment, whose libraries the forks would not have, ignores it.
"""

import functools
import os
import shlex
import sys

import ray

if shlex.split(os.environ["FORKING"])[0] == sys.executable and not hasattr(ray.init, "__wrapped__"):
    original = ray.init

    @functools.wraps(original)
    def init(*args, runtime_env=None, **kwargs):
        return original(*args, runtime_env={**(runtime_env or {}), "py_executable": os.environ["FORKING"]}, **kwargs)

    ray.init = init
