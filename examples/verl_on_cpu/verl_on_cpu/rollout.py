"""Rollout engine ``rollout.name=hf_cpu``, with which verl generates responses on a CPU.

:class:`CPURolloutServer` is the Ray actor that verl's client and checkpoint engine call. :class:`CPURolloutReplica` starts this
actor. :class:`CPUServerAdapter` sends new weights from the training workers to the actor.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import ray
import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from verl_on_cpu import find_option_problems
from verl_on_cpu.engine import CPUEngine
from verl_on_cpu.requests import EngineStats, Generation
from verl_on_cpu.sampling import SamplingParams

logger = logging.getLogger("rl_accel")


class CPURolloutServer:
    """Rollout server of one replica on the CPU, with the methods that verl calls on a vLLM or SGLang server actor.

    Cancelling a :meth:`generate` call with ``ray.cancel`` ends the request before the next decoding step.
    """

    def __init__(self, config: Any, model_config: Any) -> None:
        from transformers import AutoModelForCausalLM

        self._config: RolloutConfig = omega_conf_to_dataclass(config, dataclass_type=RolloutConfig)
        model: HFModelConfig = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        self._engine = CPUEngine(
            AutoModelForCausalLM.from_pretrained(
                model.local_path, dtype=torch.float32, trust_remote_code=model.trust_remote_code
            ).eval(),
            eos_token_ids=_eos_token_ids(model),
            max_num_seqs=self._config.max_num_seqs,
            max_model_len=self._config.max_model_len or (self._config.prompt_length + self._config.response_length),
            seed=self._config.seed,
            **_engine_options(self._config),
        )
        self._global_steps: int | None = None
        self._rejecting = False
        self._paused = False
        self._inflight: set[asyncio.Future[Generation]] = set()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Returns one response to a prompt, given as token ids. While the server rejects requests (:meth:`abort_all_requests`), the
        response is empty, with the stop reason "aborted".

        Raises:
            ValueError: the prompt is invalid or too long, a sampling parameter is unknown, or images, video or audio are given.
            EngineError: the request failed inside the engine.
        """
        if any(data is not None for data in (image_data, video_data, audio_data)):
            raise ValueError("hf_cpu generates from text only; images, video or audio were given")
        if self._rejecting:
            return self._output(Generation([], None, "aborted"))
        config = self._config
        tokens_left = min(config.response_length, config.prompt_length + config.response_length - len(prompt_ids))
        params = SamplingParams.from_dict(sampling_params, max_tokens=max(1, tokens_left), ignore_eos=config.ignore_eos)
        future = asyncio.wrap_future(self._engine.submit(request_id, prompt_ids, params))
        self._inflight.add(future)
        future.add_done_callback(self._inflight.discard)
        return self._output(await future)

    def _output(self, generation: Generation) -> TokenOutput:
        return TokenOutput(
            token_ids=generation.token_ids,
            log_probs=generation.logprobs,
            stop_reason=generation.stop_reason,
            num_preempted=0,
            extra_fields={"global_steps": self._global_steps},
        )

    async def load_weights(self, weights: dict[str, torch.Tensor], global_steps: int | None) -> None:
        """Loads ``weights`` (tensors by name) into the model. ``global_steps``: their version number; None keeps the last one."""
        await asyncio.wrap_future(self._engine.load_weights(weights))
        if global_steps is not None:
            self._global_steps = global_steps

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Ends all requests. Until :meth:`resume_generation`, later requests wait, or end at once if ``reject_request``."""
        self._rejecting = reject_request
        self._paused = True
        return {"aborted_count": await asyncio.wrap_future(self._engine.pause())}

    async def resume_generation(self) -> None:
        self._rejecting = False
        self._paused = False
        await asyncio.wrap_future(self._engine.resume())

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        """Ends the requests with the id ``request_id``. "aborted" in the returned dict is True if there was such a request."""
        count = await asyncio.wrap_future(self._engine.abort(request_id))
        return {"aborted": count > 0, "request_id": request_id}

    async def sleep(self) -> None:
        """Waits until all requests have ended. Frees no memory. Returns at once if the server is paused and requests cannot end."""
        if self._inflight and not self._paused:
            await asyncio.wait(self._inflight)

    async def get_stats(self) -> EngineStats:
        """Returns the counters of the engine."""
        return await asyncio.wrap_future(self._engine.stats())

    async def _nothing(self, *_args: Any, **_kwargs: Any) -> None: ...

    # verl calls these methods to manage accelerator memory and profiling. An engine on a CPU needs neither.
    wake_up = clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = _nothing


def _engine_options(config: RolloutConfig) -> dict[str, Any]:
    """Returns keyword arguments of :class:`CPUEngine`, read from verl's section ``rollout.engine_kwargs.hf_cpu``.

    Raises:
        ValueError: a key or a value is wrong.
    """
    options = {key: value for key, value in (config.engine_kwargs.get("hf_cpu") or {}).items() if value is not None}
    for _, reason in find_option_problems(options):
        raise ValueError(f"rollout.engine_kwargs.{reason}")
    return options


def _eos_token_ids(model: HFModelConfig) -> list[int]:
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = model.tokenizer.eos_token_id
    return list(eos) if isinstance(eos, list | tuple) else [eos]


def server_name(replica_rank: int, role: str = "") -> str:
    """Returns the name of the Ray actor that serves rollout replica ``replica_rank``. ``role`` is a prefix such as "reward_"."""
    return f"hf_cpu_server_{role}{replica_rank}"


class CPURolloutReplica(RolloutReplica):
    """Rollout replica on the CPU: one server actor, which all ranks of a tensor-parallel group share."""

    async def launch_servers(self) -> None:
        tp = self.config.tensor_model_parallel_size
        if self.world_size != tp:
            raise ValueError(
                "rollout.name=hf_cpu wants data_parallel_size and pipeline_model_parallel_size of 1, "
                f"found a product of {self.world_size // tp}"
            )
        role = ""
        if self.is_reward_model:
            role = "reward_"
        elif self.is_teacher_model:
            role = "teacher_"
        name = server_name(self.replica_rank, role) + self.name_suffix
        server = (
            ray.remote(CPURolloutServer)
            .options(name=name, num_cpus=0, max_concurrency=self.max_concurrency)
            .remote(self.config, self.model_config)
        )
        self.servers = [server]  # set before the first answer, so that a server that hangs can be ended
        self._server_handle = server
        self._server_address = name
        await server.get_stats.remote()


class CPUServerAdapter(BaseRollout):
    """Sends new weights from the training workers to the rollout server, through Ray's object store."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ.get("RANK", "0"))
        tp = self.config.tensor_model_parallel_size
        self.replica_rank = rank // tp if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % tp == 0

    async def resume(self, tags: list[str]) -> None:
        """Does nothing, because :meth:`release` frees no memory."""
        # Must not even contact the server: every rank calls this before all ranks gather the weights. If one rank raised an
        # error, such as that of a dead server, the other ranks would wait forever.

    async def release(self) -> None:
        if self.is_leader_rank:
            await self._server().sleep.remote()

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Iterator[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **_kwargs: Any,
    ) -> None:
        if wire_format != "named_tensors":
            raise ValueError(f"hf_cpu takes weights as named_tensors, found wire_format={wire_format!r}")
        if not self.is_leader_rank:
            async for _ in ensure_async_iterator(weights):  # every rank has to take part when weights are gathered
                pass
            return
        # Copied, because the trainer changes its tensors while the object store still refers to them.
        full = {name: tensor.detach().to("cpu", copy=True) async for name, tensor in ensure_async_iterator(weights)}
        await self._server().load_weights.remote(full, global_steps)

    def _server(self) -> Any:
        return ray.get_actor(server_name(self.replica_rank))
