"""From a recipe to the runs it asks for: placeholders filled in, one :class:`RunPlan` for each arm and seed."""

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_accel.errors import RecipeError
from rl_accel.lab.ab.recipe import Recipe, nearest

_PLACEHOLDER = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True)
class RunPlan:
    """One run of the trainer, everything filled in."""

    arm: str
    seed: int
    steps: int
    directory: Path
    command: tuple[str, ...]
    env: Mapping[str, str | None] = field(default_factory=dict)
    """What the recipe adds to the environment; None removes a variable."""
    timeout_s: float | None = None

    @property
    def name(self) -> str:
        return f"{self.arm}-seed{self.seed}"

    @property
    def fingerprint(self) -> str:
        """Identifies command and environment, so that a resumed run only keeps results of the same command."""
        text = json.dumps([self.command, sorted(self.env.items()), self.steps])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan_runs(
    recipe: Recipe,
    recipe_dir: Path,
    out: Path,
    arms: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    steps: int | None = None,
) -> list[RunPlan]:
    """Return the runs in the order they are made: all arms of one seed, then the next seed. An arm that names seeds of its
    own leaves out the others.

    Raises:
        RecipeError: an arm is unknown, seeds repeat or are negative, steps is below 1, or a placeholder is unknown.
    """
    arms = list(recipe.arms) if arms is None else list(arms)
    seeds = recipe.seeds if seeds is None else list(seeds)
    steps = recipe.steps if steps is None else steps
    for arm in arms:
        if arm not in recipe.arms:
            raise RecipeError(f"--arms: no arm {arm!r}{nearest(arm, recipe.arms)}; arms are {', '.join(recipe.arms)}")
    if not arms or len(set(arms)) < len(arms):
        raise RecipeError(f"--arms wants different arms, found {', '.join(arms) or 'nothing'}")
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise RecipeError(f"--seeds wants different numbers of at least 0, found {seeds}")
    if len(seeds) > 1 and not recipe.seed_overrides:
        raise RecipeError("--seeds: this recipe has no seed_overrides, so all runs would be the same")
    if steps < 1:
        raise RecipeError(f"--steps wants at least 1, found {steps}")
    kept = {name: arm.seeds for name, arm in recipe.arms.items() if arm.seeds is not None}
    return [
        _plan(recipe, recipe_dir, out, arm, seed, steps)
        for seed in seeds
        for arm in arms
        if seed in kept.get(arm, seeds)
    ]


def prepare_command(recipe: Recipe, recipe_dir: Path, out: Path) -> tuple[list[str], dict[str, str | None]]:
    """Return the command that prepares data and models (empty if there is none) and the recipe's environment for it."""
    known = {"recipe_dir": str(recipe_dir), "out": str(out)}
    # variables that name a run have no meaning before there is one
    env = {key: value for key, value in recipe.env.items() if not _unknown(str(value), known)}
    return _command(recipe.prepare, known, "prepare"), _environment(env, known, "env")


def _plan(recipe: Recipe, recipe_dir: Path, out: Path, arm: str, seed: int, steps: int) -> RunPlan:
    directory = out / f"{arm}-seed{seed}"
    known = {
        "recipe_dir": str(recipe_dir),
        "out": str(out),
        "run_dir": str(directory),
        "arm": arm,
        "seed": str(seed),
        "steps": str(steps),
    }
    overrides = [
        *recipe.overrides,
        *recipe.seed_overrides,
        *recipe.steps_overrides,
        *recipe.arms[arm].overrides,
    ]
    command = _command(recipe.command, known, "command") + [_fill(item, known) for item in overrides]
    env = _environment(recipe.env, known, "env") | _environment(recipe.arms[arm].env, known, f"arms.{arm}.env")
    return RunPlan(arm, seed, steps, directory, tuple(command), env, recipe.timeout_s)


def _command(words: Sequence[str], known: Mapping[str, str], where: str) -> list[str]:
    filled = [_strict(word, known, where) for word in words]
    return [sys.executable, *filled[1:]] if filled[:1] == ["python"] else filled


def _environment(env: Mapping[str, Any], known: Mapping[str, str], where: str) -> dict[str, str | None]:
    filled: dict[str, str | None] = {}
    for key, value in env.items():
        if isinstance(value, bool):
            value = str(value).lower()  # "False" would be true to most programs
        filled[key] = None if value is None else _strict(str(value), known, f"{where}.{key}")
    return filled


def _strict(text: str, known: Mapping[str, str], where: str) -> str:
    for name in _unknown(text, known):
        raise RecipeError(
            f"{where}: unknown placeholder ${{{name}}}{nearest(name, known)}; it may use {', '.join(known)}"
        )
    return _fill(text, known)


def _unknown(text: str, known: Mapping[str, str]) -> list[str]:
    return [name for name in _PLACEHOLDER.findall(text) if name not in known]


def _fill(text: str, known: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: known.get(match[1], match[0]), text)
