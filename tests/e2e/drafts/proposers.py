"""Drafters that vLLM loads by name: two that always propose the same token, and the one of rl-accel."""

from rl_accel.drafts.drafter import Drafter

WORD, STOP = 0, 3


class Always(Drafter):
    """Proposes four times ``token``, right or wrong, with as many requests as there are."""

    token = WORD

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None):
        super().propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        return [[self.token] * 4 if new else [] for new in sampled_token_ids]


class AlwaysStop(Always):
    token = STOP


class Eager(Drafter):
    """Ours, without the steps without drafts that it compares with."""

    def __init__(self, vllm_config):
        super().__init__(vllm_config)
        self._costs.allows = self._costs.pays = lambda *_: True
