"""Student's t distribution, for means of a few noisy steps."""

import math
from functools import lru_cache


@lru_cache(maxsize=512)
def student_quantile(confidence: float, freedom: int) -> float:
    """Return t such that a Student variable with ``freedom`` (at least 1) degrees lies below it with ``confidence`` (0.5 to 1)."""
    low, high = 0.0, 1.0
    while _student_cdf(high, freedom) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, freedom) < confidence else (low, middle)
    return high


def _student_cdf(t: float, freedom: int) -> float:
    """The finite sums for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0 if freedom == 1 else term
    for i in range(2 + odd, freedom - 1, 2):
        term *= (i - 1) / i * math.cos(angle) ** 2
        total += term
    within = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return 0.5 + within / 2
