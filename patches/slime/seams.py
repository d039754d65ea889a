"""What tail batching holds on to in slime, checked before it is used, so that a slime that has changed is refused by name."""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from rl_accel.errors import PatchRefused

FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "slime.rollout.sglang_rollout:generate": ("args", "sample", "sampling_params"),
    "slime.rollout.sglang_rollout:generate_and_rm": ("args", "sample", "sampling_params", "evaluation"),
    "slime.rollout.sglang_rollout:generate_rollout": ("args", "rollout_id", "data_source", "evaluation"),
    "slime.rollout.rm_hub:batched_async_rm": ("args", "samples"),
    "slime.rollout.filter_hub.base_types:call_dynamic_filter": ("fn",),
    "slime.rollout.filter_hub.base_types:should_drop_dynamic_filter_output": (
        "output",
        "remaining_batch_size",
        "target_data_size",
    ),
    "slime.backends.sglang_utils.server_control:num_requests_from_load": ("load",),
    "slime.utils.http_utils:post": ("url", "payload", "max_retries", "headers"),
    "slime.utils.http_utils:get": ("url",),
    "slime.utils.misc:load_function": ("path",),
    "slime.utils.async_utils:run": ("coro",),
    "slime.utils.async_utils:get_async_loop": (),
}
"""Parameters by function, ``*args`` and ``**kwargs`` left out."""
SAMPLE_FIELDS = (
    "group_index",
    "index",
    "prompt",
    "tokens",
    "response",
    "response_length",
    "reward",
    "metadata",
    "status",
    "session_id",
    "generate_function_path",
)
STATUSES = ("PENDING", "COMPLETED", "TRUNCATED", "ABORTED", "FAILED")
POSITION = ("sample_offset", "epoch_id", "sample_group_index", "sample_index", "metadata")
"""Attributes of ``RolloutDataSource`` that make up its place in the data."""
FLAGS = (
    "rollout_function_path",
    "eval_function_path",
    "data_source_path",
    "custom_megatron_init_path",
    "custom_config_path",
    "rollout_batch_size",
    "n_samples_per_prompt",
    "over_sampling_batch_size",
    "partial_rollout",
    "buffer_filter_path",
    "dynamic_sampling_filter_path",
    "rollout_sample_filter_path",
    "rollout_all_samples_process_path",
    "custom_generate_function_path",
    "group_rm",
    "num_rollout",
    "num_epoch",
    "prompt_data",
    "rollout_shuffle",
    "rollout_seed",
)


def require() -> None:
    """Check the slime that can be imported here.

    Raises:
        PatchRefused: names the function or field, what is wanted and what was found.
    """
    found = problem("tail_batching", FUNCTIONS, SAMPLE_FIELDS, STATUSES)
    if found:
        raise PatchRefused(found)


def problem(
    feature: str, functions: Mapping[str, tuple[str, ...]], fields: Sequence[str], statuses: Sequence[str] = ()
) -> str:
    """Say what the slime that can be imported here lacks of these functions, fields of ``Sample`` and its statuses, or ""."""
    for where, wanted in functions.items():
        module, _, name = where.partition(":")
        function = getattr(importlib.import_module(module), name, None)
        if function is None:
            return f"{feature} wants {where}, which this slime does not have"
        found = _parameters(function)
        if found != wanted:
            return f"{feature} wants {where}({', '.join(wanted)}), found ({', '.join(found)})"
    from slime.utils.types import Sample

    missing = [name for name in fields if name not in Sample.__dataclass_fields__]
    missing += [f"Status.{name}" for name in statuses if not hasattr(Sample.Status, name)]
    return f"{feature} wants slime's Sample to have {', '.join(missing)}" if missing else ""


def _parameters(function: Any) -> tuple[str, ...]:
    """Names of the parameters of ``function``, without ``*args`` and ``**kwargs``."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(inspect.unwrap(function)).parameters.values()
    return tuple(parameter.name for parameter in found if parameter.kind not in variable)
