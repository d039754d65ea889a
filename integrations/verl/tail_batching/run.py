"""The run that a configuration of verl describes, and whether its data can fill a batch."""

from typing import Any

from omegaconf import OmegaConf

from rl_accel.errors import ConfigError
from rl_accel.features import TailBatchingFlags
from rl_accel.integrations.verl.tail_batching import MODE
from rl_accel.rollout.tail_batching import TailRun


def run_of(config: Any, data_id: str = "") -> TailRun:
    """Return the core's run for a ``config`` that ``wiring.wire`` has been through.

    Raises:
        ConfigError: quotas and the batch do not fit.
    """
    return TailRun(
        config.data.train_batch_size,
        config.actor_rollout_ref.rollout.n,
        TailBatchingFlags(**dict(config.trainer.v1[MODE])),
        filter_groups=bool(OmegaConf.select(config, "algorithm.filter_groups.enable", default=False)),
        data_id=data_id,
    )


def check_data(run: TailRun, rows: int, frame: Any) -> None:
    """Refuse data that cannot fill a batch.

    Args:
        run: P0 and the quotas are looked at.
        rows: prompts in an epoch.
        frame: the data set as ``datasets.Dataset``; anything else (a data set class of the user's) is not looked into, and
            its domains are checked as they come.

    Raises:
        ConfigError: there are fewer rows than P0, or quotas and the domains of the rows differ.
    """
    wanted = run.prompts_per_step
    if rows < wanted:
        raise ConfigError(
            f"rl_accel.tail_batching wants a data set of at least data.train_batch_size = {wanted} prompts, found {rows}"
        )
    quotas, domain_key = run.domain_quotas, run.flags.domain_key
    if not quotas or not hasattr(frame, "unique"):
        return
    if domain_key not in frame.column_names:
        raise ConfigError(
            f"rl_accel.tail_batching.domain_key wants a column of the data set ({', '.join(frame.column_names)}), "
            f"found {domain_key!r}"
        )
    domains = {str(domain) for domain in frame.unique(domain_key)}
    if domains != quotas.keys():
        raise ConfigError(
            f"rl_accel.tail_batching.domain_quotas must have a quota for each {domain_key} of the data set, "
            f"{', '.join(sorted(domains))}, found quotas for {', '.join(quotas)}"
        )
