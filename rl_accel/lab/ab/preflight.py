"""``rl-accel doctor --recipe``: checks that this machine meets the requirements of a recipe, before any GPU time is spent.

For verl, hydra composes the configuration as verl's main function would, and verl validates it. For slime, slime's parser checks
the arguments if Megatron-LM is importable. Nothing is downloaded or started.
"""

import argparse
import importlib.metadata
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl_accel.config import resolve
from rl_accel.console import aligned
from rl_accel.doctor import quiet
from rl_accel.errors import one_line
from rl_accel.integrations.slime.launch_line import read_flags
from rl_accel.lab.ab.recipe import Recipe, RunPlan, load, plan_runs
from rl_accel.patches.verl.verl_run import FILTER_KEY, MAINS, VerlRun
from rl_accel.runtime import is_installed

TRIED_VERL = "0.9.1"
Row = tuple[str, str, str]
"""Result of one check: requirement, verdict, and reason.

Verdicts are works, missing, wrong, unknown, and idle (a feature that is turned on but has no effect in this run)."""

_SLIME_MAINS = ("train.py", "train_async.py")
_SLIME_PARSE = """
import sys
from slime.utils.arguments import parse_args
from rl_accel.integrations.slime.custom_config import flags_unknown_to_parsers

problem = None
with flags_unknown_to_parsers() as unread:
    try:
        parse_args()
    except Exception as error:
        problem = error
if unread():
    print(f"no parser of slime takes {', '.join(unread())}", file=sys.stderr)
    sys.exit(2)
if problem:
    raise problem
"""
"""Script that runs slime's argument parsers. Fails if a flag is unknown to every parser."""


def check_recipe(file: Path, platform: str | None = None) -> list[Row]:
    """Checks whether this machine can run the first run of each arm of a recipe. Returns one row per requirement.

    Sets the first arm's environment variables in this process, because verl reads them when it is imported. ``platform``: see
    :func:`rl_accel.lab.ab.recipe.load`.

    Raises:
        RecipeError: the recipe itself is wrong.
    """
    recipe = load(file, platform)
    plans = plan_runs(recipe, file.resolve().parent, Path("out").resolve() / recipe.name)
    first = {plan.arm: plan for plan in reversed(plans)}
    prepared = any("${out}" in word for word in recipe.prepare)
    # verl reads these when it is imported
    os.environ |= {key: value for key, value in plans[0].env.items() if value is not None}
    with quiet():
        rows = list(_rows(recipe, [first[arm] for arm in recipe.arms if arm in first], prepared))
    return list(dict.fromkeys(rows))  # arms share most requirements


def as_text(rows: Sequence[Row]) -> str:
    """Formats the result of :func:`check_recipe` as a text table."""
    return "\n".join(aligned([("asked for", "verdict", "reason"), *rows]))


def _rows(recipe: Recipe, plans: Sequence[RunPlan], prepared: bool) -> Iterator[Row]:
    cpu = plans[0].env.get("VERL_PLATFORM") == "cpu"
    if not cpu:
        yield _gpus(recipe.gpus)
    for plan in plans:
        if MAINS.keys() & set(plan.command):
            yield from _verl(plan, cpu, prepared)
        elif any(word.endswith(_SLIME_MAINS) for word in plan.command):
            yield from _slime(plan)
        else:
            yield f"arm {plan.arm}", "unknown", f"no trainer that is known here: {plan.command[0]}"


def _gpus(wanted: int) -> Row:
    import torch

    count = torch.cuda.device_count()
    what = "1 GPU a node" if wanted == 1 else f"{wanted} GPUs a node"
    if count >= wanted:
        return what, "works", torch.cuda.get_device_name(0)
    return what, "missing" if count else "unknown", f"this node has {count or 'no GPU'}"


def compose_verl(plan: RunPlan) -> DictConfig:
    """Returns the configuration that verl would compose from the command of a run. hydra raises if an override does not fit."""
    main = next(word for word in plan.command if word in MAINS)
    # hydra's flags that choose the configuration file
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--config-name", "-cn", default="")
    options, overrides = parser.parse_known_args(plan.command[plan.command.index(main) + 1 :])
    folder = None
    if options.config_path:  # hydra takes the path relative to the folder of the main module
        package = importlib.util.find_spec(main.rpartition(".")[0])
        folder = Path(*(package.submodule_search_locations or ()) if package else (), options.config_path)
    config: DictConfig = VerlRun.compose(main, overrides, folder, options.config_name.removesuffix(".yaml")).config
    return config


def validate_verl(config: DictConfig) -> dict[str, str]:
    """Checks a copy of a composed configuration as verl and rl-accel check it at the start of a run. They raise if a key or value
    does not fit.

    Returns a mapping from each requested feature of rl-accel that has no effect in this run to the reason.
    """
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config
    from verl.workers.config import HFModelConfig

    from rl_accel.patches.verl import config_intake

    config = config.copy()
    OmegaConf.resolve(config)
    flags = resolve([("the recipe", OmegaConf.select(config, "rl_accel", default={}))])
    idle, _ = config_intake.wire(VerlRun(config, in_driver=True), flags)
    actor_rollout = config.actor_rollout_ref
    for section in (actor_rollout, config.critic):  # an HFModelConfig object would read the model
        OmegaConf.merge(OmegaConf.structured(HFModelConfig), section.model)
    config.critic.model = None
    inspect.unwrap(validate_config)(config, need_reference_policy(config), need_critic(config))
    for section in (actor_rollout.actor, actor_rollout.rollout, config.algorithm):
        omega_conf_to_dataclass(section)
    return idle


def _verl(plan: RunPlan, cpu: bool, prepared: bool) -> Iterator[Row]:
    try:
        version = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        yield "verl", "missing", f"pip install verl=={TRIED_VERL}"
        return
    tried = "" if version == TRIED_VERL else f"; recipes were checked with {TRIED_VERL}"
    yield "verl", "works", version + tried
    try:
        config = compose_verl(plan)
        idle = validate_verl(config)
        yield f"configuration of {plan.arm}", "works", "composed and validated by verl"
        for feature, reason in idle.items():
            yield f"{feature} in {plan.arm}", "idle", reason
    except Exception as error:  # from hydra, verl or rl-accel: each message names the problem
        yield f"configuration of {plan.arm}", "wrong", one_line(error)[:400]
        return
    yield from misleading_settings(VerlRun(config, in_driver=True))
    rollout = config.actor_rollout_ref.rollout
    model = config.actor_rollout_ref.model
    wanted = ["transfer_queue", *([] if rollout.name == "hf_cpu" else [rollout.name])]
    if (model.override_config.get("attn_implementation") or "flash_attention_2") == "flash_attention_2":
        wanted.append("flash_attn")
    wanted += [name for name in ("wandb", "tensorboard", "mlflow", "swanlab") if name in config.trainer.logger]
    yield from map(_package, wanted)
    yield from _files("data", [config.data.train_files, config.data.val_files], prepared)
    path = Path(model.path).expanduser()
    yield from _model(str(model.path), prepared and plan.directory.parent in path.parents)


def misleading_settings(run: VerlRun) -> Iterator[Row]:
    """Yields settings that verl 0.9.1 accepts and that do not do what they say: a run would lose its progress, or never begin."""
    actor = "actor_rollout_ref.actor"
    strategy = run.get(f"{actor}.strategy")
    saves = run.get("trainer.save_freq", -1) > 0
    if (
        run.get(f"{actor}.checkpoint.async_save")
        and strategy != "megatron"
        and saves
        and run.trainer_kind != "fully_async"
    ):
        why = "verl writes no latest_checkpointed_iteration.txt then, so that a resume begins at step 0: Megatron alone does"
        yield f"{actor}.checkpoint.async_save with {strategy}", "wrong", why
    if run.get(f"{actor}.use_prefix_grouper") and run.is_v1:
        yield f"{actor}.use_prefix_grouper", "idle", "verl's V1 trainer does not read it"
    if run.ignores_group_filter:
        yield FILTER_KEY, "idle", "verl's legacy trainer does not read it: groups with equal rewards are trained"
    queue = "transfer_queue.backend"
    is_local = run.get("ray_kwargs.ray_init.address") is None and "RAY_ADDRESS" not in os.environ
    if (
        run.is_v1
        and run.get(f"{queue}.storage_backend") == "SimpleStorage"
        and is_local
        and run.get("trainer.nnodes") == 1
    ):
        needed = run.get(f"{queue}.SimpleStorage.num_data_storage_units", 1) + 1  # and the controller
        cpus = run.get("ray_kwargs.ray_init.num_cpus", os.cpu_count() or 1)
        if needed > cpus:
            why = f"TransferQueue takes {needed} CPUs, Ray has {cpus}: the run would wait for ever"
            yield f"{queue}.SimpleStorage.num_data_storage_units", "wrong", why


def _slime(plan: RunPlan) -> Iterator[Row]:
    at = next(n for n, word in enumerate(plan.command) if word.endswith(_SLIME_MAINS))
    root = Path(plan.command[at]).parent
    arguments = plan.command[at + 1 :]
    if not (root / "slime" / "utils" / "arguments.py").is_file():
        yield "slime", "missing", f"no checkout at {root}"
        return
    yield "slime", "works", str(root)
    yield from map(_package, ("sglang", "sglang_router", "megatron.core", "megatron.training"))
    flags = read_flags(arguments)
    if is_installed("megatron.training"):
        parse = [sys.executable, "-c", _SLIME_PARSE, *arguments]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(parse, env=env, capture_output=True, text=True)
        last = (done.stderr.strip().splitlines() or [""])[-1][:400]
        verdict = ("wrong", last) if done.returncode else ("works", "parsed and validated by slime")
        # exit code 2 comes from argparse; without a GPU, other errors come from Megatron-LM, which wants one
        if done.returncode not in (0, 2) and _gpus(1)[1] == "unknown":
            verdict = ("unknown", f"cannot be validated here: {last}")
        yield f"arguments of {plan.arm}", *verdict
    else:
        yield f"arguments of {plan.arm}", "unknown", "slime's parser needs Megatron-LM on PYTHONPATH"
    path_keys = ("prompt_data", "ref_load", "custom_config_path")
    yield from _files("file", [flags[key] for key in path_keys if key in flags])
    yield from _model(flags.get("hf_checkpoint", ""))


def _package(name: str) -> Row:
    verdict = ("works", "") if is_installed(name) else ("missing", "it cannot be imported here")
    return f"package {name}", *verdict


def _files(what: str, paths: Sequence[Any], prepared: bool = False) -> Iterator[Row]:
    absent = ("unknown", "the recipe's prepare command makes it") if prepared else ("missing", "")
    for path in (path for value in paths for path in ([value] if isinstance(value, str) else value)):
        yield f"{what} {path}", *(("works", "") if Path(path).expanduser().exists() else absent)


def _is_here(path: str) -> bool:
    """Returns whether the folder ``path``, or the local cache of the Hugging Face hub for this name, has a ``config.json``."""
    from huggingface_hub import try_to_load_from_cache

    if Path(path, "config.json").is_file():
        return True
    try:
        return isinstance(try_to_load_from_cache(path, "config.json"), str)
    except ValueError:  # path is not a valid name of a model
        return False


def _model(path: str, prepared: bool = False) -> Iterator[Row]:
    if _is_here(path):
        yield f"model {path}", "works", ""
    elif prepared or not Path(path).is_absolute():
        yield f"model {path}", "unknown", "not in the cache here; the recipe's prepare command fetches or makes it"
    else:
        yield f"model {path}", "missing", "no folder with a config.json"
