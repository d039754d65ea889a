"""Whitening over a mask with the bits of verl's ``masked_whiten`` and half of its passes over memory.

Source: ``verl/utils/torch_functional.py`` (0.9.1), which computes the mean twice and converts the mask anew for every
statistic; here each is done once. The two sums stay torch's own, over an array of the same shape, because their order
of addition is torch's affair.
"""

import torch

from rl_accel.ops.inputs import BINARY_MASKS, check_tensor, is_binary


def check(values: object, mask: object) -> None:
    """Raise what :func:`masked_whiten` raises for these arguments. For callers with work to do before they whiten."""
    whitened = check_tensor("values", values, (torch.float32, torch.float64), gradient=False)
    counted = check_tensor("mask", mask, BINARY_MASKS, like=whitened, of="values")
    for name, tensor in (("values", whitened), ("mask", counted)):
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"{name} wants a contiguous tensor on cpu, found {tensor.device}, {tensor.stride()}")
    if not is_binary(counted):
        raise ValueError("mask wants 0 and 1 only, found other values")
    if bool(counted.sum() < 2):
        raise ValueError("mask wants at least two ones, found fewer")


def masked_whiten(values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
    """Scale ``values`` to unit variance, and shift them to zero mean, over the elements where ``mask`` is 1.

    Args:
        values: any shape, float32 or float64, contiguous, CPU, no gradient. Where the mask is 0 anything may stand,
            NaN too; it does not count, but is transformed like the rest.
        mask: same shape, 0 and 1 (bool, int32, int64, float32), contiguous, at least two ones.
        shift_mean: False adds the mean back.

    Returns:
        A new tensor of the shape and dtype of ``values``.

    Raises:
        TypeError, ValueError: an argument is outside what is written above; the message names it.
    """
    check(values, mask)
    with torch.no_grad():
        outside = mask == 0
        count = mask.sum()
        kept = values.masked_fill(outside, 0.0)
        mean = kept.sum() / (count + 1e-8)
        whitened = values - mean
        torch.mul(whitened, whitened, out=kept).masked_fill_(outside, 0.0)
        variance = kept.sum() / (count + 1e-8) * (count / (count - 1))
        whitened *= torch.rsqrt(variance + 1e-8)
        if not shift_mean:
            whitened += mean
    return whitened
