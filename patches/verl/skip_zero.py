"""Leaves responses whose advantages are all zero out of verl's actor update. Their gradient is exactly zero.

The replacement runs verl's own :meth:`FSDPEngine.forward_backward_batch` on the other rows of a mini-batch. The loss is normalised
by the number of tokens and rows of the whole mini-batch, and the optimiser takes every step that verl takes. The gradient is
therefore the same up to float rounding, and bit for bit the same where the remaining rows form the same micro-batches.

A policy loss is accepted if it passes :func:`influence_of_zeros`: rows with advantage 0 must have gradient 0 and no effect on the
gradient of other rows. :func:`_require_update_ignores_zeros` finds other parts of an update that zero advantages do not silence.
"""

import functools
import logging
import statistics
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch

from rl_accel.errors import ConfigError, PatchRefused, refuse
from rl_accel.log import warn_once
from rl_accel.patches import upstream
from rl_accel.patches.patch import Patch
from rl_accel.patches.verl import trials

_DISTANCES = (None, None, None, 0.05, 0.003, 0.0003)
"""Standard deviations of old minus new log-probabilities, one for each batch of :func:`influence_of_zeros`. None: both are drawn
independently, and differ so much that losses clip. With small differences, fewer losses drop rows."""
_TIMINGS = 16
"""Number of mini-batches from whose times ``seconds_saved`` is estimated. Chosen by hand."""
_ACTOR = "actor_rollout_ref.actor"
_DIFFERENCES = (
    "leaves out rows with advantage 0: actor/ppo_kl and actor/pg_clipfrac* are means over the other rows, and gradients "
    "equal verl's up to the rounding of another packing of rows"
)
_FLAG = "rl_accel.skip_zero"
_refuse = functools.partial(refuse, _FLAG)


def influence_of_zeros(loss_function: Callable[..., Any]) -> str:
    """Returns the reason why rows (responses) with advantage 0 influence training with ``loss_function``, or "" if they do not.

    Computes gradients for random batches of 8 rows, of which 3 have advantage 0. The gradients of these 3 must be 0, and those of
    the other 5 the same with and without these 3. For a loss that leaves out some rows of every batch, a reason is
    returned, too: such rows have gradient 0 whatever their advantage, so the trial shows nothing.

    ``loss_function`` is verl's, with its configuration, and takes ``model_output``, ``data`` and ``dp_group``.
    """
    every = range(len(trials.LENGTHS))
    others = [row for row in every if row not in trials.ZERO_ROWS]
    keeps_every_row = False
    try:
        for seed, distance in enumerate(_DISTANCES):
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs, too
                batch = trials.random_batch(torch.Generator().manual_seed(seed), distance)
                whole, part = (trials.gradients(loss_function, batch, rows) for rows in (every, others))
                ones = {**batch, "advantages": [mask.float() for mask in batch["response_mask"]]}
                keeps_every_row |= all(bool(row.any()) for row in trials.gradients(loss_function, ones, every).values())
            if any(bool(whole[row].count_nonzero()) for row in trials.ZERO_ROWS):
                return "rows with advantage 0 have a gradient"
            if not all(torch.allclose(whole[row], part[row], rtol=1e-5, atol=0.0) for row in others):
                return "rows with advantage 0 change the gradient of others"
    except Exception as error:  # an unknown loss function may need data that the trial lacks
        return f"it cannot be tried: {type(error).__name__}: {error}"
    return "" if keeps_every_row else "it cannot be tried: it drops rows of every trial"


def require_loss_ignores_zeros(loss_function: Callable[..., Any]) -> None:
    """Raises ConfigError if responses with advantage 0 influence training with this loss, see :func:`influence_of_zeros`."""
    if reason := influence_of_zeros(loss_function):
        config, mode = trials.config_and_mode(loss_function)
        loss_name = f"{mode} with loss_agg_mode {config.loss_agg_mode}" if config and mode else repr(loss_function)
        _refuse(trials.LOSS_MODE, "a loss that advantage 0 silences", loss_name, reason)


def _require_update_ignores_zeros(engine: Any, data: Any, loss_function: Any) -> None:
    """Raises ConfigError if leaving out rows (responses) with advantage 0 would change the training or ``actor/entropy_loss``."""
    from verl.utils import tensordict_utils as tu

    # Only settings that are equal on all ranks are read, so that all ranks decide the same.
    if tu.get_non_tensor_data(data, "calculate_entropy", False):
        _refuse(f"{_ACTOR}.calculate_entropy", False, True, "actor/entropy_loss is a mean over all rows")
    if getattr(engine, "_qat_enabled", False):
        _refuse(f"{_ACTOR}.fsdp_config.qat.enable", False, True, "quantisation observes the activations of all rows")
    if part := next(trials.random_parts(engine.module), ""):
        _refuse("dropout of the model", 0, part, "other random numbers would be drawn")
    for name in ("forward_step", "prepare_model_inputs", "prepare_model_outputs"):  # the trial does not call them
        try:
            upstream.require_own(getattr(type(engine), name), f"verl:FSDPEngineWithLMHead.{name}")
        except PatchRefused as error:
            raise ConfigError(f"rl_accel.skip_zero wants verl's own training step: {error}") from error
    require_loss_ignores_zeros(loss_function)


def _find_zero_rows(data: Any) -> list[bool]:
    """Returns for each row (response) of the mini-batch ``data`` whether the gradient of the row is certainly 0.

    This is so if all advantages of trained tokens are 0, and all other factors of the loss are finite: 0 times infinity is not 0.
    """
    factors = [data[name].unbind() for name in ("old_log_probs", "rollout_is_weights") if name in data]
    rows = zip(data["response_mask"].bool().unbind(), data["advantages"].unbind(), *factors, strict=True)
    return [
        not advantages[mask].any() and all(bool(factor[mask].isfinite().all()) for factor in others)
        for mask, advantages, *others in rows
    ]


def _choose_rows(zero: list[bool], lengths: list[int], wanted: int) -> list[int]:
    """Returns the sorted indices of ``wanted`` rows: all rows with a gradient, filled up with the shortest of the ``zero`` rows."""
    rows = [row for row, is_zero in enumerate(zero) if not is_zero]
    spare = sorted((row for row, is_zero in enumerate(zero) if is_zero), key=lambda row: lengths[row])
    return sorted(rows + spare[: wanted - len(rows)])


def _note(message: str) -> None:
    if torch.distributed.get_rank() == 0:
        warn_once(message, "rl-accel: skip_zero %s", message, level=logging.INFO)


def _agree_on_rows(engine: Any, data: Any, zero: list[bool]) -> tuple[int, list[int], int]:
    """Agrees with the other data-parallel ranks on the number of rows (responses) that every rank trains in a mini-batch.

    ``data`` is the mini-batch of this rank. ``zero`` says for each of its rows whether the row's gradient is certainly 0.

    Returns:
        ``wanted``: number of rows that each rank trains. ``sizes``: number of rows in each rank's mini-batch. ``tokens``: number of
        trained tokens (``loss_mask``) in the mini-batches of all ranks together.
    """
    from verl.utils import tensordict_utils as tu
    from verl.utils.device import get_device_id

    group = engine.get_data_parallel_group()
    here = torch.tensor([len(zero), zero.count(False), int(data["loss_mask"].sum())], device=get_device_id())
    ranks = [torch.empty_like(here) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(ranks, here, group=group)
    sizes, trained, tokens = zip(*(rank.tolist() for rank in ranks), strict=True)
    is_dynamic = tu.get_non_tensor_data(data, "use_dynamic_bsz", True)
    # The same number of rows on all ranks makes verl find the same number of micro-batches.
    multiple = 1 if is_dynamic else tu.get_non_tensor_data(data, "micro_batch_size_per_gpu", 1)
    return -(-max(1, *trained) // multiple) * multiple, list(sizes), sum(tokens)


def _start_counter(settings: Any, engine: Any, data: Any, loss_function: Any) -> Counter[str] | None:
    """Returns an empty counter for skipped rows. Logs the reason and returns None if rows must not be skipped.

    Raises ConfigError instead of returning None if the feature is enabled by name.
    """
    try:
        if not settings.enable:
            trials.require_verls(loss_function, _FLAG)
        _require_update_ignores_zeros(engine, data, loss_function)
        return Counter()
    except ConfigError as error:
        if settings.enable:
            raise
        _note(f"stays off: {error}")
        return None


@dataclass
class _Engine:
    """State of one training engine of verl.

    Attributes:
        loss_function: the loss function for which ``skipped`` was decided.
        skipped: what this step has left out so far: ``rows``, ``tokens`` and ``seconds_saved``. None if verl trains all rows.
        timings: tokens and seconds of the latest mini-batches.
    """

    loss_function: Any
    skipped: Counter[str] | None
    timings: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_TIMINGS))


def _seconds_of(tokens: int, timings: Collection[tuple[int, float]]) -> float:
    """Estimates the seconds that ``tokens`` more tokens would add to a mini-batch. ``timings``: tokens and seconds of mini-batches.

    Uses the median slope between mini-batches of different sizes, which leaves out what a mini-batch costs at any size. The slope
    is at most the lowest quotient of seconds and tokens, and 0 while all mini-batches have the same size.
    """
    pairs = combinations(timings, 2)
    slopes = [(late - early) / (many - few) for (few, early), (many, late) in pairs if many != few]
    if not slopes:
        return 0.0
    lowest_mean = min(seconds / computed for computed, seconds in timings)
    return tokens * min(max(statistics.median(slopes), 0.0), lowest_mean)


def _train_rows(
    original: Any, engine: Any, data: Any, loss_function: Any, state: _Engine, skipped: Counter[str]
) -> Any:
    """Calls verl's function ``original`` with only the rows that must be trained. Adds the savings to ``skipped``.

    Savings are ``rows`` and ``tokens`` (of this rank, times the number of ranks, because verl logs the mean over ranks) and
    ``seconds_saved`` (estimate for this rank). Padding, which are rows without a trained token, is left out but not counted.
    """
    from verl.utils import tensordict_utils as tu

    zero = _find_zero_rows(data)
    wanted, sizes, tokens = _agree_on_rows(engine, data, zero)
    lengths = data["input_ids"].offsets().diff().tolist()
    started = time.perf_counter()
    if wanted >= min(sizes):
        output = original(engine, data, loss_function, False)
        state.timings.append((sum(lengths), time.perf_counter() - started))
        return output

    def normalised_by_all(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        tu.assign_non_tensor(data, batch_num_tokens=tokens)
        return loss_function(model_output=model_output, data=data, dp_group=dp_group)

    rows = _choose_rows(zero, lengths, wanted)
    if observe := getattr(loss_function, "observe", None):  # reuse_log_probs needs the log-probabilities of all rows
        others = [row for row in range(len(zero)) if row not in rows]
        original(engine, tu.index_select_tensor_dict(data, others), observe, True)
    started = time.perf_counter()
    output = original(engine, tu.index_select_tensor_dict(data, rows), normalised_by_all, False)
    state.timings.append((sum(lengths[row] for row in rows), time.perf_counter() - started))
    is_trained = [bool(mask.any()) for mask in data["loss_mask"].unbind()]
    left_out = [row for row in range(len(zero)) if row not in rows and is_trained[row]]
    left_out_tokens = sum(lengths[row] for row in left_out)
    # verl logs the mean over ranks, and the mean over those mini-batches of a step that have the metric.
    counts = {"rows": len(left_out) * len(sizes), "tokens": left_out_tokens * len(sizes)}
    skipped.update({**counts, "seconds_saved": _seconds_of(left_out_tokens, state.timings)})
    _note(_DIFFERENCES)
    return output


def _make(original: Any, settings: Any) -> Any:
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import Metric
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    engines: weakref.WeakKeyDictionary[Any, _Engine] = weakref.WeakKeyDictionary()

    def forward_backward_batch(self: Any, data: Any, loss_function: Any, forward_only: Any = False) -> Any:
        # A caller that reads the outputs of all rows, such as verl's Tinker worker, asks for the model's output.
        needs_all = forward_only or tu.get_non_tensor_data(data, "return_model_output", False)
        if needs_all or "advantages" not in data or type(self) is not FSDPEngineWithLMHead:  # a critic, or not tried
            return original(self, data, loss_function, forward_only)
        state = engines.get(self)
        verls_loss = getattr(loss_function, "verls_loss", loss_function)  # reuse_log_probs wraps it
        if state is None or state.loss_function is not verls_loss:
            state = engines[self] = _Engine(verls_loss, _start_counter(settings, self, data, verls_loss))
        skipped = state.skipped
        if skipped is None:
            return original(self, data, loss_function, forward_only)
        output = _train_rows(original, self, data, loss_function, state, skipped)
        if tu.get_non_tensor_data(data, "update_lr_scheduler", True):  # the last mini-batch of the step
            for name in ("rows", "tokens", "seconds_saved"):
                output["metrics"][f"rl_accel/skip_zero/{name}"] = Metric("mean", float(skipped[name]))
            skipped.clear()
        return output

    return forward_backward_batch


SWITCHES = (
    Patch(
        name="verl.skip_zero.actor_update",
        target="verl.workers.engine.fsdp.transformer_impl:FSDPEngine.forward_backward_batch",
        supports="verl>=0.9",
        params=("self", "data", "loss_function", "forward_only"),
        make=_make,
        fingerprints=("31a4f7024bd19fe1328d957d62930f340f43ff5bb623a7617895d98f32f2662a",),
        uses=("prepare_micro_batches", "forward_step"),
        no_seam="verl chooses the rows of a micro-batch itself, and a registered policy loss sees rows after their forward pass",
        upstream="https://github.com/verl-project/verl/issues/5770",
        remove_when="verl leaves rows with advantage 0 out of the actor update",
    ),
)
