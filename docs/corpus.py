"""Writes docs/corpus.md: what rl-accel answers to every launch script of verl, verl-recipe and slime, feature by feature.

    .venv/bin/python docs/corpus.py --verl-root DIR --recipe-root DIR --slime-root DIR [--page FILE]

For a launch line of verl, hydra composes the configuration for the installed verl. Each feature is then requested by name and set
up as in the driver process and, for a recipe with its own trainer, as in that trainer's constructor. Nothing is started or
downloaded (``launch_lines.py``).
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import inspect
import io
import logging
import os
import re
import shlex
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch_lines import launch_lines

_FOLDERS = (
    "HOME HDFS_ROOT RAY_DATA_HOME DATA_ROOT MODEL_PATH WORKING_DIR HF_HOME ckpts_home LORA_ADAPTER_PATH"
    " SLURM_SUBMIT_DIR VERL_PROFILE_SAVE_PATH"
)
_NAMES = "project_name exp_name experiment_name USER"
GIVEN = {**dict.fromkeys(_FOLDERS.split(), "/h"), **dict.fromkeys(_NAMES.split(), "e"), "WORLD_SIZE": "1", "RANK": "0"}
GIVEN |= {"RUNTIME_ENV": "/h/e.yaml", "DEVICE": "gpu", "INFER_BACKEND": "vllm", "USE_DUMMY_MODEL": "False"}
"""Environment variables that the scripts expect their user to set."""
HEAD = """# Launch scripts of verl and slime

Written by `make corpus`, which tries every launch script of these projects with every feature, asked for by name, on the installed
verl {version}. Here are counts. A refusal is one line that names key, wanted and found; "without effect" is a line that the
feature is on and has nothing to do; a crash would be an error that is neither.

"""


@dataclass
class Corpus:
    """Results for the launch lines of one project.

    Attributes:
        lines: number of launch lines, by the program that they start.
        outcomes: number of launch lines, by feature and outcome (accepted, refused, without effect, crash).
        reasons: number of launch lines by reason, for each pair of feature and outcome.
    """

    lines: Counter[str] = field(default_factory=Counter)
    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    reasons: dict[tuple[str, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, feature: str, outcome: str, reason: str = "") -> None:
        """Counts the ``outcome`` of ``feature`` on one launch line."""
        self.outcomes[feature][outcome] += 1
        if reason:
            self.reasons[feature, outcome][reason] += 1


def main_and_overrides(words: Sequence[str]) -> tuple[str, list[str], str, str]:
    """Returns four parts of a command line: the main module that it starts ("" if none), hydra's overrides, and the values of
    ``--config-path`` and ``--config-name``."""
    words = list(words[1:])
    if "--" in words:  # ray job submit ... -- python ...
        words = words[words.index("--") + 1 :]
    if len(words) == 1:
        words = shlex.split(words[0])
    starts = [n for n, word in enumerate(words) if word == "-m" or word.endswith(".py")]
    if not starts:
        return "", [], "", ""
    first = starts[0] + (words[starts[0]] == "-m")
    main = words[first].removesuffix(".py").replace("/", ".") if first < len(words) else ""
    options = {"--config-path": "", "--config-name": ""}
    overrides = []
    rest = iter(words[first + 1 :])
    for word in rest:
        name, _, value = word.partition("=")
        if name in options:
            options[name] = value or next(rest, "")
        elif word.startswith("~") or ("=" in word and not word.startswith("-")):
            overrides.append(word)
    return main, overrides, options["--config-path"], options["--config-name"].removesuffix(".yaml")


def verl_corpus(roots: Sequence[Path]) -> Corpus:
    """Tries every launch line of the scripts below ``roots`` with every feature."""
    from rl_accel.integrations.verl import drafts

    drafts._vllm_version = lambda: drafts.TRIED[0]  # as if a tested version were installed
    corpus = Corpus()
    for root in roots:
        for words in launch_lines(root, GIVEN):
            main, overrides, path, name = main_and_overrides(words)
            run, built, why = _run(root, main, overrides, path, name)
            corpus.lines[why] += 1
            if run is not None:
                _try_features(corpus, run, built)
    return corpus


def _run(root: Path, main: str, overrides: list[str], path: str, name: str) -> tuple[Any, Any, str]:
    """Returns the composed run, the recipe's own trainer (None if it has none), and a description of what the launch line starts.

    Run and trainer are None if the line starts no PPO trainer that hydra configures, or if the configuration cannot be composed.
    """
    from rl_accel.patches.verl.verl_run import MAINS, VerlRun

    folder = None
    built = None
    if main not in MAINS:
        file = _recipe_file(root, main)
        text = file.read_text() if file else ""
        configured = re.search(r'hydra\.main\(config_path="([^"]+)", config_name="(\w+)"', text)
        if file is None or not configured or "ppo" not in text:
            return None, None, "start no PPO trainer that hydra configures"
        folder = file.parent / configured[1]
        name = name or configured[2]
        built = _recipe_trainer(file.parent)
        main = "verl.trainer.main_ppo"
    if path:
        candidates = [Path(path), root / path, root / "recipe" / path, *((folder.parent / path,) if folder else ())]
        folder = next((place for place in candidates if place.is_dir()), folder)
    try:
        run = VerlRun.compose(main, overrides, folder, name)
    except Exception:  # hydra raises many classes for a key that this verl lacks
        return None, None, "do not compose"
    return run, built, f"compose ({run.trainer_kind if built is None else VerlRun(run.config, built).trainer_kind})"


def _recipe_file(root: Path, main: str) -> Path | None:
    parts = [part for part in main.split(".") if part]
    for start in range(len(parts)):
        for base in (root, root / "recipe"):
            if (file := base.joinpath(*parts[start:]).with_suffix(".py")).is_file():
                return file
    return None


def _recipe_trainer(folder: Path) -> Any:
    """Returns a stand-in for the trainer of the recipe in ``folder``; None if the recipe has no subclass of RayPPOTrainer.

    The stand-in has the same base class, and an own ``init_workers`` if the recipe's trainer has one. Its constructor never runs.
    """
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    text = "".join(file.read_text(errors="replace") for file in folder.rglob("*.py"))
    if not re.search(r"class \w+\(\w*RayPPOTrainer\)", text):
        return None
    own = {"init_workers": RayPPOTrainer.__init__} if "def init_workers" in text or "SeparateRay" in text else {}
    return object.__new__(type("RecipeTrainer", (RayPPOTrainer,), own))


def _try_features(corpus: Corpus, run: Any, built: Any) -> None:
    from rl_accel.config import resolve
    from rl_accel.errors import RlAccelError
    from rl_accel.features import FEATURES
    from rl_accel.patches.verl import config_intake
    from rl_accel.patches.verl.verl_run import VerlRun

    stock = _stock_problem(run.config)
    for name in ("auto", *(feature.name for feature in FEATURES)):
        config = run.config.copy()
        flags = resolve([("the corpus", {name: True})])
        try:
            idle, _ = config_intake.wire(VerlRun(config, in_driver=True), flags)
            if built is not None:
                idle |= config_intake.wire(VerlRun(config, built), flags)[0]
        except RlAccelError as error:
            corpus.add(name, "refused", str(error).partition(", found")[0].removeprefix(f"rl_accel.{name} "))
        except Exception as error:
            corpus.add(name, "crash", repr(error))
        else:
            if stock is None and (problem := _stock_problem(config)):
                corpus.add(name, "crash", f"verl refuses what we chose: {problem}")
            elif idle:
                corpus.add(name, "without effect", idle[name])
            else:
                corpus.add(name, "accepted")


def _stock_problem(config: Any) -> str | None:
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    try:
        inspect.unwrap(validate_config)(config.copy(), need_reference_policy(config), need_critic(config))
    except Exception as error:
        return repr(error)
    return None


def as_text(title: str, corpus: Corpus) -> str:
    """Returns the tables for one project in Markdown."""
    columns = ("accepted", "refused", "without effect", "crash")
    lines = [f"## {title}", "", "| launch lines | number |", "|---|---|"]
    lines += [f"| all | {corpus.lines.total()} |", *(f"| {why} | {n} |" for why, n in corpus.lines.most_common())]
    lines += ["", f"| feature | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for feature, counts in corpus.outcomes.items():
        lines.append(f"| `{feature}` | {' | '.join(str(counts[column]) for column in columns)} |")
    lines += ["", "| feature | outcome | why | lines |", "|---|---|---|---|"]
    for (feature, outcome), reasons in corpus.reasons.items():
        lines += [f"| `{feature}` | {outcome} | {why.replace('|', '/')} | {n} |" for why, n in reasons.most_common()]
    return "\n".join([*lines, ""])


def main() -> None:
    """Tries the scripts of the checkouts that the options name, and writes the page. Exits with 1 after a crash."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("--verl-root", "--recipe-root", "--slime-root"):
        parser.add_argument(option, type=Path, help="a checkout; left out where absent")
    parser.add_argument("--page", type=Path, help="file that the tables are written to, docs/corpus.md for that page")
    options = parser.parse_args()
    if options.slime_root and not importlib.util.find_spec("sglang"):
        parser.error("--slime-root wants the packages of requirements/slime.txt, found no sglang")
    roots = {"verl": options.verl_root, "verl-recipe": options.recipe_root}
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        parts = [(title, verl_corpus([root.resolve()])) for title, root in roots.items() if root]
        if options.slime_root:
            import corpus_slime

            parts.append(("slime", corpus_slime.corpus(options.slime_root.resolve(), Corpus())))
    text = HEAD.format(version=importlib.metadata.version("verl")) + "\n".join(as_text(*part) for part in parts)
    if options.page:
        options.page.write_text(text)
    print(text)
    crashes = sum(counts["crash"] for _, corpus in parts for counts in corpus.outcomes.values())
    sys.exit(bool(crashes))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
