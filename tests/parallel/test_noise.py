"""Student's quantiles against scipy."""

import pytest
from scipy.stats import t

from rl_accel.parallel.noise import student_quantile


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 19, 60, 1000])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.9999])
def test_quantiles(confidence, freedom):
    assert student_quantile(confidence, freedom) == pytest.approx(t.ppf(confidence, freedom), rel=1e-6, abs=1e-9)
