"""Fit of a model of the rollout engine's speed to the measured times and lengths of a run's responses."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from rl_accel.errors import RlAccelError
from rl_accel.rollout.simulation import Cluster, EngineModel, Floats, Ints
from rl_accel.telemetry.stage_clock import Response

_KNOTS = (1, 4, 16, 64, 256, 1024)
"""Numbers of running requests at which the slope of the decoding-step time may change. Closer numbers could not be fitted
separately."""
_CONSTANTS = ("cached_token_seconds", "prompt_token_seconds", "request_seconds", "response_seconds")
"""Names of the constants of :class:`EngineModel` that are fitted in addition to ``step_seconds``."""
_MOST = 20_000
"""Maximum number of responses in a fit, which takes some ten seconds. A larger run is reduced to about this number at random."""


@dataclass(frozen=True)
class Fit:
    """Result of :func:`fit_engine`.

    Attributes:
        engine: the engine model with the fitted constants.
        intervals: half-width of the 95% interval of each constant in seconds, by name.
        error: root mean square error of the seconds of a response, relative to the mean seconds of a response.
        responses: number of responses in the fit.
    """

    engine: EngineModel
    intervals: Mapping[str, float]
    error: float
    responses: int


class _Batch:
    """Responses of one rollout server in one training step.

    Holds arrays of begin times in seconds, end times in seconds and numbers of tokens, in the order of the begin times.
    """

    def __init__(self, responses: Sequence[Response]) -> None:
        rows = [(r.began, r.generated or r.ended, r.tokens or 0) for r in sorted(responses, key=lambda r: r.began)]
        self.begins, self.ends, self.tokens = np.array(rows, float).T

    def seconds(self, cluster: Cluster) -> Floats:
        """Returns the seconds that each response takes in a simulation on ``cluster``.

        Each launch waits until as many other responses have ended as had ended at the same launch in the measured run.
        """
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
    steps: Sequence[Sequence[Response]], prompt_tokens: int = 0, slots: int = 1024, cache_tokens: float = math.inf
) -> Fit:
    """Fits the constants of an engine model to the measured seconds of responses, by least squares.

    Lengths, slots and cache size determine the decoding steps in which each response runs. The seconds of a response are therefore
    linear in the constants. The factor of a constant is the simulated seconds of the response if this constant is 1 and all other
    constants are 0. In the fitted model, a step with more running requests is never shorter. The 95% intervals come from 100
    bootstrap draws over batches, where a batch is the responses of one rollout server in one training step.

    Args:
        steps: measured responses of each training step.
        prompt_tokens: number of tokens in each prompt.
        slots: number of slots of the engine, the maximum number of running requests.
        cache_tokens: capacity of the key-value cache in tokens.

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
    most = min(max(len(batch.begins) for batch in work), slots)
    knots = [*(k for k in _KNOTS if k <= max(most / 4, 1)), *[most] * (most > 1)]

    def simulated(rise: int, **constant: float) -> Floats:
        """Returns the simulated seconds of each response for an artificial engine, whose decoding steps take 1 s to 2 s.

        A step takes 1 s with up to ``knots[rise - 1]`` running requests, 2 s with at least ``knots[rise]``, and linearly more in
        between. With ``rise`` = ``len(knots)``, each step takes 1 s. ``constant``: further constants of the engine; default 0.
        """
        paces = {knot: 1.0 + (number >= rise) for number, knot in enumerate(knots)}
        engine = EngineModel(paces, slots=slots, cache_tokens=cache_tokens, **constant)
        return np.concatenate([batch.seconds(Cluster(engine, 1, prompt_tokens)) for batch in work])

    count = len(knots)
    level = simulated(count)
    columns = [level, *(simulated(rise) - level for rise in range(1, count))]
    columns += [simulated(count, **{name: 1.0}) - level for name in _CONSTANTS]
    table = np.stack(columns, axis=1)
    norms = np.linalg.norm(table, axis=0)
    scale = np.where(norms > 0, norms, np.inf)  # a constant without effect is fitted as 0
    pace = np.median(seconds / np.concatenate([batch.tokens for batch in work]))
    least = np.append(scale[0] * pace / 100, np.zeros(len(norms) - 1))  # a step takes more than 0 s
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
    engine = EngineModel(paces, slots=slots, cache_tokens=cache_tokens, **others)
    names = [*(f"step_seconds[{knot}]" for knot in knots), *others]
    error = float(np.sqrt(np.square(table @ found - seconds).mean()) / seconds.mean())
    return Fit(engine, dict(zip(names, half.tolist(), strict=True)), error, len(seconds))
