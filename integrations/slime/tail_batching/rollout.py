"""Rollout function and data source for tail batching on slime. Evaluations use slime's own rollout function."""

import copy
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import MetricGatherer
from slime.utils.types import Sample

from rl_accel.errors import ConfigError, typed_line
from rl_accel.features import SLIME_DATA_SOURCE, TAIL_BATCHING
from rl_accel.files import write_atomically
from rl_accel.integrations.slime import interfaces
from rl_accel.integrations.slime.hooks import flags_of
from rl_accel.integrations.slime.tail_batching import check, last_rollout, run_of
from rl_accel.integrations.slime.tail_batching.responses import Engines, Responses, samples_of
from rl_accel.rollout import saved
from rl_accel.rollout.round_driver import PromptSupply, RolloutDriver
from rl_accel.rollout.tail_batching import TailBatching

if TYPE_CHECKING:
    RolloutDataSource = interfaces.RolloutDataSource
    sglang_rollout: interfaces.SglangRollout
    base_types: interfaces.FilterHub
    async_utils: interfaces.AsyncUtils
    misc: interfaces.Misc
else:
    from slime.rollout import sglang_rollout
    from slime.rollout.data_source import RolloutDataSource
    from slime.rollout.filter_hub import base_types
    from slime.utils import async_utils, misc

Group = list[Any]

_KEPT = 3
"""Number of latest rollouts whose state is kept in memory, because slime may save a rollout after later ones have run."""


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Runs one rollout with tail batching (slime's ``--rollout-function-path``). Evaluations run slime's own function.

    Returns ``rollout_batch_size`` prompt groups of ``n_samples_per_prompt`` responses each.

    Raises:
        ConfigError: the data source is not a :class:`TailDataSource`.
        RuntimeError: as many prompts as a batch needs have failed in a row, or no rollout server is left.
    """
    if evaluation:
        return sglang_rollout.generate_rollout(args, rollout_id, data_source, evaluation=True)
    if not isinstance(data_source, TailDataSource):
        found = f"{type(data_source).__module__}.{type(data_source).__qualname__}"
        raise ConfigError(f"rl_accel.tail_batching wants --data-source-path to be {SLIME_DATA_SOURCE}, found {found}")
    return data_source.play(rollout_id)


@dataclass(frozen=True)
class Moment:
    """State of the data source after a rollout.

    Attributes:
        source: copy of the data source, with slime's position in the data.
        core: state of the rounds.
        fetched, payloads: attributes of :class:`PromptSupply`.
    """

    source: RolloutDataSource
    core: dict[str, Any]
    fetched: int
    payloads: dict[str, dict[str, Any]]


class TailDataSource(RolloutDataSource):
    """slime's data source (``--data-source-path``), extended with tail batching. Runs the rollouts and keeps the deferred prompts.

    Attributes:
        supply: source of new prompts. ``supply.payloads`` maps the id of each unfinished prompt to the prompt's row ``{"sample":
            Sample, "index": group_index}``.

    Raises:
        ConfigError: a flag is wrong, or one of slime's arguments conflicts with tail batching.
        PatchRefused: tail batching does not support this version of slime.
    """

    def __init__(self, args: Any) -> None:
        flags = flags_of(args)[TAIL_BATCHING]
        check(args, flags)
        super().__init__(args)
        # Read in the order of the first epoch, because ``load`` shuffles the data for the epoch of the checkpoint.
        rows_id = saved.rows_digest((row.prompt, row.label, row.metadata) for row in self.dataset.samples)
        self._core = TailBatching(run_of(args, flags, len(self), rows_id))
        self.supply = PromptSupply(self._fetch, len(self))
        self._log = saved.Ledger(Path(args.save) / "rollout") if args.save else None
        self._moments: dict[int, Moment] = {}
        self._engines = Engines(args)
        self._responses = Responses(args, self._engines, self._new_index, flags)
        self._driver = RolloutDriver(
            self._core, self.supply, self._responses, discard=lambda results: None, passes=self._passes
        )
        filter_path = args.dynamic_sampling_filter_path
        self._filter = misc.load_function(filter_path) if filter_path is not None else None
        self._drops = MetricGatherer()
        self._rejected: list[Group] = []

    def _fetch(self) -> dict[str, Any]:
        sample = self.get_samples(1)[0][0]
        if not self.supply.fetched:
            saved.packed(sample.to_dict())  # a row that cannot be saved raises now instead of at the first checkpoint
        return {"sample": sample, "index": sample.group_index}

    def _new_index(self) -> int:
        """Returns an index that no sample of this run has yet."""
        self.sample_index += 1
        return int(self.sample_index - 1)

    def add_samples(self, samples: list[list[Any]]) -> None:
        """Raises RuntimeError, because tail batching keeps its own queue and slime must not return samples to the data source."""
        raise RuntimeError("rl_accel.tail_batching keeps its own queue; samples cannot be added to its data source")

    def play(self, rollout_id: int) -> RolloutFnTrainOutput:
        """Runs the rollout ``rollout_id`` and returns the batch to train on, once the rollout servers are idle."""
        self._drops = MetricGatherer()
        self._rejected = []
        self._engines.retractions = None
        result = self._driver.play(rollout_id, max(last_rollout(self.args, len(self)) - rollout_id, 1))
        async_utils.run(self._engines.drain())
        size = self.args.n_samples_per_prompt
        groups = [sorted(result.results[i : i + size], key=_index) for i in range(0, len(result.results), size)]
        groups.sort(key=_index)
        if self._log is not None:
            self._log.add(rollout_id, result)
        self._remember(rollout_id)
        if self.args.rollout_sample_filter_path is not None:
            misc.load_function(self.args.rollout_sample_filter_path)(self.args, groups)
        if self.args.rollout_all_samples_process_path is not None:
            every = sorted([*groups, *self._rejected], key=_index)
            misc.load_function(self.args.rollout_all_samples_process_path)(self.args, every, self)
        metrics = result.metrics() | self._drops.collect()
        if self._engines.retractions is not None:
            metrics["rl_accel/preemptions"] = float(self._engines.retractions)
        return RolloutFnTrainOutput(samples=groups, metrics=metrics)

    def _passes(self, _prompt_id: str, results: Sequence[Any]) -> bool:
        group: Group = sorted(results, key=_index)
        verdict = base_types.call_dynamic_filter(self._filter, self.args, group)
        # slime may keep a rejected group if too few others are left. Each group rejected before was replaced here, so that neither
        # the group nor its replacement counts as left.
        if not base_types.should_drop_dynamic_filter_output(
            verdict,
            remaining_batch_size=self._responses.prompts_launched - 2 * len(self._rejected),
            target_data_size=self.args.rollout_batch_size,
        ):
            return True
        self._drops.on_dynamic_filter_drop(reason=verdict.reason)
        self._rejected.append(group)
        return False

    # Checkpoints

    def _remember(self, rollout_id: int) -> None:
        self._moments.pop(rollout_id, None)
        self._moments[rollout_id] = Moment(
            source=copy.copy(self),
            core=self._core.state_dict(),
            fetched=self.supply.fetched,
            payloads=dict(self.supply.payloads),
        )
        while len(self._moments) > _KEPT:
            del self._moments[next(iter(self._moments))]

    def save(self, rollout_id: int) -> None:
        """Saves the state that this data source had after rollout ``rollout_id``, even if later rollouts are already complete.

        Raises:
            RuntimeError: the rollout was not run in this process, or is not among the last :data:`_KEPT`.
        """
        if getattr(self.args, "debug_train_only", False):
            self._remember(rollout_id)
        if rollout_id not in self._moments:
            known = ", ".join(map(str, self._moments)) or "none"
            raise RuntimeError(f"the state after rollout {rollout_id} is not known any more; known are {known}")
        moment = self._moments[rollout_id]
        rows = {prompt: {**row, "sample": row["sample"].to_dict()} for prompt, row in moment.payloads.items()}
        saved.save(_folder(self.args.save, rollout_id), rollout_id, moment.core, moment.fetched, rows)
        # slime's file is written last and atomically, because ``load`` refuses a checkpoint without this file.
        with tempfile.TemporaryDirectory() as folder:
            moment.source.args = copy.copy(self.args)
            moment.source.args.save = folder
            RolloutDataSource.save(moment.source, rollout_id)
            position = _position(self.args.save, rollout_id)
            with saved.writing(position):
                write_atomically(position, _position(folder, rollout_id).read_bytes())

    def load(self, rollout_id: int | None = None) -> None:
        """Restores the state of this data source from the checkpoint of rollout ``rollout_id``.

        Starts at the beginning of the data if slime's ``--load`` is not set or ``rollout_id`` is None or negative.

        Raises:
            ResumeError: the checkpoint is incomplete, was saved without tail batching, or belongs to another run.
        """
        last = -1 if rollout_id is None else rollout_id
        resumes = self.args.load is not None and last >= 0
        if resumes and not (position := _position(self.args.load, last)).exists():
            raise saved.ResumeError(
                f"{self.args.load} has no {position.name}: its run was ended while it saved. Resume an earlier one with "
                "--ckpt-step, or begin the data anew with --start-rollout-id 0"
            )
        super().load(rollout_id)
        if resumes:
            folder = _folder(self.args.load, last)
            saved.restore(folder, last, self._core, self.supply)
            for prompt_id, row in self.supply.payloads.items():
                try:
                    row["sample"] = Sample.from_dict(row["sample"])
                except Exception as error:  # slime checks none of the values
                    raise saved.damaged(folder, f"the row of prompt {prompt_id}: {typed_line(error)}") from error
        if self._log is not None:
            self._log.rewind(last)


def _position(root: str, rollout_id: int) -> Path:
    """Returns the path of the file, below the checkpoint folder ``root``, in which slime saves its position in the data set."""
    return Path(root) / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"


def _folder(root: str, rollout_id: int) -> Path:
    return Path(root) / "rollout" / f"tail_batching_{rollout_id}"


def _index(result: Any) -> int:
    """Returns the index of the first sample in ``result``, which is a sample or a (nested) list of samples."""
    return int(next(samples_of(result)).index)
