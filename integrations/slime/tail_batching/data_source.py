"""The data source of tail batching: slime's own, with the queue of deferred prompts, and a log of the settled ones."""

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.rollout.data_source import RolloutDataSource

from rl_accel.errors import ConfigError
from rl_accel.features import TAIL_BATCHING
from rl_accel.integrations.slime.hooks import flags_of
from rl_accel.integrations.slime.tail_batching import seams
from rl_accel.rollout import saved
from rl_accel.rollout.driver import PromptSupply, StepResult
from rl_accel.rollout.tail_batching import TailBatching

logger = logging.getLogger("rl_accel")

_KEPT = 3
"""Rollouts whose state is remembered. slime may ask to save one while it has already made the next."""


@dataclass(frozen=True)
class _Moment:
    """The state after a rollout."""

    rollout_id: int
    position: dict[str, Any]
    core: dict[str, Any]
    fetched: int
    payloads: dict[str, dict[str, Any]]


class TailDataSource(RolloutDataSource):
    """slime's ``--data-source-path``. Reads the flags under ``rl_accel`` of the custom config.

    Attributes:
        core: the state machine.
        supply: rows ``{"sample": Sample, "index": group_index, <domain_key>: domain}`` by prompt id.
        driver: what plays the rounds; the rollout function sets it when it is first called.

    Raises:
        ConfigError: a flag is wrong, or one of slime's cannot go together with tail batching.
        PatchRefused: this slime is not one that tail batching fits.
    """

    def __init__(self, args: Any) -> None:
        flags = flags_of(args)[TAIL_BATCHING]
        seams.check(args, flags)
        super().__init__(args)
        if self.dataset is None:
            raise ConfigError("rl_accel.tail_batching wants --prompt-data, found none")
        self._domain_key = flags.domain_key
        self.core = TailBatching(seams.run_of(args, flags, len(self)))
        self.supply = PromptSupply(self.core.run, self._fetch, len(self), flags.domain_key)
        self.last_rollout = seams.last_rollout(args, len(self))
        self._log = saved.SettlementLog(Path(args.save) / "rollout") if args.save else None
        self.driver: Any = None
        self._moments: deque[_Moment] = deque(maxlen=_KEPT)

    def _fetch(self) -> dict[str, Any]:
        sample = self.get_samples(1)[0][0]
        domain = (sample.metadata or {}).get(self._domain_key, "")
        return {"sample": sample, "index": sample.group_index, self._domain_key: domain}

    def new_index(self) -> int:
        """Return an index that no sample has had."""
        self.sample_index += 1
        return int(self.sample_index - 1)

    def add_samples(self, samples: list[list[Any]]) -> None:
        """Refused: the queue takes back whole prompts by itself.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("rl_accel.tail_batching keeps its own queue; samples cannot be added to its data source")

    def settle(self, rollout_id: int, result: StepResult) -> None:
        """Note what became of the prompts of a rollout, and remember the state after it for :meth:`save`."""
        if self._log is not None:
            self._log.add(rollout_id, result)
        position = {name: getattr(self, name) for name in seams.POSITION}
        moment = _Moment(rollout_id, position, self.core.state_dict(), self.supply.fetched, dict(self.supply.payloads))
        self._moments.append(moment)

    def save(self, rollout_id: int) -> None:
        """Save the state after ``rollout_id``, also if later rollouts have been made since.

        Raises:
            RuntimeError: that rollout was not made in this process, or too long ago.
        """
        moment = next((moment for moment in self._moments if moment.rollout_id == rollout_id), None)
        if moment is None:
            known = ", ".join(str(moment.rollout_id) for moment in self._moments)
            raise RuntimeError(
                f"the state after rollout {rollout_id} is not known any more; known are {known or 'none'}"
            )
        with self._at(moment.position):
            super().save(rollout_id)
        saved.save(_folder(self.args.save, rollout_id), rollout_id, moment.core, moment.fetched, moment.payloads)

    def load(self, rollout_id: int | None = None) -> None:
        """Go on after ``rollout_id`` if there is a checkpoint of it; else begin anew.

        Raises:
            ResumeError: the checkpoint was saved without tail batching, or is of another run.
        """
        super().load(rollout_id)
        if self.args.load is not None and rollout_id is not None:
            position = Path(self.args.load) / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"
            if position.exists():
                saved.restore(_folder(self.args.load, rollout_id), rollout_id, self.core, self.supply)
        if self._log is not None:
            self._log.rewind(-1 if rollout_id is None else rollout_id)

    @contextmanager
    def _at(self, position: dict[str, Any]) -> Iterator[None]:
        before = {name: getattr(self, name) for name in seams.POSITION}
        try:
            self.__dict__.update(position)
            yield
        finally:
            self.__dict__.update(before)


def _folder(root: str, rollout_id: int) -> Path:
    return Path(root) / "rollout" / f"tail_batching_{rollout_id}"
