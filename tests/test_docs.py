"""What README, the pages of docs/ and the examples say is true: flags, metrics, paths, and every command."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from rl_accel.config import describe_flags, resolve
from rl_accel.features import FEATURES

REPO = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [*REPO.glob("*.md"), *REPO.glob("docs/**/*.md"), *REPO.glob("examples/*/README.md")],
    key=lambda path: (len(path.parts), path),
)
FEATURE_ROW = re.compile(r"^\| \[`(\w+)`\]\((\S+)\) \|", re.MULTILINE)
LANGUAGES = {"sh", "python", "yaml", "text", "json", "make"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; ``line`` is where its fence opens."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPO)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    opened: tuple[int, str, str] | None = None
    inside: list[str] = []
    for number, line in enumerate(lines, 1):
        fence = re.match(r"^( *)```(\w*)", line)
        if opened is None and fence:
            opened, inside = (number, fence[2], fence[1]), []
        elif opened is not None and line.strip() == "```":
            yield Block(page, opened[0], opened[1], "\n".join(x.removeprefix(opened[2]) for x in inside))
            opened = None
        elif opened is not None:
            inside.append(line)
    assert opened is None, f"{page}: the fence of line {opened[0]} is not closed"


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def prose_of(page: Path) -> str:
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def of(language: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for block in BLOCKS if block.language == language]


# -- flags, metrics, paths ----------------------------------------------------------------------------------------------


def test_readme_is_short_and_has_a_row_for_every_feature(repo):
    text = (repo / "README.md").read_text()
    assert len(text.splitlines()) <= 90
    assert [row[1] for row in FEATURE_ROW.finditer(text)] == [feature.name for feature in FEATURES]


def page_of(feature: str) -> Path:
    return REPO / dict(FEATURE_ROW.findall((REPO / "README.md").read_text()))[feature]


@pytest.mark.parametrize("feature", [feature.name for feature in FEATURES])
def test_the_page_of_a_feature_has_all_its_flags_with_their_defaults(feature):
    rows = re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \| \S", page_of(feature).read_text(), re.MULTILINE)
    wanted = {
        key.removeprefix(f"{feature}."): json.loads(default)
        for key, default, _ in describe_flags()
        if key.startswith(f"{feature}.")
    }
    documented = {name: default.strip() for name, default in rows if name in wanted}
    assert documented == {name: "null" if default is None else str(default) for name, default in wanted.items()}


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(REPO))) for page in PAGES])
def test_flags_named_anywhere_exist(page):
    known = {key for key, _, _ in describe_flags()} | {feature.name for feature in FEATURES}
    named = set(re.findall(r"\+rl_accel\.([\w.]*\w)", page.read_text()))
    assert named <= known


def metrics_of(page: Path) -> set[str]:
    """The names in the first cells of the tables below a heading that says Metrics."""
    section = re.search(r"^## Metrics$(.*?)(?=^## |\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    cells = re.findall(r"^\| (`[^|]*`) \|", section[1] if section else "", re.MULTILINE)
    return {name.rpartition("/")[2] for cell in cells for name in re.findall(r"`([\w/<>]+)`", cell)}


def test_the_metrics_of_tail_batching_are_all_described():
    from rl_accel.rollout.driver import METRICS_PREFIX, StepResult
    from rl_accel.rollout.tail_decisions import RoundMetrics

    known = {field.name: 0.0 for field in fields(RoundMetrics)}
    logged = StepResult(round=RoundMetrics(**{**known, "number": 1, "kind": "short"})).metrics()
    names = {name.removeprefix(METRICS_PREFIX) for name in logged}
    assert metrics_of(page_of("tail_batching")) == names | {"ghost_keys"}


@pytest.mark.parametrize("feature", [feature.name for feature in FEATURES if feature.name != "tail_batching"])
def test_a_metric_that_a_page_describes_is_logged_somewhere(feature):
    source = "\n".join(
        path.read_text() for folder in ("rl_accel", "patches", "integrations") for path in (REPO / folder).rglob("*.py")
    )
    strings = set(re.findall(r"\w+", source))
    assert {name for name in metrics_of(page_of(feature)) if "<" not in name} <= strings | {"applied"}


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(REPO))) for page in PAGES])
def test_files_named_in_a_page_exist(page):
    """``folder/file.py`` anywhere, diagrams included, from the root of the repository."""
    if page.name == "CHANGELOG.md":  # names files that are gone
        return
    folders = "rl_accel|patches|integrations|tests|docs|examples|requirements"
    named = re.findall(rf"(?<![\w./-])((?:{folders})/[\w/-]+\.(?:py|md|txt|json|yaml|png|sh))\b", page.read_text())
    assert [path for path in named if not (REPO / path).exists()] == []


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(REPO))) for page in PAGES])
def test_modules_named_in_prose_exist(page):
    """`rl_accel.…` in backticks is a flag, a module, or something in a module."""
    if page.name == "CHANGELOG.md":
        return
    flags = {f"rl_accel.{key}" for key, _, _ in describe_flags()} | {f"rl_accel.{f.name}" for f in FEATURES}
    missing = []
    for name in re.findall(r"`(rl_accel(?:\.\w+)+)(?:\(.*?\))?`", prose_of(page)):
        parts = name.split(".")
        files = [REPO.joinpath(*parts[:n]) for n in range(2, len(parts) + 1)]
        in_module = any(path.with_suffix(".py").exists() for path in files) or (files[-1] / "__init__.py").exists()
        public = len(parts) == 2 and parts[1] in ("enable", "disable", "enabled", "status")
        if name not in flags and not in_module and not public:
            missing.append(name)
    assert missing == []


# -- commands -----------------------------------------------------------------------------------------------------------


def test_every_block_says_its_language():
    """A block without one, or an indented block, would not be tried by the tests below."""
    assert [str(block) for block in BLOCKS if block.language not in LANGUAGES] == []
    indented = [
        f"{page.relative_to(REPO)}: {line}"
        for page in PAGES
        for line in re.findall(r"\n\n(    [^\s*|-].*)", prose_of(page))
    ]
    assert indented == []


@pytest.fixture(scope="session")
def desk(tmp_path_factory, wheel) -> Path:
    """A folder with what commands of the pages refer to."""
    desk = tmp_path_factory.mktemp("desk")
    (desk / "examples").symlink_to(REPO / "examples")
    (desk / "tests").symlink_to(REPO / "tests")
    (desk / "dist").symlink_to(wheel.parent)
    for folder in ("RUN_DIR", "RUN_A", "RUN_B", "FOLDER", "out/code", "out/first/stock-seed0"):
        (desk / folder).mkdir(parents=True)
    for step in (1, 2):
        (desk / f"RUN_DIR/{step}.jsonl").write_text("")
    steps = [{"trained": {"0:1": 1, "0:2": 2}}, {"trained": {"0:3": 3}}]
    (desk / "ledger.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return desk


@pytest.fixture(scope="session")
def run_shell(wheel_environment, desk):
    """``run_shell(command)`` runs it with the installed wheel, once for all pages; asserts that it succeeds."""
    done: dict[str, subprocess.CompletedProcess[str]] = {}

    def run(command: str) -> None:
        if command not in done:
            shell = ["bash", "-euo", "pipefail", "-c", command]
            done[command] = subprocess.run(
                shell, cwd=desk, env=wheel_environment, capture_output=True, text=True, timeout=240
            )
        result = done[command]
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"

    return run


PARSE = """
import json, sys, click
from rl_accel.__main__ import cli

def problem(words):
    context, command, name = click.Context(cli, info_name="rl-accel"), cli, "rl-accel"
    while isinstance(command, click.Group) and words:
        name = words.pop(0)
        command = command.get_command(context, name)
        if command is None:
            return f"no command {name}"
    try:
        command.make_context(name, words)
    except click.ClickException as error:
        return f"{type(error).__name__}: {error.format_message()}"
    return ""

print(json.dumps([problem(words) for words in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="session")
def parse(wheel_environment, desk):
    """``parse(commands)`` has the installed ``rl-accel`` read the words of each without acting; returns its complaints."""

    def run(commands: list[list[str]]) -> list[str]:
        command = ["python", "-c", PARSE, json.dumps(commands)]
        done = subprocess.run(command, cwd=desk, env=wheel_environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        problems: list[str] = json.loads(done.stdout)
        return problems

    return run


QUICK = ("flags", "doctor", "status", "slime-config")


def commands_of(text: str) -> Iterator[str]:
    """The commands of a block: comments gone, continued lines joined."""
    for line in text.replace("\\\n", " ").splitlines():
        command = re.sub(r"(^|\s+)#.*$", "", line).strip()
        if command:
            yield command


def split(command: str) -> list[str]:
    """The words of a command, without variables set before it and without what follows a pipe or a redirection."""
    words = shlex.split(command)
    ends = [n for n, word in enumerate(words) if word in ("|", ">", "&&")]
    words = words[: ends[0]] if ends else words
    while words and re.match(r"^[A-Z_]+=", words[0]):
        words.pop(0)
    return words


def check_overrides(words: list[str]) -> None:
    """Have the schema read ``+rl_accel.feature.flag=value`` as it would in a run of verl."""
    import yaml

    for word in words:
        if word.startswith("+rl_accel."):
            key, _, value = word.removeprefix("+rl_accel.").partition("=")
            feature, _, flag = key.partition(".")
            loaded = yaml.safe_load(value)
            resolve([("the page", {feature: {flag: loaded} if flag else loaded})])


def check_contributors_command(program, arguments, repo, run_shell) -> None:
    """A command of the environment that ``make setup`` builds, typed in the root of the checkout."""
    if program == "rl-accel" or arguments[0] == "-c":
        run_shell(shlex.join([program, *arguments]))
    elif arguments[:2] == ["-m", "pytest"]:
        assert all((repo / path).exists() for path in arguments[2:]), arguments
    else:
        assert (program, arguments[0]) == ("pip", "install"), arguments


@pytest.mark.slow
@pytest.mark.parametrize("block", of("sh"))
def test_a_command_works_as_written(block, repo, desk, run_shell, parse, wheel):
    """Quick commands are run from the wheel; of the others, options, flags, targets and paths are checked."""
    for command in commands_of(block.text):
        words = split(command)
        program, arguments = words[0], words[1:]
        is_quick = program == "rl-accel" and arguments[0] in QUICK and "--recipe" not in arguments
        if is_quick or (program == "rl-accel" and {"--help", "--dry-run", "--version"} & set(arguments)):
            run_shell(command)
        elif program == "rl-accel":
            assert parse([arguments]) == [""], command
            check_overrides(arguments)
        elif program == "make":
            for target in (word for word in arguments if "=" not in word):
                assert re.search(rf"^{target}:", (repo / "Makefile").read_text(), re.MULTILINE), command
        elif program in ("python", ".venv-vllm/bin/python") and arguments[:2] == ["-m", "verl.trainer.main_ppo"]:
            check_overrides(arguments)
        elif program in (".venv/bin/python", ".venv/bin/pip", ".venv/bin/rl-accel"):
            check_contributors_command(program.rpartition("/")[2], arguments, repo, run_shell)
        elif program == "python":
            own = arguments[0] not in ("train.py", "train_async.py")  # those are slime's
            assert arguments[0] in ("-m", "-c") or not own or (repo / arguments[0]).exists(), command
        elif words[:2] == ["pip", "install"]:
            target = words[-1]
            known = target in (".", f"dist/{wheel.name}") or target.startswith("git+https://HOST/")
            assert known or words[2] == "-e" or re.match(r"\.\[\w+\]", target), command
        elif program == "jq":
            if shutil.which("jq") is None:
                pytest.skip("jq is not installed")
            run_shell(f'[ -z "$({command})" ]')
        else:
            assert program in ("git", "cd", "source", "."), f"nothing checks the command {command!r}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(REPO))) for page in PAGES])
def test_commands_named_in_prose_exist(page, repo, parse):
    named = set(re.findall(r"(?<!`)`((?:rl-accel|make) [^`\n]+)`(?!`)", prose_of(page)))
    makefile = (repo / "Makefile").read_text()
    words = {command: [word for word in shlex.split(command) if word not in ("…", "...")] for command in named}
    for command in (command for command in named if words[command][0] == "make"):
        assert re.search(rf"^{words[command][1]}:", makefile, re.MULTILINE), command
    ours = [command for command in named if words[command][0] == "rl-accel" and "--help" not in words[command]]
    problems = dict(zip(ours, parse([words[command][1:] for command in ours]), strict=True)) if ours else {}
    assert {c: p for c, p in problems.items() if p and not p.startswith("MissingParameter")} == {}


@pytest.mark.slow
@pytest.mark.parametrize("block", of("python"))
def test_a_snippet_runs(block, wheel_environment, desk, tmp_path):
    script = tmp_path / "snippet.py"
    script.write_text(block.text)
    done = subprocess.run(
        ["python", str(script)], cwd=desk, env=wheel_environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", of("yaml"))
def test_a_recipe_in_a_page_is_one(block, tmp_path):
    """A recipe has a command; arms for `rl-accel compare` are nothing but lists of runs."""
    from rl_accel.lab.ab.compare import load_arms
    from rl_accel.lab.ab.recipe import load

    path = tmp_path / "recipe.yaml"
    path.write_text(block.text)
    if "command:" in block.text or "extends:" in block.text:
        load(path)
    else:
        load_arms(path)
