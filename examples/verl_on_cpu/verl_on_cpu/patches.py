"""Patches of verl for a CPU, and a check of verl's configuration.

Some patches replace code of verl that assumes an accelerator and that verl's platform interface cannot change. The check runs
before a trainer starts, and lists the overrides that a run on a CPU still needs.

The other patches make runs reproducible: two runs with the same seed produce equal batches, row by row, so that an A/B compares
training and not random noise. Stock verl names prompts by random uuids, samples tokens on an unseeded server, and passes a batch to
the trainer in order of completion. With the patches, the seed of a response derives from the seed of the run, the step, the
session, and the index of the prompt in order of submission, which is also the order of a batch.
"""

import os
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from rl_accel.errors import ConfigError
from rl_accel.patches.patch import Patch
from rl_accel.patches.verl.verl_run import VerlRun
from verl_on_cpu import (
    ENGINE,
    ROLLOUT,
    Get,
    Problems,
    find_option_problems,
    read_model,
    sglang,
    vllm,
    wanted,
)
from verl_on_cpu.sampling import derive_seed

_CPUS_A_RANK = 3
"""Number of CPUs that verl reserves for each rank (training process): one for each worker group that may share the rank's bundle in
a placement group of Ray."""

_WHEELS = {"vllm": vllm, "sglang": sglang}
"""Mapping from inference engine (verl's ``rollout.name``) to the module that makes the engine work on a CPU."""

_SEEDS = {"sglang": ("sampling_seed", 31)}
"""Mapping from rollout engine to the sampling parameter with the seed of a request: its name, and its number of bits. Other engines
take a parameter ``seed`` with 63 bits."""

_ENGINES = (
    ("actor_rollout_ref.actor", "actor_rollout_ref.actor.fsdp_config", "actor"),
    ("actor_rollout_ref.ref", "actor_rollout_ref.ref.fsdp_config", "reference"),
    ("critic", "critic.fsdp", "critic"),
)
"""Training engines: for each engine, two sections of verl's configuration, each with a key ``strategy`` (such as fsdp2), and the
engine's name in messages."""


def _one_backend(original: Callable[..., Any], _settings: Any) -> Callable[..., Any]:
    def initialize_global_process_group_ray(timeout_second: int | None = None, backend: str | None = None) -> Any:
        return original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    return initialize_global_process_group_ray


def _value_model_with_configured_attention(_original: Callable[..., Any], _settings: Any) -> Callable[..., Any]:
    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation=model_config._attn_implementation,
            trust_remote_code=trust_remote_code,
        )

    return load_valuehead_model


def _parameters_stay(original: Callable[..., Any], _settings: Any) -> Callable[..., Any]:
    def apply_fsdp2(model: Any, fsdp_kwargs: dict[str, Any], config: Any) -> Any:
        from torch.distributed.fsdp import OffloadPolicy

        return original(model, {**fsdp_kwargs, "offload_policy": OffloadPolicy()}, config)

    return apply_fsdp2


def _check_first(original: Callable[..., Any], _settings: Any) -> Callable[..., Any]:
    def auto_set_device(config: Any) -> Any:
        result = original(config)
        config.trainer.device = "cpu"
        check_config(config)
        return result

    return auto_set_device


def _number_prompts(original: Callable[..., Any], _settings: Any) -> Callable[..., Any]:
    numbers = {"train": count(), "val": count()}  # apart, so that a prompt has the same number whatever runs beside it

    def generate_sequences(self: Any, prompts: Any) -> Any:
        if "priority" not in prompts:
            import torch

            # verl's V0 agent loop manager numbers prompts in this column too. Engines on a CPU do not schedule by priority.
            partition = "val" if "validate" in prompts else "train"
            prompts["priority"] = torch.tensor(
                [next(numbers[partition]) for _ in range(len(prompts))], dtype=torch.int64
            )
        return original(self, prompts)

    return generate_sequences


def _seed_responses(original: Callable[..., Any], _settings: Any) -> Callable[..., Any]:
    async def _run_agent_loop(self: Any, sampling_params: dict[str, Any], trajectory: Any, **kwargs: Any) -> Any:
        key, bits = _SEEDS.get(self.config.actor_rollout_ref.rollout.name, ("seed", 63))
        if key not in sampling_params:
            prompt = int(kwargs["priority"]) if "priority" in kwargs else str(kwargs.get("uid")).rpartition("/")[2]
            seed = self.config.actor_rollout_ref.rollout.seed
            step = int(trajectory["step"])
            seed = derive_seed(seed, step, bool(trajectory["validate"]), prompt, kwargs.get("session_id"))
            sampling_params = {**sampling_params, key: seed % 2**bits}
        return await original(self, sampling_params, trajectory, **kwargs)

    return _run_agent_loop


def _order_rows(original: Callable[..., Any], _settings: Any) -> Callable[..., Any]:
    def _materialize_batch(
        self: Any, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict[str, Any]]
    ) -> Any:
        submitted = {uid: place for place, uid in enumerate(self.prompt_global_steps[partition_id])}

        def place(key: str) -> tuple[int, int, int]:
            uid, session, index = key.rsplit("_", 2)
            return submitted.get(uid, len(submitted)), int(session), int(index)

        ordered = {key: partition_snapshot[key] for key in sorted(partition_snapshot, key=place)}
        return original(self, partition_id, selected_prompt_uids, ordered)

    return _materialize_batch


def _own_socket(original: Callable[..., Any], _settings: Any) -> Callable[..., Any]:
    def __init__(self: Any, zmq_handle: str, *args: Any, **kwargs: Any) -> None:
        folder = os.environ.get("RAY_TMPDIR", "/tmp")
        original(self, zmq_handle.replace("ipc:///tmp/", f"ipc://{folder}/", 1), *args, **kwargs)

    return __init__


def check_config(config: Any) -> None:
    """Checks whether a verl trainer with this configuration can run on a CPU.

    Raises:
        ConfigError: a setting cannot work on a CPU. The message lists the overrides that correct all such settings.
    """
    problems = list(find_problems(config))
    if problems:
        lines = "\n".join(f"  {override:<75}  # {reason}" for override, reason in problems)
        if VerlRun(config).get("cpu_platform") is None:
            lines += "\nAll of them at once: hydra.searchpath=[pkg://verl_on_cpu] +run_on=cpu"
        raise ConfigError(
            f"this run cannot work with VERL_PLATFORM=cpu as it is configured; {len(problems)} overrides are missing:\n{lines}"
        )


def find_problems(config: Any) -> Problems:
    """Yields a problem for each setting in ``config`` that cannot work on a CPU. With all their overrides, the run can work."""
    run = VerlRun(config)
    get = run.get
    if get(f"{ROLLOUT}.name") in _WHEELS:
        yield from _WHEELS[get(f"{ROLLOUT}.name")].find_problems(get)
    else:
        yield from _hf_cpu_problems(get)
    yield from wanted(get, f"{ROLLOUT}.dtype", ("float32",), "the rollout has to compute as the trainer does")
    for key in ("data_parallel_size", "pipeline_model_parallel_size"):
        yield from wanted(get, f"{ROLLOUT}.{key}", (1, None), "a rollout replica is one process")
    if run.gpus % (tp := get(f"{ROLLOUT}.tensor_model_parallel_size", 1)):
        yield f"{ROLLOUT}.tensor_model_parallel_size=1", f"{run.gpus} ranks cannot share servers by {tp}"
    for section, engine, who in _ENGINES if run.has_critic else _ENGINES[:2]:
        for key in (f"{section}.strategy", f"{engine}.strategy"):
            yield from wanted(get, key, ("fsdp2",), f"{get(key)} needs a GPU ({who})")
        key = f"{engine}.mixed_precision.param_dtype"
        reason = f"bfloat16 is the default ({who})"
        yield from wanted(get, key, ("fp32",), reason, "+")
        reason = f"weights in another precision than the other engines ({who})"
        yield from wanted(get, f"{engine}.model_dtype", ("fp32", "float32", None), reason)
    for model in ("actor_rollout_ref.model", "critic.model") if run.has_critic else ("actor_rollout_ref.model",):
        key = f"{model}.override_config.attn_implementation"
        yield from wanted(get, key, ("sdpa", "eager"), "flash attention needs a GPU", "+")
    yield from _lora_problems(get)
    yield from _ray_problems(get, run.gpus)
    if os.environ.get("VERL_ENGINE_DEVICE") != "cuda":
        yield "VERL_ENGINE_DEVICE=cuda (environment)", "the FSDP engine is registered with verl under this name only"


def _hf_cpu_problems(get: Get) -> Problems:
    name = get(f"{ROLLOUT}.name")
    yield from wanted(get, f"{ROLLOUT}.name", (ENGINE,), f"{name} does not generate on a CPU")
    reason = "the only log-probabilities that hf_cpu returns"
    yield from wanted(get, f"{ROLLOUT}.logprobs_mode", ("processed_logprobs", None), reason)
    yield from _hf_cpu_model_problems(read_model(get))
    options = get(f"{ROLLOUT}.engine_kwargs.hf_cpu", {})
    for key, reason in find_option_problems(options):
        yield f"~{ROLLOUT}.engine_kwargs.hf_cpu.{key}", reason


def _hf_cpu_model_problems(model: Any) -> Problems:
    from transformers import AutoModelForCausalLM

    if model is None:
        return
    if not (
        type(model) in AutoModelForCausalLM._model_mapping or "AutoModelForCausalLM" in getattr(model, "auto_map", {})
    ):
        reason = f"hf_cpu takes causal language models of text, not {model.model_type}"
        yield "actor_rollout_ref.model.path=...", reason
    kinds = set(getattr(model.get_text_config(), "layer_types", None) or []) - {"full_attention"}
    if kinds:
        reason = f"hf_cpu takes layers with full attention only, found {', '.join(sorted(kinds))}"
        yield "actor_rollout_ref.model.path=...", reason


def _lora_problems(get: Get) -> Problems:
    model = "actor_rollout_ref.model"
    for key in (f"{model}.lora_rank", f"{model}.lora.rank"):
        if get(key, 0) <= 0:
            continue
        if get("actor_rollout_ref.rollout.name") != "vllm":
            yield f"{key}=0", "hf_cpu takes whole models only; vLLM takes adapters that are merged"
        elif not get(f"{model}.lora.merge", False):
            yield f"{model}.lora.merge=True", "vLLM's CPU build waits for ever for an adapter that is not merged"


def _ray_problems(get: Get, ranks: int) -> Problems:
    import ray

    if ray.is_initialized():
        return
    if get("ray_kwargs.ray_init.address") is not None or os.environ.get("RAY_ADDRESS"):
        # A run cannot choose the resources of a cluster that is already running.
        for key in ("num_cpus", "num_gpus", "object_store_memory"):
            if get(f"ray_kwargs.ray_init.{key}") is not None:
                yield f"ray_kwargs.ray_init.{key}=null", "Ray takes none for a cluster that runs already"
        return
    standalone = get("actor_rollout_ref.rollout.nnodes", 0) * get("actor_rollout_ref.rollout.n_gpus_per_node", 0)
    if get("ray_kwargs.ray_init.num_gpus", 0) < ranks + standalone:
        yield (
            f"+ray_kwargs.ray_init.num_gpus={ranks + standalone}",
            "verl counts ranks in GPUs; on a CPU these are tokens that stand for no device",
        )
    units = get("transfer_queue.backend.SimpleStorage.num_data_storage_units", 1)
    cpus = _CPUS_A_RANK * (ranks + standalone) + units + 2
    given = get("ray_kwargs.ray_init.num_cpus", os.cpu_count() or 1)
    if given < cpus:
        yield f"ray_kwargs.ray_init.num_cpus={cpus}", f"placement needs {cpus}, there are {given}; also only tokens"


_patch = partial(Patch, supports="verl>=0.9.0")

SWITCHES: tuple[Patch, ...] = (
    _patch(
        name="verl.cpu.process_group",
        target="verl.utils.distributed:initialize_global_process_group_ray",
        params=("timeout_second", "backend"),
        make=_one_backend,
        no_seam="the backend string is built from the platform's device and backend names; on a CPU it names cpu:gloo twice",
        remove_when="verl names each backend of a process group once",
    ),
    _patch(
        name="verl.cpu.value_model",
        target="verl.utils.model:load_valuehead_model",
        params=("local_path", "torch_dtype", "model_config", "trust_remote_code"),
        make=_value_model_with_configured_attention,
        no_seam="the critic is always loaded with flash_attention_2, whatever attn_implementation the config names",
        remove_when="the critic follows attn_implementation",
    ),
    _patch(
        name="verl.cpu.offload_policy",
        target="verl.utils.fsdp_utils:apply_fsdp2",
        params=("model", "fsdp_kwargs", "config"),
        make=_parameters_stay,
        no_seam="a forward-only FSDP2 engine always offloads to pinned memory, which needs an accelerator",
        remove_when="pinned memory is used only where there is an accelerator",
    ),
    _patch(
        name="verl.cpu.preflight",
        target="verl.utils.device:auto_set_device",
        params=("config",),
        make=_check_first,
        no_seam="the function sets trainer.device for two platforms by name and asks no other",
        remove_when="verl asks its platforms for trainer.device",
    ),
    _patch(
        name="verl.cpu.prompt_numbers",
        target="verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ.generate_sequences",
        params=("self", "prompts"),
        make=_number_prompts,
        no_seam="agent_loop_manager_class takes one class, and a run may need it for its own",
        remove_when="prompts have numbers of their own",
    ),
    _patch(
        name="verl.cpu.response_seeds",
        target="verl.experimental.agent_loop.agent_loop:AgentLoopWorker._run_agent_loop",
        params=("self", "sampling_params", "trajectory", "agent_name", "trace", "kwargs"),
        make=_seed_responses,
        no_seam="a server is told neither which prompt of the batch nor which session a request is",
        remove_when="servers are told a seed for each response",
    ),
    _patch(
        name="verl.cpu.row_order",
        target="verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._materialize_batch",
        supports="verl>=0.9.1",
        params=("self", "partition_id", "selected_prompt_uids", "partition_snapshot"),
        make=_order_rows,
        no_seam="custom_sampler takes one class, and a run may need it for its own",
        remove_when="rows are in the order of the prompts",
    ),
    *(
        _patch(
            name=f"verl.cpu.socket_of_{end.lower()}",
            target=f"verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeight{end}.__init__",
            params=("self", "zmq_handle", "*"),
            make=_own_socket,
            no_seam="the name of the socket for weights has Ray's job id, which is 01000000 in every new cluster of a machine",
            upstream="https://github.com/verl-project/verl/issues/6233",
            remove_when="two runs on one machine with a Ray cluster each have two sockets",
        )
        for end in ("Sender", "Receiver")
    ),
)
