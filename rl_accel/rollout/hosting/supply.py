"""Takes prompts from the data as rounds ask for them, of each domain no more than the rest of the run can train."""

from collections.abc import Callable, Mapping
from itertools import groupby
from operator import itemgetter

from rl_accel.errors import ConfigError
from rl_accel.rollout.hosting.prompts import Prompts
from rl_accel.rollout.tail_batching import TailBatching
from rl_accel.rollout.tail_decisions import Decision, RequestPrompts


class Supply:
    """Offers ``core`` what it requests. Everything taken from ``prompts`` is offered; rows come mixed, so of domains that
    are not short it can be more than requested.

    So that a run ends with final rounds, and not with prompts that were begun and never trained, the data counts as
    exhausted once the steps that are left can train no more.
    """

    def __init__(self, core: TailBatching, prompts: Prompts, now: Callable[[], float]) -> None:
        self._core = core
        self._prompts = prompts
        self._now = now
        self._by_domain = bool(core.settings.domain_quotas)
        self._quotas = core.settings.domain_quotas or {"": core.settings.prompts_per_step}
        self._steps_left = 0
        self._exhausted = False

    def begin_step(self, steps_left: int) -> None:
        """Plan for ``steps_left`` more batches, this step's included."""
        self._steps_left = steps_left

    def answer(self, request: RequestPrompts) -> list[Decision]:
        """Offer what is requested, as far as it can still be trained, else report that there is no more.

        Raises:
            ConfigError: a row is of a domain without a quota, or there are no rows of a domain that has one.
        """
        missing = {
            domain: min(count, self._steps_left * self._quotas[domain] - self._unsettled(domain))
            for domain, count in request.counts.items()
        }
        if any(count > 0 for count in missing.values()):
            return self._take(missing)
        self._exhausted = True
        return self._core.data_exhausted(self._now())

    def replace(self, prompt_id: str) -> list[Decision]:
        """Offer another prompt for one that is about to be rejected, if no request for it would come."""
        return self._take({self._lane(self._prompts.domain_of(prompt_id)): 1}) if self._exhausted else []

    def complete_batch(self) -> list[Decision]:
        """Offer what is missing for one more batch."""
        return self._take({domain: quota - self._unsettled(domain) for domain, quota in self._quotas.items()})

    def _take(self, missing: Mapping[str, int]) -> list[Decision]:
        self._exhausted = False
        short = {domain: count for domain, count in missing.items() if count > 0}
        decisions: list[Decision] = []
        barren = 0
        while short:
            if self._prompts.begins_epoch:
                decisions += self._core.end_epoch()
            new: list[tuple[str, str]] = []
            while short and not (new and self._prompts.begins_epoch):
                prompt_id, domain = self._prompts.take()
                self._check(prompt_id, domain)
                new.append((domain, prompt_id))
                lane = self._lane(domain)
                barren = 0 if lane in short else barren + 1
                if lane in short:
                    short[lane] -= 1
                    if not short[lane]:
                        del short[lane]
                elif barren > 2 * self._prompts.rows_per_epoch:
                    raise ConfigError(
                        f"rl_accel.tail_batching.domain_quotas asks for {self._prompts.domain_key} = "
                        f"{', '.join(map(repr, short))}, which no row of the data has"
                    )
            for domain, run in groupby(new, key=itemgetter(0)):
                # A later request replaces an earlier one, which counts what is being offered here as missing.
                decisions = [item for item in decisions if not isinstance(item, RequestPrompts)]
                decisions += self._core.offer([prompt_id for _, prompt_id in run], self._now(), domain)
        return decisions

    def _check(self, prompt_id: str, domain: str) -> None:
        if self._by_domain and domain not in self._quotas:
            raise ConfigError(
                f"rl_accel.tail_batching.domain_quotas must have a quota for every {self._prompts.domain_key}, found "
                f"{domain!r} at prompt {prompt_id} (epoch:row) and quotas for {', '.join(self._quotas)}"
            )

    def _lane(self, domain: str) -> str:
        return domain if self._by_domain else ""

    def _unsettled(self, lane: str) -> int:
        return self._prompts.unsettled(lane if self._by_domain else None)
