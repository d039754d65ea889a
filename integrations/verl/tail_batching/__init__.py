"""Tail batching on verl's V1 trainer: ``+rl_accel.tail_batching.enable=True`` on a recipe of trainer mode ``sync``.

With tail batching, a rollout (a round) ends with the first prompts to complete, and the other prompts run again in a later round.
The name of a file begins with the process that runs its code:

- driver: ``wiring`` registers a trainer mode, and sets it and a mixin for agent-loop workers in verl's configuration.
- trainer: ``trainer`` drives the state machine of the rounds; ``trainer_workers`` and ``trainer_servers`` call the other processes.
- agent-loop worker: ``worker`` starts, cancels and reports responses; ``worker_servers`` sends their requests.
- rollout server and training worker: ``remote_calls`` has what the trainer process has them call.
- ``messages``: what workers and trainer send each other. This module: what driver and trainer read from the configuration.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from rl_accel.errors import refuse
from rl_accel.features import TailBatchingFlags
from rl_accel.rollout.round_driver import FilterLimit
from rl_accel.rollout.tail_batching import TailRun

FLAG = "rl_accel.tail_batching"
MODE = "tail_batching"
"""Trainer mode of tail batching: value that rl-accel sets for verl's configuration key ``trainer.v1.trainer_mode``."""
ROLLOUT_N = "__rollout_n__"
"""Column of verl's data set with the number of responses to generate for a row."""
GEN_BATCH_KEPT = f"trainer.v1.{MODE}_gen_batch_size"
"""Key of verl's configuration that keeps the user's ``data.gen_batch_size``, which rl-accel replaces by 1."""
WORKER_PART = "rl_accel.integrations.verl.tail_batching.worker.TailAgentLoopWorker"
"""Full name of tail batching's mixin for verl's agent-loop workers."""


def run_of(config: Any, flags: TailBatchingFlags, data_id: str = "", rows_id: str = "") -> TailRun:
    """Returns the parameters of tail batching for verl's ``config``, on which ``wiring.wire`` has been called.

    ``flags``, ``data_id`` and ``rows_id`` are as in :class:`TailRun`. Raises ConfigError as :class:`TailRun`.
    """
    return TailRun(
        config.data.train_batch_size,
        config.actor_rollout_ref.rollout.n,
        flags,
        filter_groups=bool(OmegaConf.select(config, "algorithm.filter_groups.enable", default=False)),
        data_id=data_id,
        rows_id=rows_id,
    )


def rows_of(frame: Any) -> Iterator[Any]:
    """Yields the rows of verl's data set, whose content is ``frame``. Yields nothing if ``frame`` is no ``datasets.Dataset``."""
    if hasattr(frame, "with_format"):
        for table in frame.with_format("arrow").iter(batch_size=1000):
            yield from table.to_pylist()


def draws_other_rows(config: Any) -> bool:
    """Returns True if verl draws the rows of its data set anew at each start: ``train_max_samples`` without ``seed``."""
    data = config.data
    return data.get("train_max_samples", -1) > 0 and bool(data.get("shuffle")) and data.get("seed") is None


def rows_advice(config: Any) -> str:
    """Returns advice for a resume whose data has other rows than the saved run."""
    if draws_other_rows(config):
        return "Without data.seed each start draws other rows. Begin anew with data.seed set; a resume then finds the same rows"
    return "Resume with the data of the saved run"


def filter_limit(config: Any) -> FilterLimit | None:
    """Returns how many prompts verl's group filter may check in a step; None: no limit.

    The limit is that of verl's recipes: ``algorithm.filter_groups.max_num_gen_batches`` times ``data.gen_batch_size`` prompts.
    """
    key = "algorithm.filter_groups.max_num_gen_batches"
    batches = OmegaConf.select(config, key, default=0) or 0
    if batches <= 0:
        return None
    gen_batch_size = OmegaConf.select(config, GEN_BATCH_KEPT)
    return FilterLimit(batches * gen_batch_size, f"{key} = {batches} (times {gen_batch_size} prompts)")


def check_row(run: TailRun, row: Mapping[str, Any]) -> None:
    """Raises ConfigError if a data row asks for a number of responses other than ``run.responses_per_prompt``."""
    if (wanted := row.get(ROLLOUT_N, run.responses_per_prompt)) != run.responses_per_prompt:
        refuse(FLAG, f"{ROLLOUT_N} of a row of the data", f"rollout.n, {run.responses_per_prompt}", wanted)


def check_data(run: TailRun, rows: int, frame: Any) -> None:
    """Refuses a data set of ``rows`` prompts that tail batching cannot train on.

    ``frame`` is the content of the data set. It is checked only if it is a ``datasets.Dataset``.

    Raises:
        ConfigError: a batch needs more prompts, or :func:`check_row` refuses a row.
    """
    if rows < run.prompts_per_step:
        refuse(FLAG, "rows of the data set", f"at least data.train_batch_size, {run.prompts_per_step}", rows)
    if ROLLOUT_N in getattr(frame, "column_names", ()):
        for value in frame.unique(ROLLOUT_N):
            check_row(run, {ROLLOUT_N: value})
