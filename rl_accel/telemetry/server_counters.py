"""Preemptions by the rollout servers' own counters, and differences of them. What a server does not say is unknown, never 0."""

import importlib.util
import logging
import math
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("rl_accel")

PATIENCE_SECONDS = 5.0
COUNTERS = {
    "vllm": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    "sglang": ("sglang:num_retracted_requests_total", "sglang:num_retracted_reqs_total"),
}
"""Counters on ``/metrics``. vLLM shows its with rollout.disable_log_stats=False, SGLang its with metrics enabled. (SGLang's gauge
``num_retracted_reqs`` is not a count of all so far.)"""
SGLANG_GAUGE = "sglang:num_retracted_reqs"
_SGLANG_METRICS = ("srt/observability/metrics_collector.py", "srt/metrics/collector.py")
"""Where versions of SGLang define their metrics."""

_AT_ONCE = 16


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


def ask_endpoints(urls: Mapping[str, str], names: Sequence[str], silent: str = "") -> dict[str, Reading | None]:
    """Read ``/metrics`` of servers, by name; one line of warning for those that do not say, the first time they do not.

    Args:
        urls: ``http://host:port`` by name.
        names: the counter, under the names that versions of the engine give it.
        silent: see :func:`parse`.
    """
    with ThreadPoolExecutor(max_workers=max(1, min(_AT_ONCE, len(urls)))) as pool:
        answers = list(pool.map(lambda url: _ask_endpoint(url, names, silent), urls.values()))
    failed = [(url, said) for url, said in zip(urls.values(), answers, strict=True) if isinstance(said, str)]
    if new := [(url, problem) for url, problem in failed if url not in _warned]:
        _warned.update(url for url, _ in new)
        others = f", and {len(new) - 1} other servers" if new[1:] else ""
        logger.warning("rl-accel: tp_replan: preemptions are unknown, %s/metrics: %s%s", *new[0], others)
    return {name: None if isinstance(said, str) else said for name, said in zip(urls, answers, strict=True)}


def fetch(url: str) -> str:
    """Return what ``url`` says. Servers are within the cluster: no proxy is asked.

    Raises:
        OSError, ValueError: it does not answer, or with an error.
    """
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=PATIENCE_SECONDS) as answer:
        return str(answer.read().decode(errors="replace"))


def _ask_endpoint(url: str, names: Sequence[str], silent: str) -> Reading | str:
    try:
        found = parse(fetch(f"{url}/metrics"), names, silent)
    except (OSError, ValueError) as error:
        return str(error)
    return f"has no {names[0]}" if found is None else found


def parse(text: str, names: Sequence[str], silent: str = "") -> Reading | None:
    """Return the first of the counters ``names`` that is in ``text`` (Prometheus), added up over labels; None if there is none.

    Args:
        text: of ``/metrics``.
        names: the counter, under the names that versions of the engine give it.
        silent: a metric of an engine that shows the counter only once it has counted: where this is, the counter is then 0.
    """
    try:
        value, started = counter_in(text, names), counter_in(text, ("process_start_time_seconds",))
        if value is None and silent and not _mentioned(text, names) and counter_in(text, (silent,)) is not None:
            value = 0.0
    except (ValueError, IndexError):
        return None
    return None if value is None or value < 0 else Reading(int(value), "" if started is None else str(started))


def _mentioned(text: str, names: Sequence[str]) -> bool:
    return any(line.startswith(tuple(names)) for line in text.splitlines())


def sglang_silent() -> str:
    """Return the metric that shows that an SGLang without the counter has not counted yet, as :func:`parse` wants it.

    Its counter has labels, and Prometheus shows such a one only after its first event; SGLang 0.5.23 calls it only if something was
    retracted. The gauge is older than the counter, so that the installed SGLang must have the counter, or nothing is concluded. Its
    source is read, as importing it takes seconds and needs a GPU's libraries.
    """
    found = importlib.util.find_spec("sglang")
    for folder in found.submodule_search_locations or () if found else ():
        for file in _SGLANG_METRICS:
            path = Path(folder) / file
            if path.is_file() and COUNTERS["sglang"][0] in path.read_text(errors="replace"):
                return SGLANG_GAUGE
    return ""


def counter_in(text: str, names: Sequence[str]) -> float | None:
    """Return the value of the first of the counters ``names`` that is in Prometheus' ``text``, added up over its labels."""
    found: Mapping[str, list[float]] = {name: [] for name in names}
    for line in text.splitlines():
        name, _, rest = line.replace("{", " {", 1).partition(" ")
        if name in found:
            value = float(rest.rpartition("}")[2].split()[0])  # a time may follow the value
            found[name].append(value)
    for values in found.values():
        if values and all(math.isfinite(value) for value in values):
            return sum(values)
    return None
