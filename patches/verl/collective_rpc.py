"""Makes the method ``collective_rpc`` of verl's vLLM server return the results of the vLLM workers, which verl discards."""

from typing import Any

from rl_accel.patches.patch import Patch


def _with_answers(_original: Any, _settings: Any) -> Any:
    async def collective_rpc(self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        return await self.engine.collective_rpc(method=method, timeout=timeout, args=args, kwargs=kwargs)

    return collective_rpc


SWITCHES = (
    Patch(
        name="verl.collective_rpc",
        target="verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.collective_rpc",
        supports="verl>=0.9",
        params=("self", "method", "timeout", "args", "kwargs"),
        make=_with_answers,
        fingerprints=("8814f77fbfebfcbc812ff164ddb2a611d8e0fd2c0a4dbaaf8f03ff7cbf1abefe",),
        no_seam="a server has no other method that reaches its workers",
        remove_when="collective_rpc returns what the workers answer",
    ),
)
