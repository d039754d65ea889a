"""One look at a run's configuration before anything starts: what cannot work on a CPU, each with the override that mends it."""

import os
from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import OmegaConf

from rl_accel.errors import ConfigError

_CPUS_A_RANK = 3
"""verl reserves a bundle of three CPUs for a rank of its colocated worker groups."""

_ENGINES = (
    ("actor_rollout_ref.actor", "fsdp_config", "actor"),
    ("actor_rollout_ref.ref", "fsdp_config", "reference"),
    ("critic", "fsdp", "critic"),
)


def check(config: Any) -> None:
    """Check the whole configuration of a verl trainer.

    Raises:
        ConfigError: something in it cannot work on a CPU; the message lists all of it.
    """
    problems = list(find_problems(config))
    if problems:
        lines = "\n".join(f"  {override:<75}  # {reason}" for override, reason in problems)
        raise ConfigError(
            f"this run cannot work with VERL_PLATFORM=cpu as it is configured; {len(problems)} overrides are missing:\n{lines}\n"
            "All of them at once: hydra.searchpath=[pkg://rl_accel.lab.verl_cpu] +run_on=cpu"
        )


def find_problems(config: Any) -> Iterator[tuple[str, str]]:
    """Yield ``(override, reason)`` for everything in ``config`` that cannot work on a CPU."""

    def get(key: str, default: Any = None) -> Any:
        value = OmegaConf.select(config, key, default=default)
        return default if value is None else value

    rollout = "actor_rollout_ref.rollout"
    if get(f"{rollout}.name") != "hf_cpu":
        yield f"{rollout}.name=hf_cpu", f"{get(f'{rollout}.name')} does not generate on a CPU"
    if get(f"{rollout}.dtype") != "float32":
        yield f"{rollout}.dtype=float32", "the rollout has to compute as the trainer does"
    for key in ("data_parallel_size", "pipeline_model_parallel_size"):
        if get(f"{rollout}.{key}", 1) != 1:
            yield f"{rollout}.{key}=1", "a rollout replica is one process"
    tp, ranks = get(f"{rollout}.tensor_model_parallel_size", 1), _ranks(get)
    if ranks and ranks % tp:
        yield f"{rollout}.tensor_model_parallel_size=1", f"{ranks} ranks cannot share servers by {tp}"
    if get(f"{rollout}.logprobs_mode", "processed_logprobs") != "processed_logprobs":
        yield f"{rollout}.logprobs_mode=processed_logprobs", "the only log-probabilities that hf_cpu returns"
    budget = get(f"{rollout}.engine_kwargs.hf_cpu.kv_tokens")
    spared = (tp - 1) * get(f"{rollout}.engine_kwargs.hf_cpu.weight_tokens", 0)
    longest = get(f"{rollout}.max_model_len", get(f"{rollout}.prompt_length", 0) + get(f"{rollout}.response_length", 0))
    if isinstance(budget, int) and budget * tp + spared < longest:
        least = -(-(longest - spared) // tp)
        yield f"{rollout}.engine_kwargs.hf_cpu.kv_tokens={least}", f"one request may need {longest} tokens"
    yield from _engine_problems(get)
    for model in ("actor_rollout_ref.model", "critic.model"):
        if model.startswith("critic") and not _uses_critic(get):
            continue
        attention = get(f"{model}.override_config.attn_implementation")
        if attention not in ("sdpa", "eager"):
            yield f"+{model}.override_config.attn_implementation=sdpa", "flash attention needs a GPU"
    yield from _ray_problems(get)
    if os.environ.get("VERL_ENGINE_DEVICE") != "cuda":
        yield "VERL_ENGINE_DEVICE=cuda (environment)", "the FSDP engine is registered with verl under this name only"


def _ranks(get: Callable[..., Any]) -> int:
    return int(get("trainer.n_gpus_per_node", 0) * get("trainer.nnodes", 1))


def _uses_critic(get: Callable[..., Any]) -> bool:
    enable = get("critic.enable")
    return bool(enable) if enable is not None else get("algorithm.adv_estimator") == "gae"


def _engine_problems(get: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    for section, engine, who in _ENGINES:
        if who == "critic" and not _uses_critic(get):
            continue
        for key in (f"{section}.strategy", f"{section}.{engine}.strategy"):
            if get(key) != "fsdp2":
                yield f"{key}=fsdp2", f"{get(key)} needs a GPU ({who})"
        prefix = f"{section}.{engine}"
        if get(f"{prefix}.mixed_precision.param_dtype") != "fp32":
            yield f"+{prefix}.mixed_precision.param_dtype=fp32", f"bfloat16 is the default ({who})"
        if get(f"{prefix}.model_dtype", "fp32") not in ("fp32", "float32"):
            yield f"{prefix}.model_dtype=fp32", f"weights in another precision than the other engines ({who})"


def _ray_problems(get: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    if get("ray_kwargs.ray_init.address") is not None or os.environ.get("RAY_ADDRESS"):
        return  # the resources of a cluster that already runs are not this run's to choose
    ranks = _ranks(get)
    standalone = get("actor_rollout_ref.rollout.nnodes", 0) * get("actor_rollout_ref.rollout.n_gpus_per_node", 0)
    if get("ray_kwargs.ray_init.num_gpus", 0) < ranks + standalone:
        yield (
            f"+ray_kwargs.ray_init.num_gpus={ranks + standalone}",
            "verl counts ranks in GPUs; on a CPU these are tokens that stand for no device",
        )
    units = get("transfer_queue.backend.SimpleStorage.num_data_storage_units", 1)
    cpus = _CPUS_A_RANK * (ranks + standalone) + units + 2
    found = get("ray_kwargs.ray_init.num_cpus", os.cpu_count() or 1)
    if found < cpus:
        yield f"ray_kwargs.ray_init.num_cpus={cpus}", f"placement needs {cpus}, there are {found}; also only tokens"
