"""The extension of vLLM's workers on a CPU. A module of its own, because vLLM imports it by name in its worker processes."""

from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension, in a process whose linear layers keep their weights.

    With oneDNN vLLM packs them once and drops the originals, so that no update of verl could reach them.
    """

    def __new__(cls, **kwargs: Any) -> "CPUWorkerExtension":
        from vllm import _custom_ops

        if not hasattr(_custom_ops, "_supports_onednn"):
            raise RuntimeError(
                "rl-accel: this vLLM has no vllm._custom_ops._supports_onednn; weights could not be updated"
            )
        _custom_ops._supports_onednn = False
        worker: CPUWorkerExtension = super().__new__(cls, **kwargs)
        return worker
