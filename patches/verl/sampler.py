"""Waits for finished rollouts in verl's V1 replay buffer as long as it pays, not 2 seconds each time.

It stands aside where more depends on when verl looks than the time: with a group filter, what is launched in place of dropped
groups; in asynchronous modes, and perhaps in a buffer of the user's, which responses a batch has. Asked for by name, it acts in
the latter two.

verl's buffer and its asynchronous subclass sleep in one method, so that one patch serves ``sync``, ``colocate_async`` and
``separate_async``. The method itself is kept, its log line included: it runs with another ``poll_interval``, which
is put back right after. ``separate_async`` takes a step for idle when it waited longer than ``poll_interval``; it goes on
reading the configured value, but a wait of less than that, which stock verl rounds up to a full interval, no longer counts.
"""

import math
import time
import weakref
from dataclasses import dataclass
from typing import Any

from rl_accel.errors import PatchRefused
from rl_accel.patches.patch import Patch
from rl_accel.rollout.adaptive_wait import AdaptiveWait
from rl_accel.telemetry import metrics

_WORK = 1.25
"""Processor seconds a second of polling costs at most: the queue's controller works in part while its client does."""


@dataclass
class _Sampling:
    """One buffer's policy, and where its current ``sample()`` call stands. Times are of ``perf_counter``."""

    policy: AdaptiveWait
    debug_time: float | None = None
    started: float = 0.0
    woke: float = 0.0
    saved: float = 0.0

    def begin(self, now: float, debug_time: float) -> None:
        # sample() takes time.time() as its debug time when it starts: the only trace of when that was.
        self.started = self.woke = now - max(time.time() - debug_time, 0.0)
        self.saved = 0.0

    def newly_saved(self, interval: float) -> float:
        """Seconds saved if the poll now due finds enough samples, less what earlier polls of this call reported."""
        cycle = interval + self.policy.cost / _WORK
        elapsed = self.woke - self.started
        before, self.saved = self.saved, math.ceil(elapsed / cycle) * cycle - elapsed
        return self.saved - before


def _adaptive(original: Any, settings: Any) -> Any:
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    buffers: weakref.WeakKeyDictionary[Any, _Sampling] = weakref.WeakKeyDictionary()

    def wait_for_next_poll(self: Any, partition_id: str, last_debug_time: float) -> float:
        is_filtered = getattr(self, "filter_groups_metric", None) is not None
        if partition_id != "val" and (is_filtered or (type(self) is not ReplayBuffer and not settings.enable)):
            stock: float = original(self, partition_id, last_debug_time)
            return stock
        now, interval = time.perf_counter(), self.poll_interval
        state = buffers.get(self)
        if state is None:
            policy = AdaptiveWait(settings.max_cpu_share, settings.max_delay_s)
            state = buffers[self] = _Sampling(policy)
        if state.debug_time != last_debug_time:
            state.begin(now, last_debug_time)
        outstanding = len(self.pending_keys[partition_id]) + len(self.running_keys[partition_id])
        settled = len(self.finished_keys[partition_id]) + len(self.failure_keys[partition_id])
        poll_s = _WORK * (now - state.woke)
        self.poll_interval = state.policy.next_wait(now, poll_s, outstanding, settled, interval)
        try:
            state.debug_time = original(self, partition_id, last_debug_time)
        finally:
            self.poll_interval = interval
        state.woke = time.perf_counter()
        metrics.add("sampler/polls", 1)
        metrics.add("sampler/wait_s", state.woke - now)
        metrics.add("sampler/seconds_saved", state.newly_saved(interval))
        return state.debug_time

    return wait_for_next_poll


def _require_interval(original: Any, _replacement: Any, _settings: Any) -> None:
    if "poll_interval" not in original.__code__.co_names:
        raise PatchRefused("it no longer reads self.poll_interval, so setting it would change nothing")


SWITCHES = (
    Patch(
        name="verl.sampler",
        target="verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._wait_for_next_poll",
        supports="verl>=0.9",
        params=("self", "partition_id", "last_debug_time"),
        make=_adaptive,
        fingerprints=("a97c732c9241ce181966ac9ebddac049e606ca99d3472ce629c248e51908d1af",),
        probe=_require_interval,
        no_seam="poll_interval has no configuration key, and a custom sampler would replace all of the user's own",
        remove_when="the sampler is told of finished responses, or poll_interval is a key",
    ),
)
