"""Model of the rollout engine's speed, fitted to the measured responses of a run."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from rl_accel.errors import RlAccelError
from rl_accel.rollout.simulation import Cluster, EngineModel
from rl_accel.rollout.workload import Floats
from rl_accel.telemetry.stage_clock import ResponseTimes

_LEAST_RESPONSES = 16
"""Minimum number of responses for a fit."""
_MAX_RESPONSES = 20_000
"""Maximum number of responses in a fit, to limit its time. If there are more, about this number is chosen at random."""


@dataclass(frozen=True)
class Fit:
    """Result of :func:`fit_engine`.

    Attributes:
        engine: the engine model with the fitted pace.
        start_seconds: fitted seconds of a response before its first decoding step.
        error: root mean square error of the simulated seconds of a response, divided by the mean of the measured seconds.
        responses: number of responses in the fit.
    """

    engine: EngineModel
    start_seconds: float
    error: float
    responses: int


class _Batch:
    """Start times, end times and numbers of tokens of the responses that one rollout server generated in one training step."""

    def __init__(self, responses: Sequence[ResponseTimes]) -> None:
        rows = [(r.began, r.generated or r.ended, r.tokens or 0) for r in sorted(responses, key=lambda r: r.began)]
        self.begins, self.ends, self.tokens = np.array(rows, float).T

    def simulated_seconds(self, cluster: Cluster) -> Floats:
        """Simulates the responses on ``cluster``. Returns the seconds that each response takes.

        A response begins once as many other responses have ended as had ended when it began in the measured run.
        """
        tokens = self.tokens.astype(int).tolist()
        began = np.zeros(len(tokens))
        ended = np.zeros(len(tokens))
        ended_before = np.searchsorted(np.sort(self.ends), self.begins, side="right").tolist()
        count_ended = 0
        for count, group in groupby(range(len(tokens)), ended_before.__getitem__):
            while count_ended < count and len(cluster):
                count_ended += _decode(cluster, ended)
            ids = [*group]
            began[ids] = cluster.now
            cluster.launch(ids, tokens[ids[0] : ids[-1] + 1])
        while len(cluster):
            _decode(cluster, ended)
        return ended - began


def _decode(cluster: Cluster, ended: Floats) -> int:
    """Advances ``cluster`` to its next event. Returns the number of responses that ended, and stores their times in ``ended``."""
    request = cluster.happen()
    if request is None:
        return 0
    ended[request.id] = cluster.now
    return 1


def fit_engine(
    steps: Sequence[Sequence[ResponseTimes]], prompt_tokens: int = 0, slots: int = 1024, cache_tokens: float = math.inf
) -> Fit:
    """Fits the pace of an engine to the measured responses of training steps, by least squares of their seconds.

    A decoding step takes ``floor + share * running`` seconds, where ``running`` is the number of running requests. The schedule of
    the responses, counted in decoding steps, does not depend on these two numbers. The seconds of a response are therefore a sum:
    those of a simulation in which each decoding step takes 1 s, times ``floor``, those of one in which it takes 1 s for each
    running request, times ``share``, and a constant.

    ``prompt_tokens`` is the number of tokens in each prompt. ``slots`` and ``cache_tokens`` are those of :class:`EngineModel`.

    Raises:
        RlAccelError: fewer than 16 responses have tokens and times.
    """
    from scipy.optimize import nnls

    batches = _batches_of(steps)
    seconds = np.concatenate([np.empty(0), *(batch.ends - batch.begins for batch in batches)])
    if len(seconds) < _LEAST_RESPONSES:
        wanted = f"{_LEAST_RESPONSES} responses with tokens and times"
        raise RlAccelError(f"fitting the engine wants {wanted}, found {len(seconds)}")

    def simulated(paces: dict[int, float]) -> Floats:
        engine = EngineModel(paces, slots=slots, cache_tokens=cache_tokens)
        return np.concatenate([batch.simulated_seconds(Cluster(engine, 1, prompt_tokens)) for batch in batches])

    table = np.stack([simulated({1: 1.0}), simulated({1: 1.0, 2: 2.0}), np.ones(len(seconds))], axis=1)
    norms = np.linalg.norm(table, axis=0)
    floor, share, start = (nnls(table / norms, seconds)[0] / norms).tolist()
    error = float(np.sqrt(np.square(table @ (floor, share, start) - seconds).mean()) / seconds.mean())
    most = max(2, min(max(len(batch.tokens) for batch in batches), slots))
    paces = {running: max(floor + share * running, 1e-9) for running in (1, most)}
    engine = EngineModel(paces, slots=slots, cache_tokens=cache_tokens)
    return Fit(engine, start, error, len(seconds))


def _batches_of(steps: Sequence[Sequence[ResponseTimes]]) -> list[_Batch]:
    """Groups responses by training step and rollout server. Drops responses without tokens. Keeps about :data:`_MAX_RESPONSES`."""
    batches = defaultdict(list)
    for number, step in enumerate(steps):
        for response in step:
            if response.tokens:
                batches[number, response.server].append(response)
    kept = [*batches.values()]
    share = _MAX_RESPONSES / max(sum(map(len, kept)), 1)
    if share < 1:
        count = math.ceil(share * len(kept))
        kept = [kept[n] for n in np.random.default_rng(0).choice(len(kept), count, replace=False)]
    return list(map(_Batch, kept))
