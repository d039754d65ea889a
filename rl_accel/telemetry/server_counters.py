"""Preemptions by the rollout servers' own counters, and differences of them. What a server does not say is unknown, never 0."""

import logging
import math
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from rl_accel.switch import forget_when_off

logger = logging.getLogger("rl_accel")

ANSWER_SECONDS = 30.0
COUNTERS = {
    "vllm": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    "sglang": ("sglang:num_retracted_requests_total",),
}
"""Counters on ``/metrics``. vLLM shows its with rollout.disable_log_stats=False, SGLang (0.5.7 or later) its with metrics enabled.
(SGLang's gauge ``num_retracted_reqs`` is not a count of all so far.)"""
_COMPANIONS = {"sglang:num_retracted_requests_total": "sglang:realtime_tokens_total"}
"""SGLang leaves the counter out until the first retraction. The companion came with the same release and is there from the first
token: with it on the page and the counter not, the counter is 0."""

_AT_ONCE = 16
_STARTED = "process_start_time_seconds"


@dataclass(frozen=True)
class Reading:
    """What one server says: its preemptions since it started. ``incarnation`` differs once it has been started anew."""

    preemptions: int
    incarnation: str = ""


class Counters:
    """Differences between readings of all servers.

    The first reading is of servers that have just started, with counters at 0. Later, a server that is new, was started anew, or
    did not answer the last time makes a step unknown.
    """

    def __init__(self) -> None:
        self._before: Mapping[str, Reading | None] | None = None

    def take(self, now: Mapping[str, Reading | None]) -> int | None:
        """Return the preemptions since the last call; None: unknown.

        Args:
            now: what each server says, by name; None for one that does not.
        """
        before, self._before = self._before, now
        if not now or (before is not None and before.keys() != now.keys()):
            return None
        preemptions = 0
        for name, reading in now.items():
            if reading is None:
                return None
            last = Reading(0, reading.incarnation) if before is None else before[name]
            if last is None or reading.incarnation != last.incarnation or reading.preemptions < last.preemptions:
                return None
            preemptions += reading.preemptions - last.preemptions
        return preemptions


_warned: set[str] = set()
forget_when_off.append(_warned.clear)


def ask_endpoints(urls: Mapping[str, str], names: Sequence[str]) -> dict[str, Reading | None]:
    """Read ``/metrics`` of servers, by name; one line of warning for those that do not say, the first time they do not.

    Args:
        urls: ``http://host:port`` by name.
        names: the counter, under the names that versions of the engine give it.
    """
    problems: dict[str, str] = {}

    def ask(url: str) -> Reading | None:
        try:
            found = parse(fetch(f"{url}/metrics"), names)
            if found is None:
                problems[url] = f"has no {names[0]}"
            return found
        except (OSError, ValueError) as error:
            problems[url] = str(error)
            return None

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        readings = dict(zip(urls, pool.map(ask, urls.values()), strict=True))
    if new := sorted(problems.keys() - _warned):
        _warned.update(new)
        others = f", and {len(new) - 1} other servers" if new[1:] else ""
        logger.warning("rl-accel: preemptions are unknown, %s/metrics: %s%s", new[0], problems[new[0]], others)
    return readings


def fetch(url: str) -> str:
    """Return the body of ``url``, http or https. Servers are within the cluster: no proxy is asked.

    Raises:
        OSError, ValueError: it does not answer, answers with an error, or has another scheme.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"the address of a server must begin with http:// or https://, found {url!r}")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=ANSWER_SECONDS) as answer:
        return str(answer.read().decode(errors="replace"))


def parse(text: str, names: Sequence[str]) -> Reading | None:
    """Return what ``text`` (Prometheus) says of the first of the counters ``names`` that it has; None if it cannot be known."""
    companions = [_COMPANIONS[name] for name in names if name in _COMPANIONS]
    wanted = (*names, *companions, _STARTED)
    # A page has a thousand lines, and the parser looks at each character.
    lines = (line for line in text.splitlines() if any(name in line for name in wanted))
    try:
        families = list(text_string_to_metric_families("\n".join(lines)))
    except (ValueError, IndexError):
        return None
    samples = {name: [s for family in families for s in family.samples if s.name == name] for name in wanted}
    count = next((_sum_over_labels(samples[name]) for name in names if samples[name]), None)
    if count is None and any(samples[name] for name in companions):
        count = 0.0
    if count is None or not math.isfinite(count) or count < 0:
        return None
    return Reading(int(count), " ".join(str(sample.value) for sample in samples[_STARTED]))


def _sum_over_labels(samples: Sequence[Sample]) -> float:
    """Add up a counter over labels.

    All ranks of one SGLang engine count the same event, each with labels ``tp_rank`` and such: of those that differ in nothing but
    a rank (other than ``dp_rank``) the largest is taken.
    """
    if not all(math.isfinite(sample.value) for sample in samples):
        return math.nan
    largest: dict[frozenset[tuple[str, str]], float] = {}
    for sample in samples:
        labels = frozenset(
            item for item in sample.labels.items() if item[0] == "dp_rank" or not item[0].endswith("_rank")
        )
        largest[labels] = max(largest.get(labels, -math.inf), sample.value)
    return sum(largest.values())
