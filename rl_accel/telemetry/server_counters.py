"""Reads the number of preemptions from the rollout servers' own counters. A number that a server does not report is unknown."""

import logging
import math
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from rl_accel.log import warn_once

ANSWER_SECONDS = 30.0
"""Maximum number of seconds to wait for an answer of a rollout server. Chosen by hand."""
COUNTERS = {
    "vllm": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    # not the gauge num_retracted_reqs, which is not cumulative
    "sglang": ("sglang:num_retracted_requests_total",),
}
"""Possible names of the preemption counter on the page ``/metrics`` of a rollout server, by engine.

vLLM has the counter with rollout.disable_log_stats=False, SGLang (0.5.7 or later) with ``enable_metrics=True``."""
_COMPANIONS = {"sglang:num_retracted_requests_total": "sglang:realtime_tokens_total"}
"""Mapping from SGLang's preemption counter to its token counter. The preemption counter appears after the first preemption, the
token counter after the first token. If a page has only the token counter, there were no preemptions."""
_HOW = {
    "vllm:num_preemptions_total": ", which actor_rollout_ref.rollout.disable_log_stats=False makes vLLM count",
    "sglang:num_retracted_requests_total": ", which enable_metrics=True among SGLang's engine_kwargs makes it count",
}
"""Mapping from each counter to a clause on the setting that makes the server count."""
_AT_ONCE = 16
"""Maximum number of rollout servers that are asked at the same time."""
_STARTED = "process_start_time_seconds"


@dataclass(frozen=True)
class Reading:
    """Preemption counter of one rollout server at one time.

    Attributes:
        preemptions: number of preemptions since the server started.
        incarnation: start time of the server's processes, as text. Another value means that the server has restarted.
    """

    preemptions: int
    incarnation: str = ""


class Counters:
    """Computes the number of preemptions between successive readings of all rollout servers.

    The first reading must be of servers that have just started, whose counters began at 0. Later, the number is unknown if a server
    was added, was removed or has restarted, or if its current or last reading is missing.
    """

    def __init__(self) -> None:
        self._before: Mapping[str, Reading | None] | None = None

    def take(self, now: Mapping[str, Reading | None]) -> int | None:
        """Returns the number of preemptions on all servers since the last call; None if unknown. The first call counts from 0.

        ``now`` is the current reading of each server, by server name; None for a server that gave no reading.
        """
        before = self._before
        self._before = now
        if before is None:
            before = {name: reading and Reading(0, reading.incarnation) for name, reading in now.items()}
        if not now or before.keys() != now.keys():
            return None
        preemptions = 0
        for name, reading in now.items():
            last = before[name]
            if (
                reading is None
                or last is None
                or reading.incarnation != last.incarnation
                or reading.preemptions < last.preemptions
            ):
                return None
            preemptions += reading.preemptions - last.preemptions
        return preemptions


def ask_endpoints(urls: Mapping[str, str], names: Sequence[str]) -> dict[str, Reading | None]:
    """Reads the preemption counter of each rollout server. Returns the readings by server name; None for a server that fails.

    Logs a warning about servers that fail, once for each set of servers; a note if they only do not count, verl's default.

    Args:
        urls: address of each server, such as ``http://host:port``, by server name.
        names: possible names of the counter, see :data:`COUNTERS`.
    """
    problems: dict[str, str] = {}

    def ask(url: str) -> Reading | None:
        try:
            reading = preemptions_in(fetch_page(f"{url}/metrics"), names)
            if reading is None:
                problems[url] = f"has no {names[0]}{_HOW.get(names[0], '')}"
            return reading
        except (OSError, ValueError) as error:
            problems[url] = str(error)
            return None

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        readings = dict(zip(urls, pool.map(ask, urls.values()), strict=True))
    if failed := sorted(problems):
        others = f", and {len(failed) - 1} other servers" if failed[1:] else ""
        text = "rl-accel: preemptions are unknown, %s/metrics: %s%s"
        do_answer = all(problem.startswith("has no ") for problem in problems.values())
        level = logging.INFO if do_answer else logging.WARNING
        warn_once(tuple(failed), text, failed[0], problems[failed[0]], others, level=level)
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

    ``names`` are possible names of the counter. The first one that is on the page counts.
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
    if count is None or not 0 <= count < math.inf:
        return None
    return Reading(int(count), " ".join(str(sample.value) for sample in samples[_STARTED]))


def _sum_over_labels(samples: Sequence[Sample]) -> float:
    """Returns the sum of the samples of one counter, which have different labels; NaN if a sample is not finite.

    Samples that differ only in ranks other than ``dp_rank`` count the same events. Only the largest of these samples is added.
    """
    if not all(math.isfinite(sample.value) for sample in samples):
        return math.nan
    largest: dict[frozenset[tuple[str, str]], float] = {}
    for sample in sorted(samples, key=lambda sample: sample.value):
        labels = [item for item in sample.labels.items() if item[0] == "dp_rank" or not item[0].endswith("_rank")]
        largest[frozenset(labels)] = sample.value
    return sum(largest.values())
