"""Recipe files of A/B comparisons: typed schema, reader with checks, and planned training runs.

A recipe is a YAML mapping with the keys of :class:`Recipe`. Strings in ``command``, ``prepare``, ``env`` and every list of
overrides may contain placeholders:

==================  ===================================================================
``${recipe_dir}``   the folder of the recipe file
``${out}``          the folder given with ``--out``
``${run_dir}``      ``${out}/<arm>-seed<seed>``, the working directory of one run
``${arm}``          the name of the arm
``${seed}``         the seed of the run
``${steps}``        the number of training steps
``${gpus}``         the number of GPUs on each node (key ``gpus``)
``${nodes}``        the number of nodes (key ``nodes``)
``${oc.env:NAME}``  an environment variable of the shell that called ``rl-accel``
==================  ===================================================================

``prepare``, which runs once before all arms, may use only ``${recipe_dir}``, ``${out}`` and ``${oc.env:NAME}``. An unknown
placeholder in an override is left to hydra; elsewhere, it is an error. ``python`` as the first word of a command stands for the
interpreter that runs ``rl-accel``.

``extends: FILE`` (relative to the recipe) starts from another recipe, the base recipe. ``overrides`` are appended to the overrides
of the base recipe. ``env``, ``metrics``, ``checks`` and ``rollout`` are merged key by key. Every other key replaces the value in
the base recipe.

``platforms: {gpu: {...}, cpu: {...}}`` holds the settings that differ between machines: model, data, devices. The settings of the
chosen platform (default: the first) are merged into the recipe by the same rules. A platform may have a key ``extends`` too.

The runner sets three environment variables of each run: ``VERL_FILE_LOGGER_PATH`` (so ``trainer.logger`` must include ``file``),
``PYTHONUNBUFFERED``, and ``RAY_TMPDIR`` with a private folder. The runner removes ``RAY_ADDRESS``, and rl-accel's flags such as
``RL_ACCEL``, from the environment of the shell unless the recipe sets them.
"""

import math
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_accel.errors import RecipeError, did_you_mean, first_line, one_line
from rl_accel.telemetry.stage_clock import STAGES

CHECK_NAMES = (
    "completed",
    "identical",
    "same_training",
    "rollout_probs_diff",
    "reward_gain",
    "faster",
    "rollout_faster",
    "wasted_tokens",
    "prompts_lost",
    "same_reward",
    "ledger",
)
NOT_COMPARED = ("timing_*", "perf/*", "*/perf/*", "rl_accel/*", "*memory*", "*/mfu*", "*_mfu*")
"""Shell patterns of metrics that may differ between arms that train the same: times, throughput, memory, and those of rl-accel."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_ENV = "oc.env:"
_PLACEHOLDER = re.compile(r"\$\{(\w+|oc\.env:\w+)\}")


@dataclass
class Arm:
    """One variant of the training run. Adds overrides and environment variables to those that all arms of a recipe share."""

    description: str = ""
    overrides: list[str] = field(default_factory=list)
    env: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] | None = None
    """Seeds of this arm, a subset of the recipe's seeds; null: all seeds of the recipe."""
    needs: str = ""
    """Name of a Python module that the arm requires. If the module is missing, the arm is left out with a message."""


@dataclass
class Metrics:
    """Names of the metrics that a run logs, and settings for comparing the metrics of two arms. The default names are verl's."""

    reward: str = "critic/score/mean"
    """Metric shown as the reward curve and in the line of progress."""
    stage_prefix: str = "timing_s/"
    step: str = "step"
    """Name of the metric with the seconds of a whole step, without ``stage_prefix``: ``step`` for ``timing_s/step``."""
    stages: list[str] = field(default_factory=lambda: list(STAGES))
    """Names of the timed, non-overlapping stages of a step. The report shows the rest of the step as stage "other"."""
    warmup_steps: int = 2
    """Number of steps at the start of each run that do not count in stage times."""
    margin: str = "2%"
    """Largest difference in reward or validation at which two arms count as equal: a share of the baseline's gain (such as 2%), or
    a difference in units of the metric (such as 0.01)."""

    @property
    def step_metric(self) -> str:
        """Name of the metric with the seconds of a whole step."""
        return self.stage_prefix + self.step


@dataclass
class Checks:
    """Conditions that the runs of an A/B must meet. An empty list, an empty mapping or null turns a check off."""

    identical: list[str] = field(default_factory=list)
    """Names of metrics whose values must be equal in all arms, step by step, for runs with the same seed."""
    same_training: dict[str, float] = field(default_factory=dict)
    """Mapping from arm to the largest allowed difference from the baseline in the reward and in ``actor/pg_loss``, at any step. For
    arms that train the same but for rounding."""
    rollout_probs_diff: float | None = 1e-3
    """Largest allowed difference between the probabilities that the rollout engine and the trainer give to a token (verl's metric
    ``training/rollout_probs_diff_max``)."""
    reward_gain: float | None = None
    """Smallest allowed gain of every run: mean reward of the last fifth of the steps minus mean reward of the first fifth."""
    faster: dict[str, float] = field(default_factory=dict)
    """Mapping from stage to the smallest allowed speedup of all arms (mean seconds of the baseline / of the arm), or from arm to
    that of its whole step, validations included."""
    warn_only: list[str] = field(default_factory=list)
    """Names of checks that only warn: if they are red, ``rl-accel ab`` still ends with exit code 0."""


@dataclass
class RolloutSection:
    """Settings and checks of the report's section about rollouts: seconds, lengths of trained responses, and prompts trained."""

    report: bool = False
    faster: dict[str, float] = field(default_factory=dict)
    """Mapping from arm to the smallest allowed rollout speedup: mean seconds of the baseline / those of the arm, over all seeds."""
    wasted_tokens: dict[str, float] = field(default_factory=dict)
    """Mapping from arm to the largest allowed share of wasted (generated, not trained on) tokens, over all steps and seeds."""
    prompts_lost: dict[str, float] = field(default_factory=dict)
    """Mapping from arm to the largest allowed number of lost prompts in a run: neither trained nor waiting for a later step."""
    same_reward: float | None = None
    """Largest allowed difference in final reward between an arm and the baseline. The whole 95% interval of the difference must lie
    within it, which needs 3 seeds or more."""


@dataclass
class Recipe:
    """Content of a recipe file: the definition of an A/B. The docstring of this module lists the placeholders."""

    name: str = ""
    description: str = ""
    """Task of the training, and expected result of the A/B."""
    command: list[str] = field(default_factory=list)
    """Command that starts the trainer, e.g. [python, -m, verl.trainer.main_ppo]. The overrides are appended to this command."""
    prepare: list[str] = field(default_factory=list)
    """Optional command that is run once, before all arms, in the folder of the recipe. Must be idempotent."""
    env: dict[str, Any] = field(default_factory=dict)
    """Environment variables of every arm. The value null removes a variable."""
    overrides: list[str] = field(default_factory=list)
    """Command-line overrides that every arm passes to the trainer."""
    arms: dict[str, Arm] = field(default_factory=dict)
    baseline: str = ""
    """Name of the arm that all other arms are compared with; default: the first arm."""
    seeds: list[int] = field(default_factory=lambda: [0])
    seed_overrides: list[str] = field(default_factory=list)
    """Overrides that pass the seed to the trainer, e.g. ["data.seed=${seed}"]."""
    nodes: int = 1
    """Number of nodes per run, for the placeholder ``${nodes}``."""
    gpus: int = 1
    """Number of GPUs per node."""
    steps: int = 10
    steps_overrides: list[str] = field(default_factory=lambda: ["trainer.total_training_steps=${steps}"])
    timeout_s: float | None = None
    """Seconds after which a run is stopped and counts as failed; null: no limit."""
    metrics: Metrics = field(default_factory=Metrics)
    checks: Checks = field(default_factory=Checks)
    rollout: RolloutSection = field(default_factory=RolloutSection)


_SECTIONS = {"metrics": Metrics, "checks": Checks, "rollout": RolloutSection}


def parse_margin(text: str) -> tuple[float, bool]:
    """Parses ``Metrics.margin``. Returns its size, and True if this size is a share of the baseline's gain.

    Raises:
        RecipeError: ``text`` is not a number or percentage above 0.
    """
    number = text.strip().removesuffix("%")
    is_share = number != text.strip()
    if not re.fullmatch(r"\d*\.?\d+(e-?\d+)?", number) or not 0 < float(number) < math.inf:
        raise RecipeError(
            f"metrics.margin wants a share of the gain such as 2% or a difference such as 0.01, found {text!r}"
        )
    return float(number) / (100 if is_share else 1), is_share


def load(path: Path, platform: str | None = None) -> Recipe:
    """Reads and checks a recipe file.

    ``platform``: name of one of the recipe's platforms (settings for one kind of machine); None: the first, if there are any.

    Raises:
        RecipeError: the file cannot be read, is not YAML, or does not fit :class:`Recipe`. The message names the file and the key.
    """
    layers = _read(path)
    platforms = [(file, values.pop("platforms", None) or {}) for file, values in layers]
    for file, choices in platforms:
        if not isinstance(choices, dict):
            raise RecipeError(f"{file}: platforms wants a mapping from names to keys of a recipe, found {choices!r}")
    names = list(dict.fromkeys(name for _, choices in platforms for name in choices))
    if platform is not None and platform not in names:
        there_are = f"there are {', '.join(names)}" if names else "it has none"
        raise RecipeError(f"--platform: {path} has no platform {platform!r}; {there_are}")
    chosen = platform or next(iter(names), None)
    for file, choices in platforms:
        if chosen in choices:
            layers += _with_bases(choices[chosen] or {}, file)
    config = OmegaConf.structured(Recipe)
    for file, values in layers:
        for key in ("arms", "env", *_SECTIONS):
            if not isinstance(values.get(key, {}), dict):
                raise RecipeError(f"{file}: {key} wants a mapping, found {values[key]!r}")
        try:
            config = _merge(config, values)
        except OmegaConfBaseException as error:
            raise RecipeError(f"{file}: {error.full_key or 'recipe'}: {first_line(error)}") from error
    # OmegaConf's own way to make objects would fill in ``${...}`` placeholders, which have no values yet
    plain = _plain(config)
    plain |= {key: section(**plain[key]) for key, section in _SECTIONS.items()}
    plain["arms"] = {name: Arm(**keys) for name, keys in plain["arms"].items()}
    recipe = Recipe(**plain)
    for problem in _problems(recipe):
        raise RecipeError(f"{path}: {problem}")
    parse_margin(recipe.metrics.margin)
    recipe.baseline = recipe.baseline or next(iter(recipe.arms))
    return recipe


def save(recipe: Recipe, path: Path) -> None:
    """Writes a recipe to a file that :func:`load` can read without the base recipe."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(recipe))))


def _read(path: Path, extended_by: tuple[Path, ...] = ()) -> list[tuple[Path, dict[str, Any]]]:
    """Returns the content of a recipe file, and before it that of the recipes that it extends, each with the path of its file.

    ``extended_by``: files of the recipes that extend this recipe; used to detect a cycle.
    """
    try:
        values = _plain(OmegaConf.load(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {error}") from error
    except Exception as error:  # yaml and OmegaConf raise unrelated classes for text that is not YAML
        raise RecipeError(f"{path} is not valid YAML: {one_line(error)}") from error
    return _with_bases(values, path, extended_by)


def _with_bases(values: Any, path: Path, extended_by: tuple[Path, ...] = ()) -> list[tuple[Path, dict[str, Any]]]:
    """Returns ``values``, keys of a recipe in the file ``path``, and before them those of the recipe that ``extends`` names."""
    if not isinstance(values, dict):
        raise RecipeError(f"{path}: a recipe and each of its platforms is a mapping, found {values!r}")
    base_name = values.pop("extends", None)
    if base_name is None:
        return [(path, values)]
    if not isinstance(base_name, str):
        raise RecipeError(f"{path}: extends wants the name of a recipe file, found {base_name!r}")
    base_path = (path.parent / base_name).resolve()
    extended_by = (*extended_by, path.resolve())
    if base_path in extended_by:
        raise RecipeError(f"{path}: extends {base_name}, which extends this recipe in turn")
    return [*_read(base_path, extended_by), (path, values)]


def _merge(config: DictConfig, values: dict[str, Any]) -> DictConfig:
    """Merges the keys of one file into those before it. Overrides are appended; a section is merged key by key."""
    overrides = list(_plain(config.overrides))
    if "arms" in values:
        config.arms = {}
    for section in _SECTIONS.keys() & values.keys():
        for key, value in values[section].items():
            if isinstance(value, dict):
                config[section][key] = {}  # OmegaConf would merge this mapping too
    merged = OmegaConf.merge(config, values)
    assert isinstance(merged, DictConfig)
    if "overrides" in values:
        merged.overrides = overrides + list(_plain(merged.overrides))
    return merged


def _plain(config: Any) -> Any:
    return OmegaConf.to_container(config, resolve=False)


def _problems(recipe: Recipe) -> Iterator[str]:
    """Yields an error message for each value that has the right type but is not allowed, the most basic first."""
    if not _NAME.fullmatch(recipe.name):
        yield f"name wants letters, digits and ._-, found {recipe.name!r}"
    if not recipe.command:
        yield "command wants a list such as [python, -m, verl.trainer.main_ppo], found nothing"
    if not recipe.arms:
        yield "arms wants a mapping from arm names to arms, found nothing"
    for name, arm in recipe.arms.items():
        if not _NAME.fullmatch(name):
            yield f"arms.{name}: a name of an arm wants letters, digits and ._-"
        if arm.seeds is not None and not (arm.seeds and set(arm.seeds) <= set(recipe.seeds)):
            yield f"arms.{name}.seeds wants some of {recipe.seeds}, found {arm.seeds}"
    if recipe.baseline and recipe.baseline not in recipe.arms:
        yield f"baseline wants one of {', '.join(recipe.arms)}, found {recipe.baseline!r}"
    yield from _problems_of_runs(recipe)
    metrics = recipe.metrics
    if metrics.warmup_steps < 0:
        yield f"metrics.warmup_steps wants at least 0, found {metrics.warmup_steps}"
    if recipe.timeout_s is not None and not recipe.timeout_s > 0:
        yield f"timeout_s wants a number above 0, found {recipe.timeout_s}"
    yield from _unknown("checks.faster", recipe.checks.faster, (*metrics.stages, metrics.step, *recipe.arms))
    yield from _unknown("checks.same_training", recipe.checks.same_training, recipe.arms)
    yield from _unknown("checks.warn_only", recipe.checks.warn_only, CHECK_NAMES)
    yield from _unknown("rollout.faster", recipe.rollout.faster, [a for a in recipe.arms if a != recipe.baseline])
    yield from _unknown("rollout.wasted_tokens", recipe.rollout.wasted_tokens, recipe.arms)
    yield from _unknown("rollout.prompts_lost", recipe.rollout.prompts_lost, recipe.arms)
    for where, env in [("env", recipe.env), *((f"arms.{name}.env", arm.env) for name, arm in recipe.arms.items())]:
        for key, text in env.items():
            if text is not None and not isinstance(text, str | int | float | bool):
                yield f"{where}.{key} wants text, a number, true, false or null, found {text!r}"


def _unknown(where: str, names: Iterable[str], known: Collection[str]) -> Iterator[str]:
    for name in names:
        if name not in known:
            yield f"{where} wants some of {', '.join(known)}, found {name}{did_you_mean(name, known)}"


def _problems_of_runs(recipe: Recipe) -> Iterator[str]:
    """Yields error messages about seeds and steps, which the recipe or the options ``--seeds`` and ``--steps`` set."""
    if not recipe.seeds or len(set(recipe.seeds)) < len(recipe.seeds) or min(recipe.seeds) < 0:
        yield f"seeds wants different numbers of at least 0, found {recipe.seeds}"
    elif len(recipe.seeds) > 1 and not recipe.seed_overrides:
        yield 'seeds: several want seed_overrides such as ["data.seed=${seed}"], or all runs would be the same'
    if recipe.steps < 1:
        yield f"steps wants at least 1, found {recipe.steps}"


@dataclass(frozen=True)
class RunPlan:
    """Plan of one run of the trainer: command and environment, with all placeholders filled in."""

    arm: str
    seed: int
    steps: int
    directory: Path
    command: tuple[str, ...]
    env: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables that the recipe adds; None removes a variable."""
    timeout_s: float | None = None

    @property
    def name(self) -> str:
        return f"{self.arm}-seed{self.seed}"


def plan_runs(
    recipe: Recipe,
    recipe_dir: Path,
    out: Path,
    arms: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    steps: int | None = None,
) -> list[RunPlan]:
    """Returns the runs of a recipe in order of execution: all arms with one seed, then the next seed.

    ``arms``, ``seeds`` and ``steps`` replace the values of the recipe unless None. An arm with its own seeds runs only with those.

    Raises:
        RecipeError: an arm is unknown, seeds repeat or are negative, steps is below 1, or a placeholder is unknown.
    """
    arms = list(recipe.arms) if arms is None else list(arms)
    seeds = recipe.seeds if seeds is None else list(seeds)
    steps = recipe.steps if steps is None else steps
    for problem in _problems_of_runs(replace(recipe, seeds=seeds, steps=steps)):
        raise RecipeError(f"--{problem}")
    for arm in arms:
        if arm not in recipe.arms:
            raise RecipeError(
                f"--arms: no arm {arm!r}{did_you_mean(arm, recipe.arms)}; arms are {', '.join(recipe.arms)}"
            )
    if not arms or len(set(arms)) < len(arms):
        raise RecipeError(f"--arms wants different arms, found {', '.join(arms) or 'nothing'}")
    runs = [(arm, seed) for seed in seeds for arm in arms if seed in (recipe.arms[arm].seeds or seeds)]
    return [_plan(recipe, recipe_dir, out, arm=arm, seed=seed, steps=steps) for arm, seed in runs]


def prepare_command(recipe: Recipe, recipe_dir: Path, out: Path) -> tuple[list[str], dict[str, str | None]]:
    """Returns the recipe's prepare command (empty if there is none), and the environment variables of this command."""
    known = {"recipe_dir": str(recipe_dir), "out": str(out)}
    # leaves out variables with placeholders of a single run, which have no value yet
    env = {
        key: value
        for key, value in recipe.env.items()
        if all(name in known or name.startswith(_ENV) for name in _PLACEHOLDER.findall(str(value)))
    }
    return _command(recipe.prepare, known, "prepare"), _environment(env, known, "env")


def _plan(recipe: Recipe, recipe_dir: Path, out: Path, arm: str, seed: int, steps: int) -> RunPlan:
    directory = out / f"{arm}-seed{seed}"
    known = {"recipe_dir": str(recipe_dir), "out": str(out), "run_dir": str(directory), "arm": arm, "seed": str(seed)}
    known |= {"steps": str(steps), "gpus": str(recipe.gpus), "nodes": str(recipe.nodes)}
    overrides = [*recipe.overrides, *recipe.seed_overrides, *recipe.steps_overrides, *recipe.arms[arm].overrides]
    command = _command(recipe.command, known, "command")
    command += [_fill(item, known, "overrides", strict=False) for item in overrides]
    env = _environment(recipe.env, known, "env") | _environment(recipe.arms[arm].env, known, f"arms.{arm}.env")
    return RunPlan(
        arm=arm,
        seed=seed,
        steps=steps,
        directory=directory,
        command=tuple(command),
        env=env,
        timeout_s=recipe.timeout_s,
    )


def _command(words: Sequence[str], known: Mapping[str, str], where: str) -> list[str]:
    filled = [_fill(word, known, where) for word in words]
    return [sys.executable, *filled[1:]] if filled[:1] == ["python"] else filled


def _environment(env: Mapping[str, Any], known: Mapping[str, str], where: str) -> dict[str, str | None]:
    filled: dict[str, str | None] = {}
    for key, value in env.items():
        if isinstance(value, bool):
            value = str(value).lower()  # most programs would take "False" for true
        filled[key] = None if value is None else _fill(str(value), known, f"{where}.{key}")
    return filled


def _fill(text: str, known: Mapping[str, str], where: str, strict: bool = True) -> str:
    """Fills in the placeholders of ``text``, a value at key ``where``. If ``strict``, an unknown placeholder raises RecipeError."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name.startswith(_ENV):
            variable = name.removeprefix(_ENV)
            if variable not in os.environ:
                raise RecipeError(f"{where}: {match[0]} wants the environment variable {variable}, which is not set")
            return os.environ[variable]
        if strict and name not in known:
            hint = did_you_mean(name, known)
            raise RecipeError(f"{where}: unknown placeholder {match[0]}{hint}; it may use {', '.join(known)}")
        return known.get(name, match[0])

    return _PLACEHOLDER.sub(value, text)
