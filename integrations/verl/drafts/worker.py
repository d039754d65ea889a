"""Extension of vLLM's workers for drafts. A separate module, which vLLM imports by name in its worker processes."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl_accel.patches.seams import extends
from rl_accel.patches.verl.interfaces import WorkerExtension

if TYPE_CHECKING:
    vLLMColocateWorkerExtension = WorkerExtension
else:
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


@extends(WorkerExtension)
class DraftsWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension of vLLM's workers, with methods that connect trainer and drafter."""

    model_runner: Any  # vLLM's

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> Any:
        """Updates the weights, and notifies the drafter: newer responses predict the new policy better."""
        result = super().update_weights_from_ipc(*args, **kwargs)
        self.model_runner.drafter.new_weights()
        return result

    def exchange_drafts(self, responses: Sequence[bytes]) -> tuple[list[bytes], Counter[str]]:
        """Adds ``responses`` from other replicas; returns this replica's finished responses and counts since the last call."""
        drafter = self.model_runner.drafter
        drafter.absorb(responses)
        return drafter.take_finished(), drafter.take_counts()
