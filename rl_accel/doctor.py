"""What ``rl-accel doctor`` finds: frameworks, kernel backends, and whether each feature works here."""

import importlib
import importlib.metadata
import platform
from dataclasses import asdict, dataclass
from typing import Any

from rl_accel import __version__
from rl_accel.errors import PatchRefused
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
    """Everything found. ``versions``: by distribution, None if absent; ``backends``: None or a reason."""

    python: str
    versions: dict[str, str | None]
    backends: dict[str, str | None]
    checks: tuple[Check, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain dicts and lists, ready for JSON."""
        return {"version": __version__, **asdict(self)}


def diagnose() -> Diagnosis:
    """Look at this environment. Imports the frameworks found, applies each patch for real and reverts it again."""
    from rl_accel.ops import available_backends

    versions = {name: _version(name) for name in DISTRIBUTIONS}
    checks = [check for feature in FEATURES for check in _check_feature(feature)]
    return Diagnosis(platform.python_version(), versions, available_backends(), tuple(checks))


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
