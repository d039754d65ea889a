"""Extension of vLLM's workers for drafts (speculative decoding). vLLM imports this separate module by name in worker processes."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl_accel.patches.verl.interfaces import WorkerExtension

if TYPE_CHECKING:
    vLLMColocateWorkerExtension = WorkerExtension
else:
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class DraftsWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension of vLLM's workers, with methods through which the trainer process reaches the drafter."""

    model_runner: Any  # vLLM's

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> Any:
        """Updates the weights as in verl, then tells the drafter that there is a new version of the weights."""
        result = super().update_weights_from_ipc(*args, **kwargs)
        self.model_runner.drafter.new_weights()
        return result

    def exchange_drafts(self, responses: Sequence[bytes]) -> tuple[list[bytes], Counter[str]]:
        """Adds ``responses``, which other replicas have finished, to the responses that this replica's drafter searches.

        Returns the responses that this replica has finished, and the drafter's counters, both since the last call.
        """
        drafter = self.model_runner.drafter
        drafter.absorb(responses)
        return drafter.take_finished(), drafter.take_counts()
