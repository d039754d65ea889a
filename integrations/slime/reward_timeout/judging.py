"""The judge that slime calls for every response."""

import asyncio
from typing import Any

from rl_accel.integrations.slime.reward_timeout.grading import Grading


async def judge(args: Any, sample: Any, **kwargs: Any) -> Any:
    """slime's ``--custom-rm-path``: the reward of a sample, or of a list of samples their rewards.

    Raises:
        ConfigError: a flag is wrong, or nothing says how to grade.
        SandboxError: no process to grade in can be started.
    """
    grading = _of(args)
    grading.use()
    if not isinstance(sample, list):
        return await grading.judge(args, sample, kwargs)
    way = grading.way_of(sample[0]) if sample else None
    if way is not None and way.takes_lists:
        return await grading.judge_together(args, sample, way, kwargs)
    tasks = [asyncio.ensure_future(grading.judge(args, each, kwargs)) for each in sample]
    try:
        return list(await asyncio.gather(*tasks))
    finally:  # if one cannot be judged at all, the others are of no use
        for task in tasks:
            task.cancel()


OPEN: dict[asyncio.AbstractEventLoop, Grading] = {}
"""What grades in this process, by event loop: slime has one, and a second with fully asynchronous rollouts."""


def _of(args: Any) -> Grading:
    loop = asyncio.get_running_loop()
    for ended in [each for each in OPEN if each.is_closed()]:
        del OPEN[ended]
    grading = OPEN.get(loop)
    if grading is None:
        grading = OPEN[loop] = Grading(args)
    return grading
