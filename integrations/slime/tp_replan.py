"""Advice on the tensor-parallel (TP) size of slime's rollout engines, based on the number of preemptions.

The advice is for the next launch, because slime starts the engines only once in a run. :func:`check` refuses unsupported
configurations. :func:`numbers_of` passes the measurements of each rollout to the planner, which decides about the TP size.
"""

import json
import logging
from collections.abc import Callable
from typing import Any, NoReturn

from rl_accel.errors import ConfigError
from rl_accel.features import TP_REPLAN, TpReplanFlags
from rl_accel.integrations.slime import interfaces
from rl_accel.integrations.slime.hooks import flags_of
from rl_accel.integrations.slime.rollout_log import LOG_INTERFACES, LoggedRollout
from rl_accel.log import warn_once
from rl_accel.parallel.model_memory import FLAG, TpBounds, read_configuration
from rl_accel.parallel.tp_planner import PlannedRun
from rl_accel.patches.seams import member_check
from rl_accel.switch import forget_when_off
from rl_accel.telemetry.server_counters import COUNTERS, Counters, Reading, ask_endpoints, fetch_page

logger = logging.getLogger("rl_accel")

_Read = Callable[[], dict[str, Reading | None]]

PREFIX = "rl_accel/tp_replan/"
_MUST_BE_UNSET = {
    "rollout_external": "slime starts no engine with --rollout-external-engine-addrs",
    "prefill_num_servers": "prefill and decode have sizes of their own",
    "sglang_config": "its server groups have sizes of their own",
}


def check(args: Any, flags: TpReplanFlags) -> None:
    """Raises ConfigError if ``tp_replan`` does not support the run, see :func:`bounds_of`. Runs without engines are not checked."""
    if _generates(args):
        bounds_of(args, flags)


def bounds_of(args: Any, flags: TpReplanFlags) -> TpBounds:
    """Returns the TP sizes that the rollout engines of this run could have.

    Raises:
        ConfigError: no size is possible, the current size is not a possible size, or an argument of slime is not supported.
    """
    for name, reason in _MUST_BE_UNSET.items():
        if getattr(args, name, None) not in (None, False):
            _refuse(f"{name} to be unset", getattr(args, name), reason)
    if (ranks := _sglang(args, "dp_size", 1)) > 1:
        _refuse("--sglang-dp-size 1", ranks, "with data-parallel attention more GPUs are not more cache for an engine")
    gpus, size, stages = args.rollout_num_gpus or 0, args.rollout_num_gpus_per_engine, _sglang(args, "pp_size", 1)
    if not gpus or size % stages or gpus % size:
        _refuse(
            "whole engines of whole pipelines", f"{gpus} GPUs", f"{size} for an engine, {stages} stages in a pipeline"
        )
    prompt, response = (getattr(args, f"rollout_max_{part}_len", None) or 0 for part in ("prompt", "response"))
    bounds = TpBounds(
        flags,
        gpus // stages,
        args.num_gpus_per_node,
        model=read_configuration(str(args.hf_checkpoint), is_quantised=bool(_sglang(args, "quantization"))),
        max_tokens=getattr(args, "rollout_max_context_len", None) or (prompt and prompt + response),
        memory_share=_sglang(args, "mem_fraction_static", 0.9),
        bytes_per_value=4 if _sglang(args, "dtype") in ("float32", "float") else 2,
        multiple_of=_sglang(args, "ep_size", 1),
    )
    if size // stages not in bounds.sizes:
        sizes = " or ".join(map(str, bounds.sizes))
        flag = f"--rollout-num-gpus-per-engine {size}, {bounds.obstacles_of(size // stages)}"
        _refuse(f"engines of TP {sizes}", size // stages, flag)
    return bounds


_current_run: list[tuple[Any, _Read, Counters, PlannedRun]] = []
"""State of the current run, one tuple; empty before the first rollout. The tuple holds slime's arguments, the function that reads
the servers' preemption counters, the object that computes differences of these counters, and the planner."""
forget_when_off.append(_current_run.clear)


def _watch(args: Any) -> tuple[_Read, Counters, PlannedRun]:
    if not _current_run or _current_run[0][0] is not args:
        flags = flags_of(args)[TP_REPLAN]
        run = PlannedRun(bounds_of(args, flags), flags.max_changes, args.save)
        _current_run[:] = [(args, _reader(args), Counters(), run)]
    return _current_run[0][1:]


def numbers_of(rollout: LoggedRollout) -> dict[str, float]:
    """Passes the measurements of a rollout to the planner of TP sizes, and logs the planner's advice if there is any.

    Returns:
        Metrics with the prefix ``rl_accel/tp_replan/``; {} if the run has no engines. ``tp``: current TP size. ``wanted_tp``:
        advised TP size. ``changes``: number of changes advised so far. ``preemptions``: number of preemptions during this
        rollout, absent if unknown.
    """
    if not _generates(rollout.args):
        return {}
    read, counters, run = _watch(rollout.args)
    stages, preemptions = _sglang(rollout.args, "pp_size", 1), counters.take(read())
    change, numbers = run.take_in(
        rollout.number,
        rollout.metrics,
        tp=rollout.args.rollout_num_gpus_per_engine // stages,
        preemptions=preemptions,
        seconds=rollout.seconds,
        tokens=sum(sample.response_length for sample in rollout.samples),
    )
    if change is not None:
        flag = f"--rollout-num-gpus-per-engine {change.tp * stages}"
        advice = "rl-accel: tp_replan: advice after rollout %d: %s; for the next launch: %s"
        logger.warning(advice, rollout.number, change.reason, flag)
    return {PREFIX + name: value for name, value in numbers.items()}


def set_aside(args: Any) -> None:
    """Discards the preemptions that were counted during an evaluation, which would otherwise count for the next rollout."""
    if _generates(args):
        read, counters, _ = _watch(args)
        counters.take(read())


def _generates(args: Any) -> bool:
    """Returns whether this run starts rollout engines, which two debug modes of slime do not."""
    return not (getattr(args, "debug_train_only", False) or getattr(args, "load_debug_rollout_data", None))


def _sglang(args: Any, name: str, default: Any = None) -> Any:
    value = getattr(args, f"sglang_{name}", None)
    return default if value is None else value


def _refuse(wanted: str, found: Any, reason: str) -> NoReturn:
    raise ConfigError(f"{FLAG} wants {wanted}, found {found} ({reason})")


def _reader(args: Any) -> _Read:
    """Returns a function that reads the preemption counter of each rollout server that slime's router knows.

    This function returns a mapping from a server's ``"<id> <address>"`` to the server's counter; {} if the router does not answer.
    """
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/workers"

    def read() -> dict[str, Reading | None]:
        try:
            workers = json.loads(fetch_page(router))["workers"]
            urls = {f"{worker.get('id', '')} {worker['url']}": worker["url"].rstrip("/") for worker in workers}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            warn_once(router, "rl-accel: preemptions are unknown, %s: %r", router, error)
            return {}
        return ask_endpoints(urls, COUNTERS["sglang"])

    return read


SWITCHES = (
    member_check(
        name="slime.tp_replan",
        target="slime.observability.rollout_metrics:log_rollout_data",
        interfaces=(interfaces.Sample, *LOG_INTERFACES),
    ),
)
