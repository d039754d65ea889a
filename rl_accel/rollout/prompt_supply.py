"""The prompts of a run: taken from the data as rounds ask for them, and kept until they are settled."""

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

from rl_accel.errors import ConfigError
from rl_accel.rollout.tail_batching import TailBatching
from rl_accel.rollout.tail_decisions import Decision, RequestPrompts


class PromptSupply:
    """Offers ``core`` what it requests, of each domain no more than the rest of the run can train.

    Rows have ids ``"epoch:row"`` (both from 1, the row in the order of the data). Every row that is fetched is offered; rows
    come mixed, so of domains that are not short it can be more than requested. So that a run ends with final rounds, and not
    with prompts that were begun and never trained, the data counts as exhausted once the steps that are left can train no
    more.

    Args:
        core: the state machine.
        fetch: returns the next row; after the last one of an epoch it begins the next.
        rows_per_epoch: how many rows an epoch has.
        domain_key: the column that names a row's domain; rows without it are of domain ``""``.

    Attributes:
        fetched: rows so far, over all epochs.
        payloads: rows of the prompts that are not settled, by prompt id.
    """

    def __init__(
        self, core: TailBatching, fetch: Callable[[], dict[str, Any]], rows_per_epoch: int, domain_key: str = ""
    ) -> None:
        self._core = core
        self._fetch = fetch
        self._rows_per_epoch = rows_per_epoch
        self._domain_key = domain_key
        self._by_domain = bool(core.run.domain_quotas)
        self._quotas = core.run.domain_quotas or {"": core.run.prompts_per_step}
        self._steps_left = 0
        self._exhausted = False
        self._unsettled: Counter[str] = Counter()
        self.fetched = 0
        self.payloads: dict[str, dict[str, Any]] = {}

    def begin_step(self, steps_left: int) -> None:
        """Plan for ``steps_left`` more batches, this step's included."""
        self._steps_left = steps_left

    def answer(self, request: RequestPrompts, now: float) -> list[Decision]:
        """Offer what is requested, as far as it can still be trained, else report that there is no more.

        Raises:
            ConfigError: a row is of a domain without a quota, or there are no rows of a domain that has one.
        """
        missing = {
            domain: min(count, self._steps_left * self._quotas[domain] - self._unsettled[domain])
            for domain, count in request.counts.items()
        }
        if any(count > 0 for count in missing.values()):
            return self._take(missing, now)
        self._exhausted = True
        return self._core.data_exhausted(now)

    def replace(self, prompt_id: str, now: float) -> list[Decision]:
        """Offer another prompt for one that is about to be rejected, if no request for it would come."""
        return self._take({self._lane(self._domain_of(self.payloads[prompt_id])): 1}, now) if self._exhausted else []

    def complete_batch(self, now: float) -> list[Decision]:
        """Offer what is missing for one more batch."""
        return self._take({domain: quota - self._unsettled[domain] for domain, quota in self._quotas.items()}, now)

    def settle(self, prompt_id: str) -> Any:
        """Forget a prompt; return the data set's own index of its row."""
        row = self.payloads.pop(prompt_id)
        self._unsettled[self._lane(self._domain_of(row))] -= 1
        return row.get("index")

    def restore(self, fetched: int, payloads: dict[str, dict[str, Any]]) -> None:
        """Go on where a saved run was."""
        self.fetched, self.payloads = fetched, dict(payloads)
        self._unsettled = Counter(self._lane(self._domain_of(row)) for row in payloads.values())

    def _take(self, missing: Mapping[str, int], now: float) -> list[Decision]:
        self._exhausted = False
        short = {domain: count for domain, count in missing.items() if count > 0}
        decisions: list[Decision] = []
        rows_in_vain = 0
        while short:
            if self._begins_epoch:
                decisions += self._core.end_epoch()
            new: list[tuple[str, str]] = []
            while short and not (new and self._begins_epoch):
                domain, prompt_id = self._fetch_row()
                new.append((domain, prompt_id))
                lane = self._lane(domain)
                rows_in_vain = 0 if lane in short else rows_in_vain + 1
                if lane in short:
                    short[lane] -= 1
                    if not short[lane]:
                        del short[lane]
                elif rows_in_vain > 2 * self._rows_per_epoch:
                    raise ConfigError(
                        f"rl_accel.tail_batching.domain_quotas asks for {self._domain_key} = "
                        f"{', '.join(map(repr, short))}, which no row of the data has"
                    )
            for domain, of_domain in groupby(new, key=itemgetter(0)):
                # A later request replaces an earlier one, which counts what is being offered here as missing.
                decisions = [item for item in decisions if not isinstance(item, RequestPrompts)]
                decisions += self._core.offer([prompt_id for _, prompt_id in of_domain], now, domain)
        return decisions

    @property
    def _begins_epoch(self) -> bool:
        """Whether the next row is the first of an epoch, but not of the run."""
        return self.fetched > 0 and self.fetched % self._rows_per_epoch == 0

    def _fetch_row(self) -> tuple[str, str]:
        epoch, row = divmod(self.fetched, self._rows_per_epoch)
        prompt_id = f"{epoch + 1}:{row + 1}"
        payload = self._fetch()
        domain = self._domain_of(payload)
        self.payloads[prompt_id] = payload
        self.fetched += 1
        self._unsettled[self._lane(domain)] += 1
        if self._by_domain and domain not in self._quotas:
            raise ConfigError(
                f"rl_accel.tail_batching.domain_quotas must have a quota for every {self._domain_key}, found "
                f"{domain!r} at prompt {prompt_id} (epoch:row) and quotas for {', '.join(self._quotas)}"
            )
        return domain, prompt_id

    def _domain_of(self, row: Mapping[str, Any]) -> str:
        return str(row.get(self._domain_key, ""))

    def _lane(self, domain: str) -> str:
        return domain if self._by_domain else ""
