"""Adaptive waits between polls for finished rollouts in verl's V1 replay buffer, instead of a fixed 2 seconds.

The original method still runs and logs, with a changed ``poll_interval`` that is restored right after the call.

The times of polls may affect more than the delay. With a group filter, they decide which prompts replace dropped groups: the wait
is then unchanged. In asynchronous modes, and perhaps with a custom buffer, they decide which responses are in a batch: the wait is
then changed only if the feature is enabled by name.

verl's mode ``separate_async`` counts a step as idle if the wait was longer than the configured ``poll_interval``. verl itself
always waits whole intervals. With the patch, a step with a shorter wait no longer counts.
"""

import math
import time
import weakref
from dataclasses import dataclass
from typing import Any

from rl_accel.patches.patch import Patch
from rl_accel.rollout.adaptive_wait import AdaptiveWait
from rl_accel.telemetry import metrics

_CPU_PER_SECOND = 1.25
"""Upper bound of the CPU seconds per second of a poll. Above 1, because TransferQueue's process works part of that time, too."""


@dataclass
class _Sampling:
    """Wait policy of one replay buffer, and the state of the buffer's current ``sample()`` call."""

    policy: AdaptiveWait
    debug_time: float | None = None  # last_debug_time that the last wait returned; differs in a new call of sample()
    started: float = 0.0  # perf_counter time of the call's start, in seconds
    woke: float = 0.0  # perf_counter time of the last wait's end, in seconds
    saved: float = 0.0  # seconds from the last wait's end to the next poll at verl's fixed interval


def _adaptive(original: Any, settings: Any) -> Any:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    buffers: weakref.WeakKeyDictionary[Any, _Sampling] = weakref.WeakKeyDictionary()

    def wait_for_next_poll(self: Any, partition_id: str, last_debug_time: float) -> Any:
        is_filtered = getattr(self, "filter_groups_metric", None) is not None
        if partition_id != "val" and (is_filtered or (type(self) is not ReplayBuffer and not settings.enable)):
            return original(self, partition_id, last_debug_time)
        now = time.perf_counter()
        interval = self.poll_interval
        if (state := buffers.get(self)) is None:
            state = buffers[self] = _Sampling(AdaptiveWait(settings.max_cpu_share, settings.max_delay_s))
        if state.debug_time != last_debug_time:
            # sample() sets the debug time to time.time() at the start of the call. No other record of the start time exists.
            state.started = state.woke = now - max(time.time() - last_debug_time, 0.0)
            state.saved = 0.0
        poll_s = _CPU_PER_SECOND * (now - state.woke)
        self.poll_interval = state.policy.next_wait(poll_s, interval)
        try:
            state.debug_time = original(self, partition_id, last_debug_time)
        finally:
            self.poll_interval = interval
        state.woke = time.perf_counter()
        metrics.add("sampler/polls", 1)
        metrics.add("sampler/wait_seconds", state.woke - now)
        cycle = interval + state.policy.cost / _CPU_PER_SECOND
        elapsed = state.woke - state.started
        before = state.saved
        state.saved = math.ceil(elapsed / cycle) * cycle - elapsed
        metrics.add("sampler/seconds_saved", state.saved - before)  # negative if the estimate has shrunk
        return state.debug_time

    return wait_for_next_poll


SWITCHES = (
    Patch(
        name="verl.sampler",
        target="verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._wait_for_next_poll",
        supports="verl>=0.9",
        params=("self", "partition_id", "last_debug_time"),
        make=_adaptive,
        fingerprints=("a97c732c9241ce181966ac9ebddac049e606ca99d3472ce629c248e51908d1af",),
        uses=("poll_interval",),
        no_seam="poll_interval has no configuration key, and a custom sampler would replace all of the user's own",
        remove_when="the sampler is told of finished responses, or poll_interval is a key",
    ),
)
