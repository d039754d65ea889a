"""Diagnosis for the command ``rl-accel doctor``: installed frameworks, kernel backends, and whether each feature works here."""

import contextlib
import importlib
import io
import logging
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_accel import __version__
from rl_accel.console import aligned, progress
from rl_accel.errors import PatchRefused, one_line
from rl_accel.features import FEATURES, FLAG_READER, METRICS_LOGGER, Feature
from rl_accel.integrations.slime.custom_config import require_checkout
from rl_accel.patches.upstream import version_of
from rl_accel.patches.verl.config_intake import require_adapters
from rl_accel.runtime import is_installed, switches_of
from rl_accel.switch import Switch, SwitchState

PLUGIN = "rl_accel.integrations.verl.plugin"
ENGINES = {"vllm": ("0.24.0", "0.29.0", "0.31.0", "0.32.0"), "sglang": ("0.5.12.post1", "0.5.15.post1")}
"""Mapping from inference engine to the versions on which the pack was run. Others are accepted if they have the same interface."""
DISTRIBUTIONS = ("torch", "numba", "triton", "ray", "verl", "TransferQueue", "slime", "transformers", "omegaconf")


def diagnose() -> dict[str, Any]:
    """Diagnoses this Python environment. Imports the installed frameworks, and applies and reverts each change to them (switch).

    Returns:
        A nested dict that ``json.dumps`` accepts, with the versions of rl-accel and Python, and:

        - ``versions``: mapping from distribution name to version; None if the distribution is absent.
        - ``backends``: mapping from kernel backend to the reason why it does not work; None if it works.
        - ``checks``: one dict per check. ``verdict`` is "works", "cannot" (failed) or "absent" (framework or engine not installed).
        - ``sandbox``: isolation level of programs under test: "bubblewrap", or "process" and why bubblewrap does not work.
    """
    with quiet():
        from rl_accel.ops import available_backends
        from rl_accel.reward.sandbox import bubblewrap_problem

        checkout = _use_slime_checkout()
        features = progress(FEATURES, "trying features")
        checks = [*_check_engines(), *(check for feature in features for check in _check_feature(feature))]
        if is_installed("verl"):
            for name, module in (("reads flags", FLAG_READER), ("logs numbers", METRICS_LOGGER)):
                checks += [_try(name, switch, None) for switch in switches_of(module)]
            checks += _check_plugin()
        problem = bubblewrap_problem()
        return {
            "version": __version__,
            "python": platform.python_version(),
            "versions": {name: version_of(name) for name in DISTRIBUTIONS} | {"slime": checkout},
            "backends": available_backends(),
            "checks": checks,
            "sandbox": f"process ({problem})" if problem else "bubblewrap",
        }


def as_text(diagnosis: dict[str, Any]) -> str:
    """Returns ``diagnosis``, the result of :func:`diagnose`, as text with tables."""
    rows = [("feature", "switch or backend", "verdict", "reason")]
    rows += [tuple(check.values())[:4] for check in diagnosis["checks"]]
    rows += [("kernel", name, "cannot" if why else "works", why or "") for name, why in diagnosis["backends"].items()]
    versions = "  ".join(f"{name} {version or '-'}" for name, version in diagnosis["versions"].items())
    head = [f"rl-accel {diagnosis['version']}, Python {diagnosis['python']}", versions, ""]
    patches = [("switch", "upstream", "remove when")]
    patches += [(c["switch"], c["upstream"], c["remove_when"]) for c in diagnosis["checks"] if "upstream" in c]
    return "\n".join([*head, *aligned(rows), "", *aligned(patches), "", f"sandbox: {diagnosis['sandbox']}"])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses output, logs and warnings inside the ``with`` block."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _use_slime_checkout() -> str | None:
    """Adds the slime checkout in the environment variable SLIME_ROOT to ``sys.path``. Returns the folder of the package ``slime``.

    Returns None if slime cannot be imported. Raises ConfigError if SLIME_ROOT is not the folder of a slime checkout.
    """
    if root := os.environ.get("SLIME_ROOT"):
        require_checkout(root)
        if root not in sys.path:
            sys.path.insert(0, root)
    spec = find_spec("slime")
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else None


def _check_plugin() -> Iterator[dict[str, str]]:
    """Yields a failed check if verl does not import the plug-in of rl-accel, and would ignore all flags silently."""
    if PLUGIN in os.environ.get("VERL_USE_EXTERNAL_MODULES", ""):
        return
    named = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    source = getattr(find_spec("verl"), "origin", None)
    if source and "verl.plugins" not in Path(source).read_text():
        reason = f"this verl looks for no plug-ins, and ignores every flag without VERL_USE_EXTERNAL_MODULES={PLUGIN}"
    elif named != "auto" and "rl_accel" not in map(str.strip, named.split(",")):
        reason = f"VERL_USE_EXTERNAL_PLUGINS={named} leaves out rl_accel, and verl then ignores every flag of it"
    else:
        return
    yield _check("reads flags", "verl.plugins", "cannot", reason)


def _check_engines() -> Iterator[dict[str, str]]:
    for engine, versions in ENGINES.items():
        version = version_of(engine) or version_of(f"{engine}-cpu")
        if version is not None:
            is_run = version.partition("+")[0] in versions
            reason = "" if is_run else f"not run here; {', '.join(versions)} were"
            yield _check("engine", f"{engine} {version}", "works", reason)


def _check_feature(feature: Feature[Any]) -> Iterator[dict[str, str]]:
    for framework, modules in feature.switches.items():
        needed = [framework, feature.engine] if framework == "verl" and feature.engine else [framework]
        if absent := [name for name in needed if not is_installed(name)]:
            yield _check(feature.name, absent[0], "absent", f"{absent[0]} is not installed")
            continue
        adapters = None
        if framework == "verl" and feature.verl:
            adapters = _verdict(feature.name, f"verl.{feature.name}", lambda: require_adapters(feature))
            yield adapters
            for verdict, what, reason in getattr(importlib.import_module(feature.verl), "check_engine", tuple)():
                yield _check(feature.name, what, verdict, reason)
        for switch in switches_of(*modules):
            if adapters and adapters["verdict"] == "cannot":
                yield _check(feature.name, switch.name, "cannot", f"needs {adapters['switch']}")
            else:
                yield _try(feature.name, switch, feature.flags())


def _try(feature: str, switch: Switch, settings: Any) -> dict[str, str]:
    def attempt() -> None:
        try:
            importlib.import_module(switch.module)
        except Exception as error:  # verl's modules for vLLM raise ValueError where there is no vLLM
            raise ImportError(error) from error
        if switch.state() is not SwitchState.APPLIED:
            switch.apply(settings)
            switch.revert()

    check = _verdict(feature, switch.name, attempt)
    return check | {name: getattr(switch, name) for name in ("upstream", "remove_when") if hasattr(switch, name)}


def _verdict(feature: str, name: str, attempt: Callable[[], None]) -> dict[str, str]:
    try:
        attempt()
    except (PatchRefused, ImportError) as error:
        return _check(feature, name, "cannot", one_line(error))
    return _check(feature, name, "works")


def _check(feature: str, switch: str, verdict: str, reason: str = "") -> dict[str, str]:
    return {"feature": feature, "switch": switch, "verdict": verdict, "reason": reason}
