"""The engine of a run, from the times and lengths of its responses."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from rl_accel.errors import RlAccelError
from rl_accel.rollout.simulation import Cluster, Engine, Floats, Ints
from rl_accel.telemetry.stage_clock import Response

_KNOTS = (1, 4, 16, 64, 256, 1024)
"""Running requests between which a step is linear, far enough apart, and from the most that ran, to be told apart."""
_CONSTANTS = ("cached_token_seconds", "prompt_token_seconds", "request_seconds", "response_seconds")
"""Of an engine, that are fitted beside its steps."""
_MOST = 20_000
"""Responses to which an engine is fitted; of more, so many are drawn. That takes some ten seconds."""


@dataclass(frozen=True)
class Fit:
    """An engine fitted to so many ``responses``. ``intervals``: half the width of the 95% interval of each constant, by name.
    ``error``: root mean square error of a response's seconds, over their mean.
    """

    engine: Engine
    intervals: Mapping[str, float]
    error: float
    responses: int


class _Batch:
    """What a server had to do in a step. Arrays of its responses, in the order in which they began."""

    def __init__(self, responses: Sequence[Response]) -> None:
        rows = [(r.began, r.generated or r.ended, r.tokens or 0) for r in sorted(responses, key=lambda r: r.began)]
        self.begins, self.ends, self.tokens = np.array(rows, float).T

    def seconds(self, cluster: Cluster) -> Floats:
        """Simulate how long each takes if it begins after as many have ended as had in truth."""
        tokens = self.tokens.astype(int).tolist()
        began, ended = np.zeros(len(tokens)), np.zeros(len(tokens))
        before = np.searchsorted(np.sort(self.ends), self.begins, side="right").tolist()
        over = 0

        def decode(until: int) -> None:
            nonlocal over
            while over < until and len(cluster):
                if request := cluster.happen():
                    ended[request.id] = cluster.now
                    over += 1

        for count, group in groupby(range(len(tokens)), before.__getitem__):
            decode(count)
            ids = [*group]
            began[ids] = cluster.now
            cluster.launch(ids, tokens[ids[0] : ids[-1] + 1])
        decode(len(tokens))
        return ended - began


def fit_engine(
    steps: Sequence[Sequence[Response]], prompt_tokens: int = 0, places: int = 1024, cache_tokens: float = math.inf
) -> Fit:
    """Fit the constants of an engine with so many ``places`` and ``cache_tokens`` to how long responses took, by least squares.

    Counted in decoding steps, what runs when follows from lengths, places and cache alone. So the seconds of a response are a sum
    of constants, each times the seconds that the same requests take on an engine which has only this one. A step is level or rises
    with requests. Intervals are of 100 other draws (bootstrap) of what a server had to do in a step.

    Raises:
        RlAccelError: too few responses have tokens and times.
    """
    from scipy.optimize import lsq_linear

    batches: dict[tuple[int, str | None], list[Response]] = {}
    for number, step in enumerate(steps):
        for response in step:
            if response.tokens:
                batches.setdefault((number, response.server), []).append(response)
    rng, work = np.random.default_rng(0), [_Batch(batch) for batch in batches.values()]
    kept = _MOST / max(sum(map(len, batches.values())), 1)
    if kept < 1:
        work = [work[n] for n in rng.choice(len(work), math.ceil(kept * len(work)), replace=False)]
    seconds = np.concatenate([batch.ends - batch.begins for batch in work]) if work else np.empty(0)
    if len(seconds) < 16:
        raise RlAccelError(f"fitting the engine wants 16 responses with tokens and times, found {len(seconds)}")
    most = min(max(len(batch.begins) for batch in work), places)
    knots = [*(k for k in _KNOTS if k <= max(most / 4, 1)), *[most] * (most > 1)]

    def simulated(rise: int, **constant: float) -> Floats:
        """Seconds of each response if a step takes one second, and from a knot on one more."""
        paces = {knot: 1.0 + (number >= rise) for number, knot in enumerate(knots)}
        engine = Engine(paces, places=places, cache_tokens=cache_tokens, **constant)
        return np.concatenate([batch.seconds(Cluster(engine, 1, prompt_tokens)) for batch in work])

    count = len(knots)
    level = simulated(count)
    columns = [level, *(simulated(rise) - level for rise in range(1, count))]
    columns += [simulated(count, **{name: 1.0}) - level for name in _CONSTANTS]
    table = np.stack(columns, axis=1)
    norms = np.linalg.norm(table, axis=0)
    scale = np.where(norms > 0, norms, np.inf)  # what did not happen costs nothing
    pace = np.median(seconds / np.concatenate([batch.tokens for batch in work]))
    least = np.append(scale[0] * pace / 100, np.zeros(len(norms) - 1))  # a step takes some time
    to_constants = np.eye(len(norms))
    to_constants[:count, :count] = np.tril(np.ones((count, count)))

    def fitted(rows: Ints) -> Floats:
        values: Floats = lsq_linear(table[rows] / scale, seconds[rows], (least, np.inf), method="bvls").x / scale
        return values

    rows = np.arange(len(seconds))
    blocks = np.split(rows, np.cumsum([len(batch.begins) for batch in work])[:-1])
    found = fitted(rows)
    draws = [rng.integers(len(blocks), size=len(blocks)) for _ in range(100 * (len(blocks) > 1))]
    drawn = [to_constants @ fitted(np.concatenate([blocks[n] for n in draw])) for draw in draws]
    half = 1.96 * np.std(drawn, axis=0) if drawn else np.full(len(found), np.inf)
    constants = (to_constants @ found).tolist()
    paces, others = dict(zip(knots, constants, strict=False)), dict(zip(_CONSTANTS, constants[count:], strict=True))
    engine = Engine(paces, places=places, cache_tokens=cache_tokens, **others)
    names = [*(f"step_seconds[{knot}]" for knot in knots), *others]
    error = float(np.sqrt(np.square(table @ found - seconds).mean()) / seconds.mean())
    return Fit(engine, dict(zip(names, half.tolist(), strict=True)), error, len(seconds))
