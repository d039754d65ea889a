"""What ``rl-accel doctor`` finds: frameworks, kernel backends, and whether each feature works here."""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_accel import __version__
from rl_accel.errors import ConfigError, PatchRefused
from rl_accel.features import FEATURES, is_installed

DISTRIBUTIONS = ("torch", "numba", "triton", "ray", "verl", "TransferQueue", "slime", "transformers", "omegaconf")


@dataclass(frozen=True)
class Check:
    """One line of the report. ``verdict``: works, cannot (tried and failed), absent (no framework)."""

    feature: str
    patch: str
    verdict: str
    reason: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Everything found. ``versions``: by distribution, None if absent; ``backends``: None or a reason; ``sandbox``: how programs of
    a code reward would be isolated, and why not better."""

    python: str
    versions: dict[str, str | None]
    backends: dict[str, str | None]
    checks: tuple[Check, ...]
    sandbox: str

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain dicts and lists, ready for JSON."""
        return {"version": __version__, **asdict(self)}


def diagnose() -> Diagnosis:
    """Look at this environment. Imports the frameworks found, applies each patch for real and reverts it again."""
    from rl_accel.ops import available_backends
    from rl_accel.reward.sandbox import bubblewrap_problem

    checkout = _use_slime_checkout()
    versions = {name: _version(name) for name in DISTRIBUTIONS} | {"slime": checkout}
    checks = [check for feature in FEATURES for check in _check_feature(feature)]
    missing = bubblewrap_problem()
    sandbox = f"process ({missing})" if missing else "bubblewrap"
    return Diagnosis(platform.python_version(), versions, available_backends(), tuple(checks), sandbox)


def _use_slime_checkout() -> str | None:
    """slime is run from a checkout: make the one that SLIME_ROOT names importable, and return where slime lies.

    Raises:
        ConfigError: SLIME_ROOT names no checkout.
    """
    root = os.environ.get("SLIME_ROOT")
    if root and not (Path(root) / "slime" / "utils" / "arguments.py").is_file():
        raise ConfigError(f"SLIME_ROOT wants a checkout of slime, found {root!r} (no slime/utils/arguments.py)")
    if root and root not in sys.path:
        sys.path.insert(0, root)
    found = importlib.util.find_spec("slime")
    return str(Path(found.origin).parent) if found is not None and found.origin else None


def _check_feature(feature: Any) -> list[Check]:
    checks = []
    for framework, modules in feature.patches.items():
        if not is_installed(framework):
            checks.append(Check(feature.name, framework, "absent", f"{framework} is not installed"))
            continue
        for module in modules:
            for patch in importlib.import_module(module).PATCHES:
                checks.append(_try(feature.name, patch))
    return checks


def _try(feature: str, patch: Any) -> Check:
    from rl_accel.config import RlAccelConfig

    try:
        importlib.import_module(patch.target.partition(":")[0])
        if patch.state().value != "applied":
            patch.apply(getattr(RlAccelConfig(), feature))
            patch.revert()
    except (PatchRefused, ImportError) as error:
        return Check(feature, patch.name, "cannot", str(error))
    return Check(feature, patch.name, "works")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
