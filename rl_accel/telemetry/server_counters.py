"""Preemptions by the rollout servers' own counters, and differences of them. What a server does not say is unknown, never 0."""

import logging
import math
import re
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

logger = logging.getLogger("rl_accel")

PATIENCE_SECONDS = 5.0
COUNTERS = {
    "vllm": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    "sglang": ("sglang:num_retracted_requests_total",),
}
"""Counters on ``/metrics``. vLLM shows its with rollout.disable_log_stats=False, SGLang (0.5.7 or later) its with metrics enabled.
(SGLang's gauge ``num_retracted_reqs`` is not a count of all so far.)"""
COMPANIONS = {"sglang:num_retracted_requests_total": "sglang:realtime_tokens_total"}
"""SGLang leaves the counter out until the first retraction. The companion came with the same release and is there from the first
token: with it on the page and the counter not, the counter is 0."""

_AT_ONCE = 16
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Reading:
    """What one server says.

    Attributes:
        preemptions: since it started.
        life: differs once it has been started anew.
        kv_use: the largest share of its cache in use since the last reading; None: unknown.
    """

    preemptions: int
    life: str = ""
    kv_use: float | None = None


Read = Callable[[], Mapping[str, Reading | None]]
"""Asks every server, by name. None: it does not say."""


class Counters:
    """Differences between readings of all servers.

    The first reading is of servers that have just started, with counters at 0. Later, a server that is new, was started anew, or
    did not answer the last time makes a step unknown.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self._before: Mapping[str, Reading | None] | None = None

    def take(self) -> tuple[int | None, float | None]:
        """Return the preemptions since the last call, and the largest share of a cache in use; None: unknown."""
        now = dict(self._read())
        before, self._before = self._before, now
        if not now or (before is not None and before.keys() != now.keys()):
            return None, None
        preemptions, shares = 0, []
        for name, reading in now.items():
            last = Reading(0, reading.life if reading else "") if before is None else before[name]
            if reading is None or last is None or reading.life != last.life or reading.preemptions < last.preemptions:
                return None, None
            preemptions += reading.preemptions - last.preemptions
            shares.append(reading.kv_use)
        known = [share for share in shares if share is not None]
        return preemptions, max(known) if len(known) == len(shares) else None


_warned: set[str] = set()


def ask_endpoints(urls: Mapping[str, str], names: Sequence[str]) -> dict[str, Reading | None]:
    """Read ``/metrics`` of servers, by name; one line of warning for those that do not say, the first time they do not.

    Args:
        urls: ``http://host:port`` by name.
        names: the counter, under the names that versions of the engine give it.
    """
    with ThreadPoolExecutor(max_workers=max(1, min(_AT_ONCE, len(urls)))) as pool:
        answers = list(pool.map(lambda url: _ask_endpoint(url, names), urls.values()))
    failed = [(url, said) for url, said in zip(urls.values(), answers, strict=True) if isinstance(said, str)]
    if new := [(url, problem) for url, problem in failed if url not in _warned]:
        _warned.update(url for url, _ in new)
        others = f", and {len(new) - 1} other servers" if new[1:] else ""
        logger.warning("rl-accel: preemptions are unknown, %s/metrics: %s%s", *new[0], others)
    return {name: None if isinstance(said, str) else said for name, said in zip(urls, answers, strict=True)}


def fetch(url: str) -> str:
    """Return what ``url`` says. Servers are within the cluster: no proxy is asked.

    Raises:
        OSError, ValueError: it does not answer, or with an error.
    """
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=PATIENCE_SECONDS) as answer:
        return str(answer.read().decode(errors="replace"))


def _ask_endpoint(url: str, names: Sequence[str]) -> Reading | str:
    try:
        found = parse(fetch(f"{url}/metrics"), names)
    except (OSError, ValueError) as error:
        return str(error)
    return f"has no {names[0]}" if found is None else found


def parse(text: str, names: Sequence[str]) -> Reading | None:
    """Return what ``text`` (Prometheus) says of the counter :func:`counter_in` finds; None if it cannot be known."""
    try:
        value, started = counter_in(text, names), counter_in(text, ("process_start_time_seconds",))
    except (ValueError, IndexError):
        return None
    return None if value is None or value < 0 else Reading(int(value), "" if started is None else str(started))


def counter_in(text: str, names: Sequence[str]) -> float | None:
    """Return the value of the first of the counters ``names`` that is in Prometheus' ``text``, None if it cannot be known.

    It is added up over labels. But all ranks of one SGLang engine count the same event, each with labels ``tp_rank`` and such: of
    those that differ in nothing but a rank (other than ``dp_rank``) the largest is taken.
    """
    companions = {COMPANIONS[name] for name in names if name in COMPANIONS}
    found: Mapping[str, dict[frozenset[tuple[str, str]], list[float]]] = {name: {} for name in (*names, *companions)}
    for line in text.splitlines():
        name, _, rest = line.replace("{", " {", 1).partition(" ")
        if name in found:
            labels, _, numbers = rest.rpartition("}")
            places = frozenset(
                (label, value)
                for label, value in _LABEL.findall(labels)
                if label == "dp_rank" or not label.endswith("_rank")
            )
            value = float(numbers.split()[0])  # a time may follow the value
            found[name].setdefault(places, []).append(value)
    for name in names:
        groups = found[name].values()
        if groups and all(math.isfinite(value) for values in groups for value in values):
            return sum(max(values) for values in groups)
    silent = [name for name in names if not found[name]]
    return 0.0 if any(found.get(COMPANIONS.get(name, "")) for name in silent) else None
