"""Prints what each feature costs and gives: lines, seconds of tests, gain, date of its evidence, and when its code can go.

    make ledger

Lines are those of modules that only this feature reaches through imports; what several features share has a line of its own. Gain
and evidence are the feature's row in README.md. Everything is read from the repository, so that it cannot lag behind it.
"""

import ast
import functools
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rl_accel.features import FEATURES, Feature
from rl_accel.patches.patch import Patch
from rl_accel.runtime import switches_of

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = {"rl_accel.patches": "patches", "rl_accel.integrations": "integrations"}


@functools.cache
def path_of(module: str) -> Path | None:
    """Returns the file of ``module``, a dotted name; None if it is not a module of this repository."""
    for package, folder in FOLDERS.items():
        if module == package or module.startswith(f"{package}."):
            module = folder + module.removeprefix(package)
    path = REPOSITORY / module.replace(".", "/")
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


@functools.cache
def imports_of(file: Path) -> frozenset[str]:
    """Returns the names of this repository's modules that ``file`` imports or names in a string, such as ``pkg://`` paths."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(re.findall(r"rl_accel(?:\.\w+)+", node.value))
    return frozenset(name for name in names if name.startswith("rl_accel.") and path_of(name))


def reach_of(roots: Iterable[str]) -> set[Path]:
    """Returns the files of the modules ``roots`` and of everything that they import."""
    waiting = list(roots)
    reached = set()
    while waiting:
        file = path_of(waiting.pop())
        if file is not None and file not in reached and file.name != "features.py":
            reached.add(file)
            waiting += imports_of(file)
    return reached


def roots_of(feature: Feature) -> set[str]:
    """Returns the names of the modules that the declaration of ``feature`` names."""
    roots = {module for modules in feature.switches.values() for module in modules} | {feature.verl}
    if feature.slime is not None:
        roots |= set(re.findall(r"rl_accel(?:\.\w+)+", repr(feature.slime)))
        roots |= {name.rpartition(".")[0] for name in roots}
    roots |= {f"rl_accel.integrations.{framework}.{feature.name}" for framework in ("verl", "slime")}
    return {root for root in roots if path_of(root)}


def lines_of(files: Iterable[Path]) -> int:
    """Returns the total number of lines of ``files``."""
    return sum(len(file.read_text().splitlines()) for file in files)


def test_seconds(files: set[Path], name: str) -> float:
    """Returns the stored seconds of the test files that import one of ``files`` or have the feature's ``name`` in theirs."""
    total = 0.0
    for test, seconds in json.loads((REPOSITORY / "tests/durations.json").read_text()).items():
        path = REPOSITORY / test
        if path.is_file():
            imported = {path_of(module) for module in imports_of(path)}
            if imported & files or name in path.stem:
                total += seconds
    return total


def readme_row(name: str) -> tuple[str, str]:
    """Returns the gain in README's row of the feature ``name``, and the path of the page with the evidence; "" if absent."""
    for line in (REPOSITORY / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 6 and f"[`{name}`]" in cells[1]:
            gain = next((cell for cell in cells if "benchmarks/" in cell), "")
            page = re.search(r"\((docs/[\w/.-]+\.md)", gain)
            return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", gain) or "none stated", page[1] if page else ""
    return "not in README", ""


def date_of(page: str) -> str:
    """Returns the date of the last commit that has changed ``page``, a path in the repository."""
    command = ["git", "log", "-1", "--format=%cs", "--", page]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Prints the ledger as a table."""
    reaches = {feature.name: reach_of(roots_of(feature)) for feature in FEATURES}
    users = Counter(file for reach in reaches.values() for file in reach)
    table = Table(
        "feature",
        "own lines",
        "test s",
        "gain",
        "evidence",
        "of",
        "goes when",
        title="What each feature costs and gives",
    )
    for feature in FEATURES:
        own = {file for file in reaches[feature.name] if users[file] == 1}
        gain, page = readme_row(feature.name)
        switches = [switch for modules in feature.switches.values() for switch in switches_of(*modules)]
        ends = dict.fromkeys(
            switch.remove_when for switch in switches if isinstance(switch, Patch) and switch.remove_when
        )
        seconds = f"{test_seconds(own, feature.name):.0f}"
        table.add_row(
            feature.name, str(lines_of(own)), seconds, gain, page, date_of(page) if page else "", "; ".join(ends)
        )
    shared = {file for file, count in users.items() if count > 1}
    table.add_row("shared", str(lines_of(shared)), "", "", "", "", "")
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
