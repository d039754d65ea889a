"""How slime's engines stand on their GPUs, and the document for its ``--sglang-config`` in which they stand at another size.

After slime 624b824a8: ``SglangConfig`` (backends/sglang_utils/sglang_config.py), ``_resolve_sglang_config`` (ray/rollout.py:1129),
``_compute_server_args`` (backends/sglang_utils/sglang_engine.py:506).
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rl_accel.errors import ConfigError

_FLAG = "rl_accel.tp_replan"


@dataclass(frozen=True)
class Layout:
    """The engines that rollouts use: those of the first model.

    Attributes:
        gpus: of all of them.
        gpus_per_engine: of each.
        pipeline: how many of these are stages of a pipeline.
        overrides: SGLang's settings for these engines alone, and their ``model_path``.
        document: what ``--sglang-config`` says, or what slime does without it.
        group: which of the first model's server groups they are.
    """

    gpus: int
    gpus_per_engine: int
    pipeline: int
    overrides: dict[str, Any]
    document: dict[str, Any]
    group: int

    @property
    def tp(self) -> int:
        """The tensor-parallel size."""
        return self.gpus_per_engine // self.pipeline

    def at(self, tp: int, default: int) -> dict[str, Any]:
        """Return the document for another size.

        Args:
            tp: the size.
            default: the present ``--rollout-num-gpus-per-engine``. For other models that rely on it, it is written down: the next
                launch has another.
        """
        document = copy.deepcopy(self.document)
        first, *others = document["sglang"]
        _groups(first)[self.group]["num_gpus_per_engine"] = tp * self.pipeline
        for model in others:
            if not model.get("num_gpus_per_engine"):
                model["num_gpus_per_engine"] = default
        return document


def layout_of(args: Any) -> Layout:
    """Read the layout from slime's arguments.

    Raises:
        ConfigError: slime does not start the engines, or they do not stand at one size; names what is wanted and what was found.
    """
    if getattr(args, "rollout_external", False):
        _refuse("--rollout-external-engine-addrs to be unset: slime starts no engine then", args.rollout_external)
    if getattr(args, "prefill_num_servers", None) is not None:
        found = args.prefill_num_servers
        _refuse("--prefill-num-servers to be unset: prefill and decode have sizes of their own", found)
    if not args.rollout_num_gpus:
        _refuse("--rollout-num-gpus of at least 1", args.rollout_num_gpus)
    document = _document(args)
    model = document["sglang"][0]
    used = [(i, group) for i, group in enumerate(_groups(model)) if group.get("worker_type") != "placeholder"]
    if [group.get("worker_type") for _, group in used] != ["regular"]:
        kinds = ", ".join(str(group.get("worker_type")) for _, group in used) or "none"
        _refuse("one regular server group in the first model of --sglang-config", kinds)
    ((index, group),) = used
    overrides = {str(key).replace("-", "_"): value for key, value in (group.get("overrides") or {}).items()}
    overrides.setdefault("model_path", model.get("model_path") or args.hf_checkpoint)
    if "tp_size" in overrides:
        _refuse("no tp_size among the overrides of --sglang-config", overrides["tp_size"])
    if setting(args, overrides, "dp_size", 1) > 1:
        found = setting(args, overrides, "dp_size", 1)
        _refuse("--sglang-dp-size 1: with data-parallel attention more GPUs are not more cache for an engine", found)
    size = group.get("num_gpus_per_engine") or model.get("num_gpus_per_engine") or args.rollout_num_gpus_per_engine
    pipeline = int(setting(args, overrides, "pp_size", 1))
    if size % pipeline or group["num_gpus"] % size:
        _refuse(f"GPUs of engines in whole pipelines of {pipeline} and whole engines", f"{size} of {group['num_gpus']}")
    return Layout(group["num_gpus"], size, pipeline, overrides, document, index)


def setting(args: Any, overrides: dict[str, Any], name: str, default: Any) -> Any:
    """Return what SGLang is told for ``name``: the server group's override, else the command line's ``--sglang-*``."""
    found = overrides.get(name, getattr(args, f"sglang_{name}", None))
    return default if found is None else found


def _document(args: Any) -> dict[str, Any]:
    path = getattr(args, "sglang_config", None)
    if path is None:
        group = {"worker_type": "regular", "num_gpus": args.rollout_num_gpus}
        return {"sglang": [{"name": "default", "server_groups": [group]}]}
    try:
        found: dict[str, Any] = yaml.safe_load(Path(path).read_text())
        if found["sglang"][0]["name"] is not None:
            return found
    except (OSError, yaml.YAMLError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{_FLAG} cannot read --sglang-config {path}: {error!r}") from error
    raise ConfigError(f"{_FLAG} cannot read --sglang-config {path}: its first model has no name")


def _groups(model: dict[str, Any]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = model.get("server_groups") or model.get("engine_groups") or []
    return groups


def _refuse(wanted: str, found: Any) -> None:
    raise ConfigError(f"{_FLAG} wants {wanted}, found {found}")
