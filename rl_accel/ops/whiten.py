"""Whitening over a mask with the bits of verl's ``masked_whiten`` and half of its passes over memory.

Source: ``verl/utils/torch_functional.py`` (0.9.1), which computes the mean twice and converts the mask anew for every
statistic; here each is done once. The two sums stay torch's own, over an array of the same shape, because their order
of addition is torch's affair.
"""

import torch

from rl_accel.ops.groups import describe


def unsupported(values: object, mask: object) -> Exception | None:
    """Return the error that :func:`masked_whiten` would raise for these arguments, or None when it takes them."""
    if not isinstance(values, torch.Tensor) or values.dtype not in (torch.float32, torch.float64):
        return TypeError(f"values: wanted a float32 or float64 tensor, found {describe(values)}")
    if (
        values.layout != torch.strided
        or values.device.type != "cpu"
        or values.requires_grad
        or not values.is_contiguous()
    ):
        return ValueError(f"values: wanted a contiguous tensor on cpu without gradient, found {describe(values)}")
    if not isinstance(mask, torch.Tensor) or mask.dtype not in (torch.bool, torch.int32, torch.int64, torch.float32):
        return TypeError(f"mask: wanted bool, int32, int64 or float32, found {describe(mask)}")
    if (
        mask.layout != torch.strided
        or mask.shape != values.shape
        or mask.device != values.device
        or not mask.is_contiguous()
    ):
        return ValueError(f"mask: wanted contiguous {tuple(values.shape)} on cpu, found {describe(mask)}")
    if not is_binary(mask):
        return ValueError("mask: wanted 0 and 1 only, found other values")
    if bool(mask.sum() < 2):
        return ValueError("mask: wanted at least two ones, found fewer")
    return None


def is_binary(mask: torch.Tensor) -> bool:
    """Tell whether a bool, int or float32 mask holds nothing but 0 and 1."""
    if mask.dtype == torch.bool or mask.numel() == 0:
        return True
    low, high = torch.aminmax(mask)
    return bool(low >= 0) and bool(high <= 1) and (mask.dtype != torch.float32 or torch.equal(mask, mask.round()))


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
    error = unsupported(values, mask)
    if error is not None:
        raise error
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
