"""Functions that slime's flags name in the tests: judges, generate functions, filters, hooks. Each notes its input in ``SEEN``."""

import asyncio
import copy
import threading
from collections.abc import Callable

from rl_accel.errors import ConfigError

SEEN: list[tuple] = []
THEN: dict[int, Callable[[], None]] = {}
"""Functions by the number of entries after which each is called."""
ENDLESS = 16_000
"""Tokens of a response that ends in no test."""
ROWS = SLOW_ROWS, STUBBORN_ROWS, BROKEN_ROWS, CONSTANT_ROWS = set[int](), set[int](), set[int](), set[int]()


def reset():
    for state in (SEEN, THEN, *ROWS):
        state.clear()


def row_of(sample):
    return sample.metadata["row"]


async def score(args, sample, **kwargs):
    """Half the responses of a prompt score 1; those of CONSTANT_ROWS all do. SLOW_ROWS are never done.

    slime gives a list if a generate function returned one, and wants as many rewards.
    """
    if isinstance(sample, list):
        return [await score(args, each) for each in sample]
    SEEN.append(("judge", row_of(sample), sample.index))
    THEN.pop(len(SEEN), lambda: None)()
    if row_of(sample) in SLOW_ROWS:
        await asyncio.sleep(10**6)
    while row_of(sample) in STUBBORN_ROWS:
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            SEEN.append(("refused to stop", row_of(sample)))
    return 1.0 if row_of(sample) in CONSTANT_ROWS else float(sample.index % 2)


async def score_group(args, samples, **kwargs):
    SEEN.append(("group judge", row_of(samples[0]), len(samples)))
    if row_of(samples[0]) in SLOW_ROWS:
        await asyncio.sleep(10**6)
    if row_of(samples[0]) in BROKEN_ROWS:
        BROKEN_ROWS.remove(row_of(samples[0]))
        raise OSError("no judge")
    return [float(position) for position, _ in enumerate(samples)]


def own(*given):
    """slime's own generate function."""
    from slime.rollout.sglang_rollout import generate

    return generate(*given)


async def broken(args, sample, sampling_params):
    """slime's own function, but BROKEN_ROWS raise."""
    if row_of(sample) in BROKEN_ROWS:
        raise OSError("no such tool")
    return await own(args, sample, sampling_params)


async def stuck(args, sample, sampling_params):
    """slime's own function, but BROKEN_ROWS wait for a tool that never answers."""
    if row_of(sample) in BROKEN_ROWS:
        await asyncio.Event().wait()
    return await own(args, sample, sampling_params)


async def refused(args, sample, sampling_params):
    """slime's own function, but the server refuses what BROKEN_ROWS ask for."""
    from slime.utils.http_utils import post

    if row_of(sample) in BROKEN_ROWS:
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        too_long = {**sampling_params, "max_new_tokens": 100_000}
        await post(url, {"input_ids": [5], "sampling_params": too_long}, max_retries=1)
    return await own(args, sample, sampling_params)


async def endless(args, sample, sampling_params):
    """slime's own function, but responses of SLOW_ROWS do not end."""
    if row_of(sample) in SLOW_ROWS:
        sampling_params = {**sampling_params, "ignore_eos": True, "max_new_tokens": ENDLESS}
    return await own(args, sample, sampling_params)


async def whole(args, sample, sampling_params):
    """slime's own function, but no response ends before its longest length."""
    return await own(args, sample, {**sampling_params, "ignore_eos": True})


async def gives_up(args, sample, sampling_params):
    """Responses of BROKEN_ROWS are aborted after four tokens, those of row 6 with a reward, of row 7 to be left out of the loss."""
    from slime.utils.types import Sample

    if row_of(sample) not in BROKEN_ROWS:
        return await own(args, sample, sampling_params)
    sample = await own(args, sample, {**sampling_params, "max_new_tokens": 4, "ignore_eos": True})
    sample.status = Sample.Status.ABORTED
    sample.reward = 0.0 if row_of(sample) == 6 else None
    sample.remove_sample = row_of(sample) == 7
    return sample


async def two_turns(args, sample, sampling_params):
    """Fan out: the answer, and a second sample that goes on from it."""
    second = copy.deepcopy(sample)
    first = await own(args, sample, dict(sampling_params, max_new_tokens=20))
    if first.status.value == "aborted":
        return [first]
    second = await own(args, second, dict(sampling_params, max_new_tokens=20))
    for each in (first, second):
        each.rollout_id = sample.index
    return [first, second]


async def hook(args, sample, evaluation=False, rollout_id=None):
    SEEN.append(("hook", row_of(sample), sample.index))


def varies(args, samples, **kwargs):
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput

    SEEN.append(("dynamic filter", row_of(samples[0])))
    keep = len({sample.reward for sample in samples}) > 1
    return DynamicFilterOutput(keep=keep, reason=None if keep else "constant")


def sample_filter(args, data):
    SEEN.append(("sample filter", len(data)))


def process_all(args, groups, data_source):
    SEEN.append(("all samples", len(groups)))


CLOSING, MAY_CLOSE = threading.Event(), threading.Event()
"""Whether the clean-up of ``tool`` has begun, and whether it may end."""


async def tool(args, sample, sampling_params):
    """No request: a tool that answers at once. For SLOW_ROWS it never does, and its sandbox takes time to close."""
    from slime.utils.types import Sample

    if row_of(sample) in SLOW_ROWS:
        try:
            await asyncio.Event().wait()
        finally:
            CLOSING.set()
            while not MAY_CLOSE.is_set():
                await asyncio.sleep(0.01)
            SEEN.append("closed")
    sample.status, sample.response_length = Sample.Status.COMPLETED, 3
    return sample


async def wrongly_set_up(args, sample, **kwargs):
    raise ConfigError("rl_accel.reward_timeout.grader wants the dotted path of a function, found 'a.b'")
