"""What ``rl-accel doctor`` finds: frameworks, kernel backends, and whether each feature works here."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_accel import __version__
from rl_accel.errors import ConfigError, PatchRefused
from rl_accel.features import FEATURES, FLAG_READERS, Feature
from rl_accel.runtime import is_installed, switches_of
from rl_accel.switch import Switch, SwitchState, aligned

DISTRIBUTIONS = ("torch", "numba", "triton", "ray", "verl", "TransferQueue", "slime", "transformers", "omegaconf")
_READS_FLAGS = "reads flags"


@dataclass(frozen=True)
class Check:
    """One line of the report. ``verdict``: works, cannot (tried and failed), absent (no framework)."""

    feature: str
    patch: str
    verdict: str
    reason: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Everything found.

    Attributes:
        python: its version.
        versions: by distribution, None if absent.
        backends: by kernel backend, None if it works or the reason why not.
        checks: of each switch of each feature, and of what reads flags.
        sandbox: how programs of a code reward would be isolated, and why not better.
    """

    python: str
    versions: dict[str, str | None]
    backends: dict[str, str | None]
    checks: tuple[Check, ...]
    sandbox: str

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain dicts and lists, ready for JSON."""
        return {"version": __version__, **asdict(self)}

    def __str__(self) -> str:
        rows = [("feature", "switch or backend", "verdict", "reason")]
        rows += [(check.feature, check.patch, check.verdict, check.reason) for check in self.checks]
        rows += [("kernel", name, "cannot" if why else "works", why or "") for name, why in self.backends.items()]
        versions = "  ".join(f"{name} {version or '-'}" for name, version in self.versions.items())
        head = [f"rl-accel {__version__}, Python {self.python}", versions, ""]
        return "\n".join([*head, *aligned(rows), "", f"sandbox: {self.sandbox}"])


def diagnose() -> Diagnosis:
    """Look at this environment. Imports the frameworks found, applies each switch for real and reverts it again."""
    with _quiet():
        from rl_accel.ops import available_backends
        from rl_accel.reward.sandbox import bubblewrap_problem

        checkout = _use_slime_checkout()
        checks = [check for feature in FEATURES for check in _check_feature(feature)]
        for framework, module in FLAG_READERS.items():
            if is_installed(framework):
                checks += [_try(_READS_FLAGS, switch, None) for switch in switches_of(module)]
        versions = {name: _version(name) for name in DISTRIBUTIONS} | {"slime": checkout}
        problem = bubblewrap_problem()
        sandbox = f"process ({problem})" if problem else "bubblewrap"
        return Diagnosis(platform.python_version(), versions, available_backends(), tuple(checks), sandbox)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what frameworks print and log while they are imported away from the report."""
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
    """slime is run from a checkout: make the one that SLIME_ROOT names importable, and return where slime lies.

    Raises:
        ConfigError: SLIME_ROOT names no checkout.
    """
    root = os.environ.get("SLIME_ROOT")
    if root and not (Path(root) / "slime" / "utils" / "arguments.py").is_file():
        raise ConfigError(f"SLIME_ROOT wants a checkout of slime, found {root!r} (no slime/utils/arguments.py)")
    if root and root not in sys.path:
        sys.path.insert(0, root)
    spec = importlib.util.find_spec("slime")
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else None


def _check_feature(feature: Feature[Any]) -> Iterator[Check]:
    for framework, modules in feature.switches.items():
        if not is_installed(framework):
            yield Check(feature.name, framework, "absent", f"{framework} is not installed")
            continue
        if framework == "verl" and feature.verl:
            yield _check_seams(feature)
        for module in modules:
            for switch in switches_of(module):
                yield _try(feature.name, switch, feature.flags())


def _check_seams(feature: Feature[Any]) -> Check:
    """What a run says before it begins: whether this verl has the extension points that the feature stands on."""
    from rl_accel.patches import seams

    name = f"verl.{feature.name}"
    try:
        seams.require(feature.name, importlib.import_module(feature.verl).SEAMS)
    except (PatchRefused, ImportError) as error:
        return Check(feature.name, name, "cannot", _one_line(error))
    return Check(feature.name, name, "works")


def _try(feature: str, switch: Switch, settings: Any) -> Check:
    try:
        importlib.import_module(switch.target.partition(":")[0])
        if switch.state() is not SwitchState.APPLIED:
            switch.apply(settings)
            switch.revert()
    except (PatchRefused, ImportError) as error:
        return Check(feature, switch.name, "cannot", _one_line(error))
    return Check(feature, switch.name, "works")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _version(distribution: str) -> str | None:
    """The version that has been imported, which may be a checkout beside an installed one; else the installed one."""
    imported = getattr(sys.modules.get(distribution), "__version__", None)
    if isinstance(imported, str):
        return imported
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
