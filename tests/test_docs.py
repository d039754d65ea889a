"""Tests that README, docs/ and examples are true: flags, metrics, paths, and every command."""

import ast
import functools
import inspect
import json
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import rl_accel
from rl_accel.config import describe_flags, resolve
from rl_accel.features import FEATURES
from rl_accel.lab.ab.recipe import load
from rl_accel.rollout.round_driver import METRICS_PREFIX, StepResult
from rl_accel.rollout.tail_decisions import RoundMetrics

REPO = Path(__file__).resolve().parent.parent
PAGES = [*REPO.glob("*.md"), *REPO.glob("docs/**/*.md"), *REPO.glob("examples/*/README.md")]
PAGES.sort(key=lambda path: (len(path.parts), path))
FEATURE_ROW = re.compile(r"^\| \[`(\w+)`\]\((\S+)\) \|", re.MULTILINE)
LANGUAGES = {"sh", "python", "yaml", "text", "json", "make"}
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page; ``place`` is the page and the line where its fence opens."""

    place: str
    language: str
    text: str


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in FENCED.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(f"{page.relative_to(REPO)}:{line}", match[2], textwrap.dedent(match[3]))


def prose_of(page: Path) -> str:
    return FENCED.sub("", page.read_text())


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def test_contributing_has_a_row_for_every_file_of_end_to_end_tests(repo):
    rows = [line for line in (repo / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("|")]
    for file in (repo / "tests/e2e").glob("test_*.py"):
        assert any(f"`{file.name}`" in row for row in rows), file.name


def test_the_support_matrix_has_a_row_for_every_feature(repo):
    rows = re.findall(r"^\| `(\w+)` \|", (repo / "docs" / "support-matrix.md").read_text(), re.MULTILINE)
    assert {feature.name for feature in FEATURES} <= set(rows)


def test_readme_and_pages_of_features_are_short_and_readme_has_a_row_for_every_feature(repo):
    text = (repo / "README.md").read_text()
    assert [row[1] for row in FEATURE_ROW.finditer(text)] == [feature.name for feature in FEATURES]
    for page in (repo / "README.md", *(page_of(feature.name) for feature in FEATURES)):
        assert len(page.read_text().splitlines()) <= 80, page


def page_of(feature: str) -> Path:
    return REPO / dict(FEATURE_ROW.findall((REPO / "README.md").read_text()))[feature]


@pytest.mark.parametrize("feature", [feature.name for feature in FEATURES])
def test_the_page_of_a_feature_has_all_its_flags_with_their_defaults(feature):
    rows = re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \| \S", page_of(feature).read_text(), re.MULTILINE)
    prefix = f"{feature}."
    flags = [(key.removeprefix(prefix), default) for key, default, _ in describe_flags() if key.startswith(prefix)]
    wanted = {name: json.loads(default) for name, default in flags}
    documented = {name: default.strip() for name, default in rows if name in wanted}
    assert documented == {name: "null" if default is None else str(default) for name, default in wanted.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_flags_files_and_names_in_a_page_exist(page):
    """``+rl_accel.…``, ``folder/file.py`` from the root, diagrams included, and in prose `rl_accel.…`, of a module or a flag."""
    text, known = page.read_text(), {key for key, _, _ in describe_flags()} | {feature.name for feature in FEATURES}
    assert set(re.findall(r"\+rl_accel\.([\w.]*\w)", text)) <= known
    if page.name == "CHANGELOG.md":  # names what is gone
        return
    folders = "rl_accel|patches|integrations|tests|docs|examples|requirements"
    named = re.findall(rf"(?<![\w./-])((?:{folders})/[\w/-]+\.(?:py|md|txt|json|yaml|png|sh))\b", text)
    assert [path for path in named if not (REPO / path).exists()] == []
    for name in {*re.findall(r"`rl_accel\.(\w+(?:\.\w+)*)(?:\(.*?\))?`", prose_of(page))} - known:
        assert pkgutil.resolve_name(f"rl_accel.{name}") is not None


def described_metrics(feature: str) -> set[str]:
    """The names in the first cells of the feature's table in docs/metrics.md."""
    page = (REPO / "docs" / "metrics.md").read_text()
    section = re.search(rf"^## {feature}$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    cells = re.findall(r"^\| (`[^|]*`) \|", section[1] if section else "", re.MULTILINE)
    return {name.rpartition("/")[2] for cell in cells for name in re.findall(r"`([\w/<>]+)`", cell)}


def test_the_metrics_of_tail_batching_are_all_described():
    known = {field.name: 0.0 for field in fields(RoundMetrics)}
    logged = StepResult(round=RoundMetrics(**{**known, "number": 1, "kind": "short"})).metrics()
    names = {name.removeprefix(METRICS_PREFIX) for name in logged}
    assert described_metrics("tail_batching") == names | {"ghost_keys"}


CLOCK = "telemetry.stage_clock:"
LOGGED_BY = {
    "advantages": ["patches.parity:with_fallback"],
    "gae": ["patches.parity:with_fallback", "patches.verl.gae:_make"],
    "overlap_validation": ["patches.verl.overlap_validation:_make_step"],
    "reward_timeout": ["integrations.ray.reward_anchors:Collector", "reward.adaptive_timeout:AnchorStore"],
    "sampler": ["patches.verl.sampler:_adaptive"],
    "telemetry": ["integrations.verl.telemetry:TelemetryObserver.__call__", f"{CLOCK}completion", f"{CLOCK}generation"],
}
"""By feature, the functions that name its metrics: as a key of a dictionary, or to metrics.add and metrics.put."""


@pytest.mark.parametrize("feature", LOGGED_BY)
def test_the_metrics_that_are_described_are_those_that_are_logged(feature):
    names: list[ast.expr | None] = []
    for function in LOGGED_BY[feature]:
        source = inspect.getsource(pkgutil.resolve_name(f"rl_accel.{function}"))
        for node in ast.walk(ast.parse(textwrap.dedent(source))):
            if isinstance(node, ast.Dict):
                names += node.keys
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                names.append(node.slice)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("metrics.add", "metrics.put"):
                names.append(node.args[0])
    named = [name for name in names if isinstance(name, ast.Constant | ast.JoinedStr)]
    strings = [ast.unparse(name).removeprefix("f")[1:-1] for name in named]
    if feature == "reward_timeout":
        strings += pkgutil.resolve_name("rl_accel.integrations.ray.reward_anchors:_COUNTS")
    logged = {name.rpartition("/")[2] for name in strings}
    described = {name for name in described_metrics(feature) if "<" not in name}
    assert described | {"applied"} == {name for name in logged if "{" not in name} | {"applied"}


def test_every_block_says_its_language():
    """A block without one, or an indented block, would not be tried by the tests below."""
    assert [block.place for block in BLOCKS if block.language not in LANGUAGES] == []
    unclosed = [str(page) for page in PAGES if "```" in prose_of(page)] + [x.place for x in BLOCKS if "```" in x.text]
    assert unclosed == []
    indented = {page: re.findall(r"\n\n(    [^\s*|-].*)", prose_of(page)) for page in PAGES}
    assert {page: lines for page, lines in indented.items() if lines} == {}


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """A folder with what commands of the pages refer to."""
    desk = tmp_path_factory.mktemp("desk")
    for folder in ("examples", "tests"):
        (desk / folder).symlink_to(REPO / folder)
    for folder in ("RUN_DIR", "RUN_A", "RUN_B", "FOLDER", "out/code", "out/gsm8k", "out/first/stock-seed0"):
        (desk / folder).mkdir(parents=True)
    for step in (1, 2):
        (desk / f"RUN_DIR/{step}.jsonl").write_text("")
    steps = [{"trained": {"0:1": 1, "0:2": 2}}, {"trained": {"0:3": 3}}]
    (desk / "ledger.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return desk


@pytest.fixture(scope="module", params=["checkout", pytest.param("wheel", marks=pytest.mark.full)])
def run(request, clean_environment, desk):
    """``run(*words)``: the command's output, from this checkout or from the wheel alone; each command is run once."""
    if request.param == "wheel":
        environment = request.getfixturevalue("wheel_environment")
    else:
        path = f"{Path(sys.executable).parent}:{clean_environment['PATH']}"
        environment = {**clean_environment, "PATH": path}

    @functools.cache
    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=desk, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

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

QUICK = ("flags", "doctor", "status", "slime-config")


def is_run(words: list[str]) -> bool:
    """Whether this command of ``rl-accel`` is quick enough to be run, or acts on nothing."""
    if words[0] != "rl-accel":
        return False
    quick = words[1] in QUICK and not {"--recipe", "--"} & set(words)
    return quick or bool({"--help", "--dry-run", "--version"} & set(words))


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


RECIPES = [block for block in BLOCKS if block.language == "yaml"]
COMMANDS = [(block.place, command) for block in BLOCKS if block.language == "sh" for command in commands_of(block.text)]
IN_PROSE = [
    (page.relative_to(REPO), [word for word in shlex.split(command) if word not in ("…", "...")])
    for page in PAGES
    for command in re.findall(r"(?<!`)`((?:rl-accel|make) [^`\n]+)`(?!`)", prose_of(page))
]


@pytest.fixture(scope="module")
def complaints(run) -> dict[tuple[str, ...], str]:
    """What ``rl-accel`` says against the words of commands that it reads without acting, by these words; "" for nothing."""
    commands = [*(split(command) for _, command in COMMANDS), *(words for _, words in IN_PROSE)]
    read = [words[1:] for words in commands if words[0] == "rl-accel" and not is_run(words)]
    return dict(zip(map(tuple, read), json.loads(run("python", "-c", PARSE, json.dumps(read))), strict=True))


def check_overrides(words: list[str]) -> None:
    """Have the schema read ``+rl_accel.feature.flag=value`` as it would in a run of verl."""
    for word in words:
        if word.startswith("+rl_accel."):
            key, _, value = word.removeprefix("+rl_accel.").partition("=")
            feature, _, flag = key.partition(".")
            loaded = yaml.safe_load(value)
            resolve([("the page", {feature: {flag: loaded} if flag else loaded})])


def check_targets(words: list[str]) -> None:
    makefile = (REPO / "Makefile").read_text()
    for target in (word for word in words if "=" not in word):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make has no target {target}"


def check_command(command: str, run, complaints) -> None:
    words = split(command)
    if words[0].startswith(".venv/bin/"):  # a contributor's, in the root of the checkout
        words[0] = words[0].removeprefix(".venv/bin/")
        command = shlex.join(words)
    program, arguments = words[0], words[1:]
    if is_run(words) or words[:2] == ["python", "-c"]:
        run("bash", "-euo", "pipefail", "-c", command)
    elif program == "rl-accel":
        assert complaints[tuple(arguments)] == ""
        check_overrides(arguments)
    elif program == "make":
        check_targets(arguments)
    elif program in ("python", ".venv-vllm/bin/python", ".venv-sglang/bin/python") and arguments[:2] == [
        "-m",
        "verl.trainer.main_ppo",
    ]:
        check_overrides(arguments)
    elif program == "python" and arguments[:2] == ["-m", "pytest"]:
        paths = [word for word in arguments[2:] if word.startswith("tests")]
        assert paths
        assert all((REPO / path).exists() for path in paths)
    elif program == "python":
        own = arguments[0] not in ("train.py", "train_async.py")  # those are slime's
        assert not own or (REPO / arguments[0]).exists()
    elif words[:2] == ["pip", "install"]:
        target = words[-1].removeprefix("git+")
        wheel = f"dist/rl_accel-{rl_accel.__version__}-py3-none-any.whl"  # its name is checked in test_packaging.py
        known = target in (".", wheel, "https://github.com/verl-project/verl") or target.startswith("https://HOST/")
        assert known or words[2] == "-e" or re.match(r"\.\[\w+\]", target)
    elif program == "jq":
        if shutil.which("jq") is None:
            pytest.skip("jq is not installed")
        run("bash", "-euo", "pipefail", "-c", f'[ -z "$({command})" ]')
    else:
        assert program in ("git", "cd", "source", "."), "nothing checks this command"


@pytest.mark.slow
def test_commands_work_as_written(run, complaints, subtests):
    """Quick commands are run; of the others, options, flags, targets and paths are checked."""
    for place, command in COMMANDS:
        with subtests.test(f"{place}: {command}"):
            check_command(command, run, complaints)


@pytest.mark.slow
def test_commands_named_in_prose_exist(complaints, subtests):
    for page, words in IN_PROSE:
        with subtests.test(f"{page}: {shlex.join(words)}"):
            if words[0] == "make":
                check_targets(words[1:2])
            elif not is_run(words):
                assert re.match("MissingParameter|$", complaints[tuple(words[1:])])


SNIPPETS = """
import runpy, sys
import rl_accel
for path in sys.argv[1:]:
    runpy.run_path(path, run_name="__main__")
    rl_accel.disable()
"""


@pytest.mark.slow
def test_snippets_run(run, tmp_path):
    """All in one process; the traceback of one that fails has its page and line in the name of its file."""
    paths = []
    for block in BLOCKS:
        if block.language == "python":
            paths.append(tmp_path / f"{block.place.replace('/', '-')}.py")
            paths[-1].write_text(block.text)
    run("python", "-c", SNIPPETS, *map(str, paths))


@pytest.mark.parametrize("block", RECIPES, ids=lambda block: block.place)
def test_a_recipe_in_a_page_is_one(block, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(block.text)
    load(path)
