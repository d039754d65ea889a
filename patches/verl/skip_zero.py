"""Leaves responses whose advantages are all zero out of verl's actor update. Their gradient is exactly zero.

The replacement runs verl's own :meth:`FSDPEngine.forward_backward_batch` on the other rows of a mini-batch. The loss is normalised
by the number of tokens and rows of the whole mini-batch, and the optimiser takes every step that verl takes. The gradient is
therefore the same up to float rounding, and bit for bit the same where the remaining rows form the same micro-batches.

A policy loss is accepted if it passes :func:`find_influence`: rows with advantage 0 must have gradient 0 and no effect on the
gradient of other rows. :func:`_require_no_influence` finds the other parts of an update that zero advantages do not silence.
"""

import functools
import statistics
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch

from rl_accel.errors import ConfigError, PatchRefused, refuse
from rl_accel.log import warn_once
from rl_accel.patches import upstream
from rl_accel.patches.patch import Patch

_LENGTHS = (1, 9, 33, 17, 40, 5, 12, 64)
"""Lengths in tokens of the 8 random responses with which :func:`find_influence` tests a policy loss. Chosen by hand."""
_ZERO_ROWS = (0, 3, 7)
"""Indices in ``_LENGTHS`` of the responses that get advantage 0: the first, one in the middle, and the last."""
_DISTANCES = (None, None, None, 0.05, 0.003, 0.0003)
"""Standard deviations of old minus new log-probabilities, one for each batch of :func:`find_influence`. None: both are drawn
independently, and differ so much that losses clip. With small differences, fewer losses drop rows."""
_PROMPT = 3  # tokens of each random prompt
_TIMINGS = 16
"""Number of mini-batches from whose times ``seconds_saved`` is estimated. Chosen by hand."""
_ACTOR = "actor_rollout_ref.actor"
_LOSS_MODE = f"{_ACTOR}.policy_loss.loss_mode"
_DIFFERENCES = (
    "leaves out rows with advantage 0: actor/ppo_kl and actor/pg_clipfrac* are means over the other rows, and gradients "
    "equal verl's up to the rounding of another packing of rows"
)
_refuse = functools.partial(refuse, "rl_accel.skip_zero")


def find_influence(loss_function: Callable[..., Any]) -> str:
    """Returns the reason why rows (responses) with advantage 0 influence training with ``loss_function``, or "" if they do not.

    Computes gradients for random batches of 8 rows, of which 3 have advantage 0. The gradients of these 3 must be 0, and those of
    the other 5 the same with and without these 3. For a loss that leaves out some rows of every batch, a reason is
    returned, too: such rows have gradient 0 whatever their advantage, so the trial shows nothing.

    ``loss_function`` is verl's, with its configuration, and takes ``model_output``, ``data`` and ``dp_group``.
    """
    every = range(len(_LENGTHS))
    others, keeps_every_row = [row for row in every if row not in _ZERO_ROWS], False
    try:
        for seed, distance in enumerate(_DISTANCES):
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs, too
                batch = _random_batch(torch.Generator().manual_seed(seed), distance)
                whole, part = (_gradients(loss_function, batch, rows) for rows in (every, others))
                ones = {**batch, "advantages": [mask.float() for mask in batch["response_mask"]]}
                keeps_every_row |= all(bool(row.any()) for row in _gradients(loss_function, ones, every).values())
            if any(bool(whole[row].count_nonzero()) for row in _ZERO_ROWS):
                return "rows with advantage 0 have a gradient"
            if not all(torch.allclose(whole[row], part[row], rtol=1e-5, atol=0.0) for row in others):
                return "rows with advantage 0 change the gradient of others"
    except Exception as error:  # an unknown loss function may need data that the trial lacks
        return f"it cannot be tried: {type(error).__name__}: {error}"
    return "" if keeps_every_row else "it cannot be tried: it drops rows of every trial"


def _random_batch(random: torch.Generator, distance: float | None) -> dict[str, list[torch.Tensor]]:
    """Returns a random batch, as a mapping from field name to a list with one tensor per row (response).

    Shapes for a response of T tokens: [_PROMPT + T] for the model's outputs ``log_probs`` and ``entropy``, [_PROMPT] for
    ``prompts``, and [T] for other fields. For ``distance`` see :data:`_DISTANCES`.
    """
    batch: dict[str, list[torch.Tensor]] = {}
    for row, length in enumerate(_LENGTHS):
        mask = torch.rand(length, generator=random) < 0.8
        mask[0] = True
        # Advantages of masked tokens are 0 in verl; large values let losses clip, and choose tokens by their covariance.
        advantages = 3 * torch.randn((), generator=random) * mask * (row not in _ZERO_ROWS)
        fields = {
            "prompts": torch.ones(_PROMPT, dtype=torch.long),
            "responses": torch.ones(length, dtype=torch.long),
            "response_mask": mask.long(),
            "advantages": advantages,
            **{name: -3 * torch.rand(length, generator=random) for name in ("old_log_probs", "ref_log_prob")},
            "rollout_is_weights": 0.5 + torch.rand(length, generator=random),
            "log_probs": -3 * torch.rand(_PROMPT + length, generator=random),
            "entropy": torch.rand(_PROMPT + length, generator=random),
        }
        if distance is not None:  # the model's output at a token is for the token after it
            noise = distance * torch.randn(length, generator=random)
            fields["old_log_probs"] = fields["log_probs"][_PROMPT - 1 : -1] + noise
        for name, value in fields.items():
            batch.setdefault(name, []).append(value)
    return batch


def _gradients(loss_function: Any, batch: dict[str, list[torch.Tensor]], rows: Any) -> dict[int, torch.Tensor]:
    """Returns the gradients of the loss of ``rows`` with respect to the model's outputs ``log_probs`` and ``entropy``, by row.

    The gradients of a row with T response tokens are a tensor [2, _PROMPT + T]. The loss is normalised by the size of ``batch``,
    not by that of ``rows``.
    """
    from verl.utils import tensordict_utils as tu

    chosen = {name: [values[row] for row in rows] for name, values in batch.items()}
    outputs = {name: [value.requires_grad_() for value in chosen.pop(name)] for name in ("log_probs", "entropy")}
    nested = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    tokens = int(sum(mask.sum() for mask in batch["response_mask"]))
    constants = {"dp_size": 2, "batch_num_tokens": tokens, "global_batch_size": len(_LENGTHS)}
    data = tu.get_tensordict({name: nested(values) for name, values in chosen.items()}, constants)
    with torch.enable_grad():
        model_output = {name: nested(values) for name, values in outputs.items()}
        loss, _ = loss_function(model_output=model_output, data=data, dp_group=None)
        leaves = [value for values in outputs.values() for value in values]
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return {row: torch.stack(gradients[n :: len(rows)]) for n, row in enumerate(rows)}


def require_silent(loss_function: Callable[..., Any]) -> None:
    """Raises ConfigError if responses with advantage 0 influence training with ``loss_function``, see :func:`find_influence`."""
    if reason := find_influence(loss_function):
        config, mode = _config_and_mode(loss_function)
        loss_name = f"{mode} with loss_agg_mode {config.loss_agg_mode}" if config and mode else repr(loss_function)
        _refuse(_LOSS_MODE, "a loss that advantage 0 silences", loss_name, reason)


def _config_and_mode(loss_function: Any) -> tuple[Any, Any]:
    """Returns the actor's configuration and ``loss_mode`` that verl's ``loss_function`` uses; None where unknown."""
    config = getattr(loss_function, "keywords", {}).get("config")
    return config, getattr(getattr(config, "policy_loss", None), "loss_mode", None)


def _require_verls(loss_function: Any) -> None:
    """Raises ConfigError unless verl itself defines the loss. A user's loss may have a state, which a test call could change."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    _, mode = _config_and_mode(loss_function)
    policy_loss = [POLICY_LOSS_REGISTRY[mode]] if mode in POLICY_LOSS_REGISTRY else []
    for function in (getattr(loss_function, "func", loss_function), *policy_loss):
        try:
            upstream.require_own(function, "verl:the loss")
        except PatchRefused:
            reason = "a trial would change the state of a loss that has one; rl_accel.skip_zero.enable=True tries it"
            _refuse(_LOSS_MODE, "a loss of verl's own", mode or upstream.describe(function), reason)


def _require_no_influence(engine: Any, data: Any, loss_function: Any) -> None:
    """Raises ConfigError if leaving out rows (responses) with advantage 0 would change the training or ``actor/entropy_loss``."""
    from verl.utils import tensordict_utils as tu

    # Only settings that are equal on all ranks are read, so that all ranks decide the same.
    if tu.get_non_tensor_data(data, "calculate_entropy", False):
        _refuse(f"{_ACTOR}.calculate_entropy", False, True, "actor/entropy_loss is a mean over all rows")
    if getattr(engine, "_qat_enabled", False):
        _refuse(f"{_ACTOR}.fsdp_config.qat.enable", False, True, "quantisation observes the activations of all rows")
    if part := next(_random_parts(engine.module), ""):
        _refuse("dropout of the model", 0, part, "other random numbers would be drawn")
    for name in ("forward_step", "prepare_model_inputs", "prepare_model_outputs"):  # the trial does not call them
        try:
            upstream.require_own(getattr(type(engine), name), f"verl:FSDPEngineWithLMHead.{name}")
        except PatchRefused as error:
            raise ConfigError(f"rl_accel.skip_zero wants verl's own training step: {error}") from error
    require_silent(loss_function)


def _random_parts(model: torch.nn.Module) -> Iterator[str]:
    """Yields the parts of ``model`` that draw random numbers in training: dropout, and noise of expert routers."""
    for module in model.modules():
        for name, value in vars(module).items():
            is_rate = "drop" in name or "jitter" in name or (name == "p" and "Dropout" in type(module).__name__)
            if is_rate and isinstance(value, float) and value > 0:
                yield f"{type(module).__name__}.{name} = {value}"


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


def _warn(message: str) -> None:
    if torch.distributed.get_rank() == 0:
        warn_once(message, "rl-accel: skip_zero %s", message)


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
    """Returns an empty counter for skipped rows. Logs a warning and returns None if rows must not be skipped.

    Raises ConfigError instead of returning None if the feature is enabled by name.
    """
    try:
        if not settings.enable:
            _require_verls(loss_function)
        _require_no_influence(engine, data, loss_function)
        return Counter()
    except ConfigError as error:
        if settings.enable:
            raise
        _warn(f"stays off: {error}")
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
    output = original(engine, tu.index_select_tensor_dict(data, rows), normalised_by_all, False)
    state.timings.append((sum(lengths[row] for row in rows), time.perf_counter() - started))
    is_trained = [bool(mask.any()) for mask in data["loss_mask"].unbind()]
    left_out = [row for row in range(len(zero)) if row not in rows and is_trained[row]]
    left_out_tokens = sum(lengths[row] for row in left_out)
    # verl logs the mean over ranks, and the mean over those mini-batches of a step that have the metric.
    counts = {"rows": len(left_out) * len(sizes), "tokens": left_out_tokens * len(sizes)}
    skipped.update({**counts, "seconds_saved": _seconds_of(left_out_tokens, state.timings)})
    _warn(_DIFFERENCES)
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
        if state is None or state.loss_function is not loss_function:
            state = engines[self] = _Engine(loss_function, _start_counter(settings, self, data, loss_function))
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
