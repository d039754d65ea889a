import numpy as np
import pytest
import torch
from verl.utils import torch_functional

from rl_accel.ops.whiten import masked_whiten


def case(seed: int, rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.RandomState(seed)
    values = torch.from_numpy(random.randn(rows, tokens) * 10.0 ** random.randint(-3, 4))
    values = values.to(torch.float64 if seed % 5 == 4 else torch.float32)
    mask = torch.from_numpy(random.rand(rows, tokens) < random.rand(rows, 1))
    mask[0, :2] = True
    if seed % 3 == 0:
        values[~mask] = (float("nan"), float("inf"), 1e30)[seed % 9 // 3]
    return values, mask.to((torch.int64, torch.bool, torch.float32, torch.int32)[seed % 4])


@pytest.mark.parametrize("shift_mean", [True, False])
def test_bits_of_verl(shift_mean, same_bits):
    random = np.random.RandomState(0)
    shapes = [(random.randint(1, 60), random.randint(2, 90)) for _ in range(200)]
    shapes += 4 * [(64, 2048), (3, 50_000), (1000, 33)]  # torch sums these in threads
    for seed, shape in enumerate(shapes):
        values, mask = case(seed, *shape)
        before, wanted = values.clone(), torch_functional.masked_whiten(values, mask, shift_mean)
        assert same_bits(masked_whiten(values, mask, shift_mean), wanted), f"case {seed}"
        assert same_bits(values, before)


@pytest.mark.parametrize(
    ("values", "mask", "error", "names"),
    [
        (torch.zeros(2, 3, dtype=torch.bfloat16), torch.ones(2, 3), TypeError, "values"),
        (torch.zeros(3, 2).t(), torch.ones(2, 3), ValueError, "values"),
        (torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3), ValueError, "values"),
        (torch.zeros(2, 3), torch.ones(2, 1), ValueError, "mask"),
        (torch.zeros(2, 3), torch.full((2, 3), 0.5), ValueError, "mask"),
        (torch.zeros(2, 3), torch.full((2, 3), float("nan")), ValueError, "mask"),
        (torch.zeros(2, 3), torch.full((2, 3), 2), ValueError, "mask"),
        (torch.zeros(2, 3), torch.zeros(2, 3), ValueError, "mask"),
        (torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.float64), TypeError, "mask"),
    ],
)
def test_bad_input_is_named(values, mask, error, names):
    with pytest.raises(error, match=f"^{names} wants .* found "):
        masked_whiten(values, mask)
