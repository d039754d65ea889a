"""Reads the number of preemptions from the rollout servers' own counters. A number that a server does not report is unknown."""

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
    # not the gauge num_retracted_reqs, which is not cumulative
    "sglang": ("sglang:num_retracted_requests_total",),
}
"""Names of the preemption counter on the page ``/metrics`` of a rollout server, by engine.

vLLM shows the counter with rollout.disable_log_stats=False, SGLang (0.5.7 or later) with metrics enabled."""
# SGLang shows its counter of preemptions only after the first one, and the second counter from the first token on.
_COMPANIONS = {"sglang:num_retracted_requests_total": "sglang:realtime_tokens_total"}
"""Mapping from a preemption counter to a second counter of the same server. If only the second is on the page, the first is 0."""

_AT_ONCE = 16
_STARTED = "process_start_time_seconds"


@dataclass(frozen=True)
class Reading:
    """Preemption counter of one rollout server at one time.

    Attributes:
        preemptions: number of preemptions since the server started.
        incarnation: start time of the server's processes, as text.
    """

    preemptions: int
    incarnation: str = ""


class Counters:
    """Computes the number of preemptions between successive readings of all rollout servers.

    All servers must be new at the first reading. Later, the number is unknown if a server is new or has restarted, or if it gave no
    reading now or the last time.
    """

    def __init__(self) -> None:
        self._before: Mapping[str, Reading | None] | None = None

    def take(self, now: Mapping[str, Reading | None]) -> int | None:
        """Returns the number of preemptions on all servers since the last call, or at first since their start; None if unknown.

        ``now`` is the new reading of each server, by server name; None for a server that gave no reading.
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
    """Reads the preemption counter of each rollout server. Returns the readings by server name; None for a server that fails.

    Logs a warning about servers that fail for the first time.

    Args:
        urls: address of each server, such as ``http://host:port``, by server name.
        names: possible names of the counter, which depend on the version of the engine.
    """
    problems: dict[str, str] = {}

    def ask(url: str) -> Reading | None:
        try:
            reading = preemptions_in(fetch_page(f"{url}/metrics"), names)
            if reading is None:
                problems[url] = f"has no {names[0]}"
            return reading
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


def fetch_page(url: str) -> str:
    """Returns the page at ``url`` (http or https) as text. Uses no proxy.

    Raises:
        OSError, ValueError: the server does not answer or answers with an error, or the URL has another scheme.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"the address of a server must begin with http:// or https://, found {url!r}")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=ANSWER_SECONDS) as answer:
        return str(answer.read().decode(errors="replace"))


def preemptions_in(text: str, names: Sequence[str]) -> Reading | None:
    """Returns the preemption counter on a server's Prometheus page ``text``; None if unknown.

    ``names`` are possible names of the counter. The first of them that is on the page counts.
    """
    companions = [_COMPANIONS[name] for name in names if name in _COMPANIONS]
    wanted = (*names, *companions, _STARTED)
    # The parser is slow (it looks at each character), and a page has a thousand lines.
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
    """Returns the sum of the samples of one counter, which differ in their labels.

    Samples that differ only in ranks other than ``dp_rank`` count the same events. Only the largest of them is added.
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
