"""Start a worker. Its files are loaded as a package of its own name: a program's ``import watch`` must not find ours."""

import importlib
import importlib.util
import os
import sys


def _load() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]
    spec = importlib.util.spec_from_file_location(
        "rl_accel_worker", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no worker in {folder}")
    package = importlib.util.module_from_spec(spec)
    sys.modules["rl_accel_worker"] = package
    spec.loader.exec_module(package)


_load()
importlib.import_module("rl_accel_worker.start").main(int(sys.argv[1]))
