"""What a worker of vLLM gets with drafts. A module of its own, because vLLM imports it by name in its worker processes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class DraftsWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension of vLLM's workers, with what the trainer asks of their drafter."""

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> Any:
        """verl's. Tells the drafter as well: the policy has moved on, and newer responses are better guides."""
        result = super().update_weights_from_ipc(*args, **kwargs)
        self.model_runner.drafter.new_weights()
        return result

    def exchange_drafts(
        self, responses: Sequence[tuple[bytes, bytes]]
    ) -> tuple[list[tuple[bytes, bytes]], dict[str, float]]:
        """Take in what other replicas have finished; return what this one has, and its counters.

        Responses are pairs of prompt and response, each the bytes of an int32 array.
        """
        drafter = self.model_runner.drafter
        for prompt, response in responses:
            drafter.absorb(np.frombuffer(prompt, np.int32), np.frombuffer(response, np.int32))
        return [
            (prompt.tobytes(), response.tobytes()) for prompt, response in drafter.take_finished()
        ], drafter.counters()
