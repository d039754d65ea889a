"""Places in verl that assume an accelerator where a platform has no say, as patches that only a CPU run applies."""

from collections.abc import Callable
from typing import Any

from rl_accel.patches.patch import Patch


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


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="verl.cpu.process_group",
        feature="cpu",
        target="verl.utils.distributed:initialize_global_process_group_ray",
        supports="verl>=0.9.0",
        params=("timeout_second", "backend"),
        make=_one_backend,
        no_seam="the backend string is built from the platform's device and backend names; on a CPU it names cpu:gloo twice",
    ),
    Patch(
        name="verl.cpu.value_model",
        feature="cpu",
        target="verl.utils.model:load_valuehead_model",
        supports="verl>=0.9.0",
        params=("local_path", "torch_dtype", "model_config", "trust_remote_code"),
        make=_value_model_with_configured_attention,
        no_seam="the critic is always loaded with flash_attention_2, whatever attn_implementation the config names",
    ),
    Patch(
        name="verl.cpu.offload_policy",
        feature="cpu",
        target="verl.utils.fsdp_utils:apply_fsdp2",
        supports="verl>=0.9.0",
        params=("model", "fsdp_kwargs", "config"),
        make=_parameters_stay,
        no_seam="a forward-only FSDP2 engine always offloads to pinned memory, which needs an accelerator",
    ),
)
