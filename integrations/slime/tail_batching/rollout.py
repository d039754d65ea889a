"""The rollout function that slime calls: rounds of tail batching for training, slime's own rollout for evaluation."""

from collections.abc import Sequence
from typing import Any

from slime.rollout import sglang_rollout
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import (
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.utils.async_utils import run
from slime.utils.misc import load_function

from rl_accel.errors import ConfigError
from rl_accel.integrations.slime.tail_batching import DATA_SOURCE
from rl_accel.integrations.slime.tail_batching.data_source import TailDataSource
from rl_accel.integrations.slime.tail_batching.responses import Engines, Responses, samples_of
from rl_accel.rollout.driver import RolloutDriver

Group = list[Any]


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """slime's ``--rollout-function-path``. Returns exactly ``rollout_batch_size`` groups of ``n_samples_per_prompt``.

    Raises:
        ConfigError: the data source is another one, or quotas and the domains of the data do not fit.
        RuntimeError: so many prompts failed one after the other that something must be broken.
    """
    if evaluation:
        return sglang_rollout.generate_rollout(args, rollout_id, data_source, evaluation=True)
    if not isinstance(data_source, TailDataSource):
        found = f"{type(data_source).__module__}.{type(data_source).__qualname__}"
        raise ConfigError(f"rl_accel.tail_batching wants --data-source-path to be {DATA_SOURCE}, found {found}")
    if data_source.driver is None:
        data_source.driver = TailRollout(args, data_source)
    output: RolloutFnTrainOutput = data_source.driver.play(rollout_id)
    return output


class TailRollout:
    """Plays the rounds of a run for one data source."""

    def __init__(self, args: Any, data_source: TailDataSource) -> None:
        self._args = args
        self._source = data_source
        self._engines = Engines(args)
        self._responses = Responses(args, self._engines, data_source.new_index)
        self._driver = RolloutDriver(
            data_source.core, data_source.supply, self._responses, discard=lambda results: None, passes=self._passes
        )
        filter_path = args.dynamic_sampling_filter_path
        self._filter = load_function(filter_path) if filter_path is not None else None
        self._drops = MetricGatherer()
        self._rejected: list[Group] = []

    def play(self, rollout_id: int) -> RolloutFnTrainOutput:
        """Return the batch of a rollout. Nothing else of it is left on any server."""
        self._drops, self._rejected, self._responses.retractions = MetricGatherer(), [], None
        result = self._driver.play(rollout_id, max(self._source.last_rollout - rollout_id, 1))
        run(self._engines.drain())
        size = self._args.n_samples_per_prompt
        groups = [_in_order(result.results[i : i + size]) for i in range(0, len(result.results), size)]
        groups.sort(key=_index)
        self._source.settle(rollout_id, result)
        if self._args.rollout_sample_filter_path is not None:
            load_function(self._args.rollout_sample_filter_path)(self._args, groups)
        if self._args.rollout_all_samples_process_path is not None:
            every = sorted([*groups, *self._rejected], key=_index)
            load_function(self._args.rollout_all_samples_process_path)(self._args, every, self._source)
        metrics = result.metrics() | self._drops.collect()
        if self._responses.retractions is not None:
            metrics["rl_accel/preemptions"] = float(self._responses.retractions)
        return RolloutFnTrainOutput(samples=groups, metrics=metrics)

    def _passes(self, _prompt_id: str, results: Sequence[Any]) -> bool:
        group = _in_order(results)
        verdict = call_dynamic_filter(self._filter, self._args, group)
        # In slime a group that may be kept for want of others is not replaced; here every rejected one has been.
        if not should_drop_dynamic_filter_output(
            verdict,
            remaining_batch_size=self._responses.prompts_launched - 2 * len(self._rejected),
            target_data_size=self._args.rollout_batch_size,
        ):
            return True
        self._drops.on_dynamic_filter_drop(reason=verdict.reason)
        self._rejected.append(group)
        return False


def _in_order(results: Sequence[Any]) -> Group:
    return sorted(results, key=lambda result: next(samples_of(result)).index)


def _index(group: Group) -> int:
    return int(next(samples_of(group)).index)
