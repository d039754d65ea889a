"""Protocols of slime's modules and classes, which :mod:`rl_accel.patches.seams` compares with the installed version of slime.

A protocol declares the members that rl-accel's adapters use, and the functions of slime that call these adapters.
"""

from typing import Any, Protocol

from rl_accel.patches.seams import interface_of


@interface_of("slime.utils.types:Sample.Status")
class SampleStatus(Protocol):
    PENDING: Any
    COMPLETED: Any
    TRUNCATED: Any
    ABORTED: Any
    FAILED: Any


@interface_of("slime.utils.types:Sample")
class Sample(Protocol):
    group_index: int | None
    index: int
    prompt: Any
    tokens: list[int]
    response: str
    response_length: int
    label: str | None
    reward: Any
    metadata: dict[str, Any]
    status: Any
    session_id: str | None
    generate_function_path: str | None
    custom_rm_path: str | None
    remove_sample: bool

    def to_dict(self) -> dict[str, Any]: ...


@interface_of("slime.rollout.sglang_rollout")
class SglangRollout(Protocol):
    GenerateState: Any

    async def generate(self, args: Any, sample: Any, sampling_params: Any) -> Any: ...
    async def generate_and_rm(self, args: Any, sample: Any, sampling_params: Any, evaluation: bool = False) -> Any: ...
    def generate_rollout(self, args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any: ...


@interface_of("slime.rollout.data_source:RolloutDataSource")
class RolloutDataSource(Protocol):
    args: Any
    dataset: Any
    sample_index: int

    def __init__(self, args: Any) -> None: ...
    def __len__(self) -> int: ...
    def get_samples(self, num_samples: int) -> list[list[Sample]]: ...
    def add_samples(self, samples: list[list[Any]]) -> None: ...
    def save(self, rollout_id: int) -> None: ...
    def load(self, rollout_id: int | None = None) -> None: ...


@interface_of("slime.rollout.rm_hub")
class RmHub(Protocol):
    async def async_rm(self, args: Any, sample: Any) -> Any: ...
    async def batched_async_rm(self, args: Any, samples: list[Any]) -> list[Any]: ...


@interface_of("slime.rollout.filter_hub.base_types")
class FilterHub(Protocol):
    def call_dynamic_filter(self, fn: Any, *args: Any) -> Any: ...
    def should_drop_dynamic_filter_output(
        self, output: Any, *, remaining_batch_size: int, target_data_size: int
    ) -> bool: ...


@interface_of("slime.rollout.sample_hooks")
class SampleHooks(Protocol):
    async def apply_rollout_sample_hooks(self, args: Any, value: Any) -> Any: ...


@interface_of("slime.backends.sglang_utils.server_control")
class ServerControl(Protocol):
    def num_requests_from_load(self, load: Any) -> int: ...


@interface_of("slime.utils.http_utils")
class HttpUtils(Protocol):
    async def post(self, url: str, payload: Any, max_retries: int = 60, headers: Any = None) -> Any: ...
    async def get(self, url: str) -> Any: ...


@interface_of("slime.utils.misc")
class Misc(Protocol):
    def load_function(self, path: str) -> Any: ...


@interface_of("slime.utils.async_utils")
class AsyncUtils(Protocol):
    def run(self, coro: Any) -> Any: ...
    def get_async_loop(self) -> Any: ...


@interface_of("slime.observability.rollout_metrics")
class RolloutMetrics(Protocol):
    def log_rollout_data(
        self, rollout_id: int, args: Any, samples: Any, rollout_extra_metrics: Any, rollout_time: float
    ) -> Any: ...


@interface_of("slime.observability.logging_utils")
class LoggingUtils(Protocol):
    def log(self, args: Any, metrics: dict[str, float], step_key: str) -> Any: ...


@interface_of("slime.observability.metric_utils")
class MetricUtils(Protocol):
    def compute_rollout_step(self, args: Any, rollout_id: int) -> int: ...
