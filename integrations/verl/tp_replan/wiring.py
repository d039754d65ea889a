"""Which sizes a configuration of verl allows, and what this feature cannot work with."""

from typing import Any

from omegaconf import OmegaConf, open_dict

from rl_accel.errors import ConfigError
from rl_accel.features.tp_replan import TpReplanFlags
from rl_accel.integrations.verl.tail_batching import MODE as TAIL_BATCHING
from rl_accel.parallel.model_memory import read_configuration
from rl_accel.parallel.tp_bounds import TpBounds
from rl_accel.parallel.tp_settings import TpSettings
from rl_accel.patches.seams import Seams

SEAMS: Seams = {"verl.trainer.ppo.v1.trainer_base:PPOTrainer.prepare_step": ("self",)}
"""verl 0.9.1 has it."""
FLAG = "rl_accel.tp_replan"
TP_KEY = "actor_rollout_ref.rollout.tensor_model_parallel_size"
_ROLLOUT = "actor_rollout_ref.rollout"
_COUNTED = {"hf_cpu": None, "vllm": (f"{_ROLLOUT}.disable_log_stats", False)} | {
    "sglang": (f"{_ROLLOUT}.engine_kwargs.sglang.enable_metrics", True)
}
"""Engines whose preemptions can be read, and the key that has them count."""
_RELAUNCHED = ("hf_cpu",)
"""Engines whose training side can be given other servers within a run."""
_NEEDED_IN_A_CHECKPOINT = ("model", "optimizer", "extra")


def wire(config: Any, flags: TpReplanFlags) -> None:
    """Check ``config`` (verl's) and have its servers count preemptions. Idempotent. Arm the exit code, but for action=advise.

    Raises:
        ConfigError: something in ``config`` cannot go together with this feature, or no size is possible.
    """
    check(config, flags)
    switch = _COUNTED[_get(config, f"{_ROLLOUT}.name")]
    if switch is not None:
        with open_dict(config):
            OmegaConf.update(config, *switch, force_add=True)
    bounds_of(config, flags)
    if flags.action != "advise":  # live too: if no server comes up again, the run ends to be launched again
        from rl_accel.integrations.ray import restart_note

        restart_note.arm()


def refuse_unwired(config: Any) -> None:
    """Stop a trainer whose servers nobody has told to count.

    Raises:
        ConfigError: its driver has not called ``validate_config``.
    """
    switch = _COUNTED.get(_get(config, f"{_ROLLOUT}.name"))
    if switch is not None and _get(config, switch[0]) != switch[1]:
        _refuse(*switch, _get(config, switch[0]), "verl's validate_config sets it, which the driver must call")


def check(config: Any, flags: TpReplanFlags) -> None:
    """Refuse what this feature cannot work with.

    Raises:
        ConfigError: names the key, what is wanted and what was found.
    """
    if _get(config, "trainer.v1") is None:
        import verl

        raise ConfigError(f"{FLAG} wants verl 0.9.1 or later with its V1 trainer, found verl {verl.__version__}")
    if not _get(config, "trainer.use_v1", True):
        _refuse("trainer.use_v1", True, False)
    mode = _get(config, "trainer.v1.trainer_mode")
    if mode not in ("sync", TAIL_BATCHING):
        _refuse(
            "trainer.v1.trainer_mode", f"sync or {TAIL_BATCHING}", mode, "rollout seconds of a step mean nothing else"
        )
    engine = _get(config, f"{_ROLLOUT}.name")
    if engine not in _COUNTED:
        _refuse(f"{_ROLLOUT}.name", f"one of {', '.join(_COUNTED)}", engine, "preemptions of others are not known")
    if _get(config, f"{_ROLLOUT}.disaggregation.enabled", False):
        _refuse(f"{_ROLLOUT}.disaggregation.enabled", False, True)
    if flags.action == "live" and engine not in _RELAUNCHED:
        raise ConfigError(
            f"{FLAG}.action=live wants {_ROLLOUT}.name = {' or '.join(_RELAUNCHED)}, found {engine} (training workers hold on "
            "to the servers that they began with); use action=restart"
        )
    if flags.action != "advise":
        _check_checkpoints(config)


def bounds_of(config: Any, flags: TpReplanFlags) -> TpBounds:
    """Return the possible sizes.

    Raises:
        ConfigError: there is none, or the configured one is not among them.
    """

    def number(key: str, default: int = 1) -> int:
        return int(_get(config, key, default) or default)

    gpus = number("trainer.n_gpus_per_node") * number("trainer.nnodes")
    others = number(f"{_ROLLOUT}.data_parallel_size") * number(f"{_ROLLOUT}.pipeline_model_parallel_size")
    if gpus % others:
        _refuse(f"{_ROLLOUT}.data_parallel_size x pipeline_model_parallel_size", f"a divisor of {gpus} GPUs", others)
    longest = number(f"{_ROLLOUT}.max_model_len", 0) or sum(
        number(f"data.max_{which}_length", 0) for which in ("prompt", "response")
    )
    model = read_configuration(str(_get(config, "actor_rollout_ref.model.path", "")), _copied)
    if model is not None and _get(config, f"{_ROLLOUT}.quantization"):
        model = {**model, "quantization_config": True}
    try:
        bounds = TpBounds(
            settings_of(config, flags),
            gpus // others,
            number("trainer.n_gpus_per_node"),
            model=model,
            max_tokens=longest or None,
            bytes_per_value=4 if _get(config, f"{_ROLLOUT}.dtype") == "float32" else 2,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{FLAG}: {error}") from error
    tp = number(TP_KEY)
    if tp not in bounds.sizes:
        _refuse(TP_KEY, f"one of {', '.join(map(str, bounds.sizes))}", tp, bounds.why_not(tp))
    return bounds


def settings_of(config: Any, flags: TpReplanFlags) -> TpSettings:
    """Return the planner's settings.

    Raises:
        TypeError, ValueError: flags contradict each other.
    """
    return TpSettings.of(flags, float(_get(config, f"{_ROLLOUT}.gpu_memory_utilization", 0.9)))


def _copied(path: str) -> str:
    from verl.utils.fs import copy_to_local

    return str(copy_to_local(path))


def _check_checkpoints(config: Any) -> None:
    for model in ("actor_rollout_ref.actor", "critic"):
        section = f"{model}.checkpoint"
        if _get(config, f"{section}.async_save", False):
            _refuse(f"{section}.async_save", False, True, "a restart needs a checkpoint that is complete")
        for which in ("save_contents", "load_contents"):
            found = _get(config, f"{section}.{which}")
            missing = [] if found is None else [part for part in _NEEDED_IN_A_CHECKPOINT if part not in found]
            if missing:
                _refuse(
                    f"{section}.{which}", "model, optimizer and extra", list(found), "a restart would change training"
                )
    if not _get(config, "trainer.default_local_dir"):
        _refuse("trainer.default_local_dir", "a folder", None)


def _get(config: Any, key: str, default: Any = None) -> Any:
    return OmegaConf.select(config, key, default=default)


def _refuse(key: str, wanted: Any, found: Any, reason: str = "") -> None:
    raise ConfigError(f"{FLAG} wants {key} = {wanted}, found {found}" + (f" ({reason})" if reason else ""))
