"""The prompts of a run: rows come from the data one by one and are kept until they are settled."""

from collections import Counter
from collections.abc import Callable
from typing import Any


class Prompts:
    """Rows by prompt id, ``"epoch:row"`` (both from 1, the row in the order of the data).

    Args:
        fetch: returns the next row; after the last one of an epoch it begins the next.
        rows_per_epoch: how many rows an epoch has.
        domain_key: the column that names a row's domain; rows without it are of domain ``""``.
    """

    def __init__(self, fetch: Callable[[], dict[str, Any]], rows_per_epoch: int, domain_key: str = "") -> None:
        self._fetch = fetch
        self.rows_per_epoch = rows_per_epoch
        self.domain_key = domain_key
        self.fetched = 0
        self.payloads: dict[str, dict[str, Any]] = {}
        self._open: Counter[str] = Counter()

    @property
    def begins_epoch(self) -> bool:
        """Whether the next row is the first of an epoch, but not of the run."""
        return self.fetched > 0 and self.fetched % self.rows_per_epoch == 0

    def take(self) -> tuple[str, str]:
        """Fetch the next row; return the id under which ``payloads`` has it, and its domain."""
        epoch, row = divmod(self.fetched, self.rows_per_epoch)
        prompt_id = f"{epoch + 1}:{row + 1}"
        self.payloads[prompt_id] = self._fetch()
        self.fetched += 1
        domain = self.domain_of(prompt_id)
        self._open[domain] += 1
        return prompt_id, domain

    def domain_of(self, prompt_id: str) -> str:
        """Return the domain of a prompt that is not settled."""
        return str(self.payloads[prompt_id].get(self.domain_key, ""))

    def settle(self, prompt_id: str) -> Any:
        """Forget a prompt; return the data set's own index of its row."""
        self._open[self.domain_of(prompt_id)] -= 1
        return self.payloads.pop(prompt_id).get("index")

    def unsettled(self, domain: str | None = None) -> int:
        """Return how many prompts (of ``domain``, None: of any) are taken and not settled."""
        return len(self.payloads) if domain is None else self._open[domain]

    def restore(self, fetched: int, payloads: dict[str, dict[str, Any]]) -> None:
        """Go on where a saved run was."""
        self.fetched, self.payloads = fetched, dict(payloads)
        self._open = Counter(map(self.domain_of, payloads))
