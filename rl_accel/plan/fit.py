"""Models of the rollout engine's speed: fitted to the measured responses of a run, or derived from published numbers."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from rl_accel.errors import RlAccelError
from rl_accel.rollout.simulation import Cluster, EngineModel
from rl_accel.rollout.workload import Floats, load_data
from rl_accel.telemetry.stage_clock import ResponseTimes

_KNOTS = (1, 4, 16, 64, 256, 1024)
"""Numbers of running requests for which the seconds of a decoding step are fitted. The seconds in between are interpolated."""
_CONSTANTS = ("cached_token_seconds", "prompt_token_seconds", "request_seconds", "response_seconds")
"""Names of the constants of :class:`EngineModel` that are fitted in addition to ``step_seconds``."""
_MAX_RESPONSES = 20_000
"""Maximum number of responses in a fit, to limit its time. If there are more, about this number is chosen at random."""


@dataclass(frozen=True)
class Fit:
    """Result of :func:`fit_engine`.

    Attributes:
        engine: the engine model with the fitted constants.
        error: root mean square error of the simulated seconds of a response, divided by the mean of the measured seconds.
        responses: number of responses in the fit.
    """

    engine: EngineModel
    error: float
    responses: int


class _Batch:
    """Start times, end times and numbers of tokens of the responses that one rollout server generated in one training step."""

    def __init__(self, responses: Sequence[ResponseTimes]) -> None:
        rows = [(r.began, r.generated or r.ended, r.tokens or 0) for r in sorted(responses, key=lambda r: r.began)]
        self.begins, self.ends, self.tokens = np.array(rows, float).T

    def seconds(self, cluster: Cluster) -> Floats:
        """Simulates the responses on ``cluster``. Returns the seconds that each response takes.

        A response begins once as many other responses have ended as had ended when it began in the measured run.
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
    steps: Sequence[Sequence[ResponseTimes]], prompt_tokens: int = 0, slots: int = 1024, cache_tokens: float = math.inf
) -> Fit:
    """Fits the constants of an engine model to the measured responses of training steps, by least squares of their seconds.

    ``prompt_tokens`` is the number of tokens in each prompt. ``slots`` and ``cache_tokens`` are those of :class:`EngineModel`.

    Raises:
        RlAccelError: fewer than 16 responses (chosen by hand) have tokens and times.
    """
    from scipy.optimize import lsq_linear

    batches = _batches_of(steps)
    seconds = np.concatenate([np.empty(0), *(batch.ends - batch.begins for batch in batches)])
    if len(seconds) < 16:
        raise RlAccelError(f"fitting the engine wants 16 responses with tokens and times, found {len(seconds)}")
    most = min(max(len(batch.begins) for batch in batches), slots)
    knots = [*(k for k in _KNOTS if k <= max(most / 4, 1)), *[most] * (most > 1)]
    factors = _factors_of(batches, knots, prompt_tokens, slots=slots, cache_tokens=cache_tokens)
    pace = float(np.median(seconds / np.concatenate([batch.tokens for batch in batches])))
    norms = np.linalg.norm(factors, axis=0)
    scale = np.where(norms > 0, norms, np.inf)  # a constant without effect is fitted as 0
    least = np.append(scale[0] * pace / 100, np.zeros(len(norms) - 1))  # a decoding step takes some time
    constants = lsq_linear(factors / scale, seconds, (least, np.inf), method="bvls").x / scale
    paces = dict(zip(knots, np.cumsum(constants[: len(knots)]).tolist(), strict=True))
    others = dict(zip(_CONSTANTS, constants[len(knots) :].tolist(), strict=True))
    engine = EngineModel(paces, slots=slots, cache_tokens=cache_tokens, **others)
    error = float(np.sqrt(np.square(factors @ constants - seconds).mean()) / seconds.mean())
    return Fit(engine, error, len(seconds))


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


def _factors_of(batches: Sequence[_Batch], knots: Sequence[int], prompt_tokens: int, **limits: Any) -> Floats:
    """Returns a matrix whose product with the constants of an engine model is the seconds of the responses.

    Rows are responses, columns are constants: the seconds of a decoding step with ``knots[0]`` running requests, the increase of
    these seconds from each knot to the next, and :data:`_CONSTANTS`. Column n holds the seconds that the responses take in a
    simulation in which constant n is 1 and all others are 0. ``limits`` are the slots and the cache size of the engine.
    """
    count = len(knots)

    def simulated(rise: int, **constant: Any) -> Floats:
        """Returns the simulated seconds of each response. ``constant`` are further constants of the engine; 0 if not given.

        A decoding step takes 1 s with up to ``knots[rise - 1]`` running requests, and 2 s with ``knots[rise]`` or more. The
        difference from a simulation with 1 s for all steps is the effect of a rise by 1 s.
        """
        paces = {knot: 1.0 + (number >= rise) for number, knot in enumerate(knots)}
        engine = EngineModel(paces, **limits, **constant)
        return np.concatenate([batch.seconds(Cluster(engine, 1, prompt_tokens)) for batch in batches])

    # exact, because lengths, slots and cache size alone determine the decoding steps in which a response runs
    level = simulated(count)
    columns = [level, *(simulated(rise) - level for rise in range(1, count))]
    columns += [simulated(count, **{name: 1.0}) - level for name in _CONSTANTS]
    return np.stack(columns, axis=1)


def engine_of_model(model: str, tp: int | None = None) -> EngineModel:
    """Returns the engine model for a replica of the language model ``model`` on ``tp`` H800 GPUs.

    ``tp`` is the tensor-parallel size. None: the size in RollPacker's published runs of this model.

    Raises:
        RlAccelError: the model is unknown. The message names the known models.
    """
    cluster = load_data("h800.json")
    if model not in cluster["models"]:
        raise RlAccelError(f"--step-seconds: wanted one of {', '.join(cluster['models'])}, found {model!r}")
    sizes = cluster["models"][model]
    tp = tp or sizes["tp"]
    rate, weights = cluster["bandwidth"] * cluster["bandwidth_share"] * tp, 2 * sizes["parameters"]
    waits = cluster["layer_seconds"] * sizes["layers"] * (tp > 1)
    floor, token = cluster["overhead_seconds"] + waits + weights / rate, weights / (cluster["decoding_flops"] * tp)
    reading = weights / (cluster["flops"] * tp)
    memory = cluster["memory_bytes"] * sizes.get("memory_share", cluster["memory_share"]) * tp
    cache = (memory - weights) / sizes["kv_bytes"]
    paces = {1: floor + token, 1001: floor + 1001 * token}
    return EngineModel(paces, sizes["kv_bytes"] / rate, reading, cache_tokens=max(cache, 1))
