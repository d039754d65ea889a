"""The recipe file of an A/B run: its typed schema, reading and checking it.

A recipe is a YAML mapping with the keys of :class:`Recipe`. Text in ``command``, ``prepare``, ``env`` and every list of
overrides may hold placeholders:

=================  ===================================================================
``${recipe_dir}``  the folder of the recipe file
``${out}``         the folder given with ``--out``
``${run_dir}``     ``${out}/<arm>-seed<seed>``, the working directory of one run
``${arm}``         the name of the arm
``${seed}``        the seed of the run
``${steps}``       the number of training steps
=================  ===================================================================

``extends: FILE`` (relative to the recipe) starts from another recipe: ``overrides`` are added to its, ``env``, ``metrics``,
``checks`` and ``rollout`` replace single keys of its, every other key replaces its own.

``prepare`` runs before any arm and knows only the first two. Any other ``${...}`` in an override is left to hydra;
anywhere else it is an error. ``python`` as the first word of a command stands for the interpreter that runs
``rl-accel``.

The runner itself sets ``VERL_FILE_LOGGER_PATH`` (so ``trainer.logger`` must include ``file``), ``RAY_TMPDIR`` to a
private folder, ``PYTHONUNBUFFERED``, and removes ``RAY_ADDRESS`` unless the recipe sets it.
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_accel.errors import RecipeError
from rl_accel.telemetry.stage_clock import STAGES

CHECK_NAMES = (
    "completed",
    "identical",
    "rollout_probs_diff",
    "first_step_zero",
    "forbidden_log",
    "reward_gain",
    "faster",
    "rollout_faster",
    "wasted_tokens",
    "prompts_lost",
    "same_reward",
    "ledger",
)
AVERAGES = ("median", "mean")
NOT_COMPARED = ("timing_*", "perf/*", "*/perf/*", "rl_accel/*", "*memory*", "*/mfu*", "*_mfu*")
_ARM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass
class Arm:
    """One variant of the run: what it adds to the common overrides and environment."""

    description: str = ""
    overrides: list[str] = field(default_factory=list)
    env: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] | None = None
    """Of the recipe's seeds those that this arm is run with; null: all."""


@dataclass
class Metrics:
    """Which logged metrics mean what. The defaults are verl's names."""

    reward: str = "critic/score/mean"
    """The metric of the reward curve and of the progress bar."""
    curves: list[str] = field(default_factory=lambda: ["response_length/mean"])
    """Further metrics kept step by step in summary.json."""
    stage_prefix: str = "timing_s/"
    step: str = "step"
    """The stage that is the whole step."""
    stages: list[str] = field(default_factory=lambda: list(STAGES))
    """Parts of a step that do not overlap; what is left of the step is shown as "other"."""
    average: str = "median"
    """median or mean: what a stage's time and ratio are taken from. A mean where steps are of different kinds."""
    not_compared: list[str] = field(default_factory=lambda: list(NOT_COMPARED))
    """Shell patterns of metrics that may differ between arms, left out of the first-difference table."""
    warmup_steps: int = 2
    """First steps of each run that the stage times leave out."""


@dataclass
class Checks:
    """What must hold in every run. An empty list, an empty mapping or null turns a check off."""

    identical: list[str] = field(default_factory=list)
    """Metrics that must be equal in all arms of one seed, step by step."""
    rollout_probs_diff: float | None = 1e-3
    """Largest allowed training/rollout_probs_diff_max: rollout and trainer must agree on the probabilities."""
    first_step_zero: list[str] = field(default_factory=lambda: ["actor/kl_loss", "actor/reward_kl_penalty"])
    """Metrics that must be 0 at the first step where they are logged: the policy still is its reference."""
    zero_tolerance: float = 1e-6
    forbidden_log: list[str] = field(default_factory=lambda: ["dtype mismatch"])
    """Text that no train.log may hold."""
    reward_gain: float | None = None
    """Smallest gain of the reward in every arm: mean of the last fifth of the steps less mean of the first fifth."""
    faster: dict[str, float] = field(default_factory=dict)
    """Stage (or the whole step) to the smallest allowed ratio baseline/arm of average times."""
    warn_only: list[str] = field(default_factory=list)
    """Names of checks that are shown red without making the exit code 1."""


@dataclass
class Rollout:
    """What the report says of rollouts: seconds by kind of round, lengths of the responses trained on, prompts trained."""

    report: bool = False
    data: str = "rollouts"
    """Folder, in that of a run, that ``trainer.rollout_data_dir`` names: lengths come from there."""
    ledger: str = "checkpoints/tail_batching/ledger.jsonl"
    """File, in the folder of a run, with the prompts trained in each step, where an arm writes one."""
    faster: dict[str, float] = field(default_factory=dict)
    """Arm to the smallest allowed ratio baseline/arm of mean rollout seconds a step, over all seeds."""
    wasted_tokens: dict[str, float] = field(default_factory=dict)
    """Arm to the largest allowed share of generated tokens that were not trained on, over all steps and seeds."""
    prompts_lost: dict[str, float] = field(default_factory=dict)
    """Arm to the largest allowed number of prompts that were taken from the data and are neither trained nor waiting, a run."""
    same_reward: float | None = None
    """Bound that the 95% interval of the difference of final rewards, arm less baseline, must stay within (3 seeds or more)."""


@dataclass
class Recipe:
    """An A/B run. See the module's text for placeholders."""

    name: str = ""
    description: str = ""
    """The task, and what to expect."""
    command: list[str] = field(default_factory=list)
    """The trainer, e.g. [python, -m, verl.trainer.main_ppo]; overrides are appended."""
    prepare: list[str] = field(default_factory=list)
    """Optional command run once before the arms, in the recipe's folder; must be idempotent."""
    env: dict[str, Any] = field(default_factory=dict)
    """Environment of every arm; null removes a variable."""
    overrides: list[str] = field(default_factory=list)
    """Overrides of every arm."""
    arms: dict[str, Arm] = field(default_factory=dict)
    baseline: str = ""
    """The arm others are compared with; the first one if not given."""
    seeds: list[int] = field(default_factory=lambda: [0])
    seed_overrides: list[str] = field(default_factory=list)
    """How a seed reaches the trainer, e.g. ["data.seed=${seed}"]."""
    steps: int = 10
    steps_overrides: list[str] = field(default_factory=lambda: ["trainer.total_training_steps=${steps}"])
    timeout_s: float | None = None
    """Seconds after which an arm is stopped and counts as failed."""
    metrics: Metrics = field(default_factory=Metrics)
    checks: Checks = field(default_factory=Checks)
    rollout: Rollout = field(default_factory=Rollout)


_ADDED = ("overrides",)
_MERGED = ("env", "metrics", "checks", "rollout")


def load(path: Path) -> Recipe:
    """Read and check a recipe file.

    Raises:
        RecipeError: the file cannot be read, is not YAML, or does not fit :class:`Recipe`; the message names the file
            and the key, what was wanted and, for an unknown key, the nearest known one.
    """
    return _check(_read(path, ()), str(path))


def parse(text: str, source: str) -> Recipe:
    """Check the text of a recipe that extends no other; ``source`` names it in messages.

    Raises:
        RecipeError: as in :func:`load`.
    """
    return _check(_parse(text, source), source)


def save(recipe: Recipe, path: Path) -> None:
    """Write a recipe so that :func:`load` returns it again, whatever it extended."""
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(recipe))))


def _read(path: Path, extended_by: tuple[Path, ...]) -> DictConfig:
    """Return the mapping in a file, with what it extends filled in."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read the recipe {path}: {error}") from error
    raw = _parse(text, str(path))
    if "extends" not in raw:
        return raw
    ours: dict[str, Any] = _plain(raw)
    other = ours.pop("extends")
    if not isinstance(other, str):
        raise RecipeError(f"{path}: extends wants the name of a recipe file, found {other!r}")
    base_path = (path.parent / other).resolve()
    if base_path in (*extended_by, path.resolve()):
        raise RecipeError(f"{path}: extends {other}, which extends this recipe in turn")
    both: dict[str, Any] = _plain(_read(base_path, (*extended_by, path.resolve())))
    for key, value in ours.items():
        theirs = both.get(key)
        if key in _ADDED and isinstance(value, list) and isinstance(theirs, list):
            value = theirs + value
        elif key in _MERGED and isinstance(value, dict) and isinstance(theirs, dict):
            value = theirs | value
        both[key] = value
    return OmegaConf.create(both)


def _plain(config: DictConfig) -> Any:
    return OmegaConf.to_container(config, resolve=False)


def _parse(text: str, source: str) -> DictConfig:
    try:
        raw = OmegaConf.create(text)
    except OmegaConfBaseException as error:
        raise RecipeError(f"{source}: {_explain(error, 'recipe')}") from error
    except Exception as error:  # yaml and OmegaConf raise unrelated classes for text that is not YAML
        raise RecipeError(f"{source} is not valid YAML: {error}") from error
    if not isinstance(raw, DictConfig) or (len(raw) == 1 and next(iter(raw)) == text.strip()):
        raise RecipeError(f"{source}: a recipe is a mapping with the keys {', '.join(_keys(Recipe))}")
    return raw


def _check(raw: DictConfig, source: str) -> Recipe:
    config = OmegaConf.structured(Recipe)
    for key in raw:
        part = OmegaConf.create({key: raw._get_node(key)})
        try:
            config = OmegaConf.merge(config, part)
        except OmegaConfBaseException as error:
            raise RecipeError(f"{source}: {_explain(error, str(key))}") from error
    recipe: Recipe = _build(Recipe, OmegaConf.to_container(config, resolve=False))
    for problem in _problems(recipe):
        raise RecipeError(f"{source}: {problem}")
    recipe.baseline = recipe.baseline or next(iter(recipe.arms))
    return recipe


def _explain(error: OmegaConfBaseException, top: str) -> str:
    """Say in one line what is wrong with which key; ``top`` is its first part, for when OmegaConf does not know it."""
    where = str(error.full_key or top)
    parent, owner = _owner(where)
    name = where.rsplit(".", 1)[-1].split("[")[0]
    if owner is not None and name not in _keys(owner):
        known = _keys(owner)
        return f"unknown key {where}{nearest(name, known)}; {parent or 'a recipe'} takes {', '.join(known)}"
    wanted = _wanted(owner, name)
    reason = str(error.msg or error).splitlines()[0]
    return f"{where} wants {wanted}: {reason}" if wanted else f"{where}: {reason}"


def _owner(where: str) -> tuple[str, type | None]:
    """The dotted path of the mapping that holds ``where``, and its schema (None inside a list or a free mapping)."""
    parts = where.split(".")[:-1]
    schema: type = Recipe
    for index, part in enumerate(parts):
        if index == 1 and parts[0] == "arms":
            schema = Arm
        elif part == "arms" and index == 0:
            continue
        else:
            hint = get_type_hints(schema).get(part)
            if not isinstance(hint, type) or not is_dataclass(hint):
                return ".".join(parts), None
            schema = hint
    return ".".join(parts), None if parts == ["arms"] else schema


def _wanted(owner: type | None, name: str) -> str:
    if owner is None:
        return ""
    hint = get_type_hints(owner).get(name.split("[")[0])
    if is_dataclass(hint):
        return f"a mapping with the keys {', '.join(_keys(hint))}"
    if hint is None:
        return ""
    text = str(getattr(hint, "__name__", hint)) if not get_args(hint) else str(hint)
    if text.startswith("dict"):
        return "a mapping" + (" from arm names to arms" if name == "arms" else "")
    return text.replace("None", "null").replace(" | ", " or ").replace("list[", "a list of ").rstrip("]")


def _keys(schema: Any) -> list[str]:
    return [f.name for f in fields(schema)]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean x?)" for the known name closest to ``name``, or an empty text."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def _build(schema: Any, values: Any) -> Any:
    """Make the dataclass by hand: OmegaConf would resolve ``${...}``, which belongs to us and to hydra."""
    hints = get_type_hints(schema)
    made = {}
    for key, value in values.items():
        if is_dataclass(hints[key]):
            value = _build(hints[key], value)
        elif schema is Recipe and key == "arms":
            value = {str(name): _build(Arm, arm) for name, arm in value.items()}
        made[str(key)] = value
    return schema(**made)


def _problems(recipe: Recipe) -> Iterable[str]:
    """Yield what the types cannot say, the most basic first."""
    if not _ARM_NAME.fullmatch(recipe.name):
        yield f"name wants letters, digits and ._-, found {recipe.name!r}"
    if not recipe.command:
        yield "command wants a list such as [python, -m, verl.trainer.main_ppo], found nothing"
    if not recipe.arms:
        yield "arms wants a mapping from arm names to arms, found nothing"
    for arm in recipe.arms:
        if not _ARM_NAME.fullmatch(arm):
            yield f"arms.{arm}: a name of an arm wants letters, digits and ._-"
    if recipe.baseline and recipe.baseline not in recipe.arms:
        yield f"baseline wants one of {', '.join(recipe.arms)}, found {recipe.baseline!r}"
    if not recipe.seeds or len(set(recipe.seeds)) < len(recipe.seeds) or min(recipe.seeds) < 0:
        yield f"seeds wants different numbers of at least 0, found {recipe.seeds}"
    for name, its in recipe.arms.items():
        if its.seeds is not None and not (its.seeds and set(its.seeds) <= set(recipe.seeds)):
            yield f"arms.{name}.seeds wants some of {recipe.seeds}, found {its.seeds}"
    if recipe.steps < 1:
        yield f"steps wants at least 1, found {recipe.steps}"
    if len(recipe.seeds) > 1 and not recipe.seed_overrides:
        yield 'several seeds want seed_overrides such as ["data.seed=${seed}"], or all runs would be the same'
    if recipe.timeout_s is not None and not recipe.timeout_s > 0:
        yield f"timeout_s wants a number above 0, found {recipe.timeout_s}"
    if recipe.metrics.warmup_steps < 0:
        yield f"metrics.warmup_steps wants at least 0, found {recipe.metrics.warmup_steps}"
    if recipe.metrics.average not in AVERAGES:
        yield f"metrics.average wants one of {', '.join(AVERAGES)}, found {recipe.metrics.average!r}"
    stages = [*recipe.metrics.stages, recipe.metrics.step]
    for stage in recipe.checks.faster:
        if stage not in stages:
            yield f"checks.faster.{stage} is not a stage{nearest(stage, stages)}; stages are {', '.join(stages)}"
    for key in ("faster", "wasted_tokens", "prompts_lost"):
        for arm in getattr(recipe.rollout, key):
            if arm not in recipe.arms or (key == "faster" and arm == recipe.baseline):
                yield f"rollout.{key}.{arm} is no arm to compare{nearest(arm, recipe.arms)}; arms are {', '.join(recipe.arms)}"
    for name in recipe.checks.warn_only:
        if name not in CHECK_NAMES:
            known = ", ".join(CHECK_NAMES)
            yield f"checks.warn_only: unknown check {name!r}{nearest(name, CHECK_NAMES)}; checks are {known}"
    for where, env in [("env", recipe.env), *((f"arms.{name}.env", arm.env) for name, arm in recipe.arms.items())]:
        for key, value in env.items():
            if value is not None and not isinstance(value, str | int | float | bool):
                yield f"{where}.{key} wants text, a number, true, false or null, found {value!r}"
    lists = {"command": recipe.command, "prepare": recipe.prepare, "overrides": recipe.overrides}
    lists |= {f"arms.{name}.overrides": arm.overrides for name, arm in recipe.arms.items()}
    for where, items in lists.items():
        for item in items:
            if not isinstance(item, str):
                yield f"{where} wants a list of str, found {item!r} in it"
