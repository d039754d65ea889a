"""Tail batching on verl's V1 trainer: ``+rl_accel.tail_batching.enable=True`` on a recipe of trainer mode ``sync``.

Uses official extension points only: a trainer mode, a mixin for agent-loop workers and an LLM client. ``wiring`` sets them in the
configuration and registers the trainer. ``trainer`` drives the state machine in the trainer process. ``agent_loop`` defines the
workers that start, cancel and report responses. ``servers`` wraps the rollout servers.
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from rl_accel.errors import refuse
from rl_accel.features import TailBatchingFlags
from rl_accel.rollout.tail_batching import TailRun

FLAG = "rl_accel.tail_batching"
MODE = "tail_batching"
"""Value of ``trainer.v1.trainer_mode``."""
ROLLOUT_N = "__rollout_n__"
"""Column of the data with a number of responses for each row, which verl honours."""
WORKER_PART = "rl_accel.integrations.verl.tail_batching.agent_loop.TailAgentLoopWorker"
"""Full name of the mixin for agent-loop workers."""


def run_of(config: Any, data_id: str = "") -> TailRun:
    """Returns the run settings of the state machine, for a ``config`` prepared by ``wiring.wire``.

    Raises:
        ConfigError: the quotas do not add up to the batch size.
    """
    return TailRun(
        config.data.train_batch_size,
        config.actor_rollout_ref.rollout.n,
        TailBatchingFlags(**dict(config.trainer.v1[MODE])),
        filter_groups=bool(OmegaConf.select(config, "algorithm.filter_groups.enable", default=False)),
        data_id=data_id,
    )


def check_row(run: TailRun, row: Mapping[str, Any]) -> None:
    """Refuses a row of the data that asks for another number of responses than all others.

    Raises:
        ConfigError: names both numbers.
    """
    if (wanted := row.get(ROLLOUT_N, run.responses_per_prompt)) != run.responses_per_prompt:
        refuse(FLAG, f"{ROLLOUT_N} of a row of the data", f"rollout.n, {run.responses_per_prompt}", wanted)


def check_data(run: TailRun, rows: int, frame: Any) -> None:
    """Refuses data that cannot fill a batch.

    Args:
        run: gives P0 (prompts in a batch) and the domain quotas.
        rows: number of prompts in an epoch.
        frame: the data set as ``datasets.Dataset``. Any other type (a user's class) is not inspected; its domains are
            checked when rows are fetched.

    Raises:
        ConfigError: there are fewer rows than P0, the domains of the rows differ from those of the quotas, or see
            :func:`check_row`.
    """
    if rows < run.prompts_per_step:
        refuse(FLAG, "rows of the data set", f"at least data.train_batch_size, {run.prompts_per_step}", rows)
    if ROLLOUT_N in getattr(frame, "column_names", ()):
        for value in frame.unique(ROLLOUT_N):
            check_row(run, {ROLLOUT_N: value})
    quotas, domain_key = run.domain_quotas, run.flags.domain_key
    if not quotas or not hasattr(frame, "unique"):
        return
    if domain_key not in frame.column_names:
        wanted = f"a column of the data set ({', '.join(frame.column_names)})"
        refuse(FLAG, "domain_key", wanted, repr(domain_key))
    domains = {str(domain) for domain in frame.unique(domain_key)}
    if domains != quotas.keys():
        wanted = f"a quota for each {domain_key} of the data set, {', '.join(sorted(domains))}"
        refuse(FLAG, "domain_quotas", wanted, f"quotas for {', '.join(quotas)}")
