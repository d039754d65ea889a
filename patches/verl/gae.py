"""Computes verl's generalized advantage estimation (GAE) as a scan instead of a loop over tokens.

Advantages are still whitened by verl's own function. On CPU tensors, the result is bit-identical to verl's result unless
``gae.backend`` names a kernel that is not exact. On CUDA tensors, both results are equal up to float rounding. For arguments for
which equality is not proven (see :func:`_require_proven`), verl's own function is called.
"""

import time
from typing import Any

import torch

from rl_accel import ops
from rl_accel.errors import BackendMissing, PatchRefused
from rl_accel.patches.parity import PROBING, require_agreement, with_fallback
from rl_accel.patches.patch import Patch
from rl_accel.telemetry import metrics

_MODULE = "verl.trainer.ppo.core_algos"
_TIMED_COLUMNS = 32
"""Number of token columns on which verl's loop is timed. Few are enough, because all take about the same time. Chosen by hand."""
_EXACT_KERNELS = ("naive", "numba")
_PARAMS = ("token_level_rewards", "values", "response_mask", "gamma", "lam")


def _require_proven(rewards: Any, values: Any, mask: Any, gamma: Any, lam: Any) -> None:
    """Raises ValueError for empty tensors, and for types, dtypes and devices for which rl-accel may not compute what verl does."""
    if any(type(x) is not torch.Tensor for x in (rewards, values, mask)):
        raise ValueError("an argument is not a plain tensor")
    if rewards.numel() == 0 or rewards.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"rewards are {rewards.dtype} of shape {tuple(rewards.shape)}")
    if mask.dtype not in (rewards.dtype, torch.int64, torch.int32):
        raise ValueError(f"the mask is {mask.dtype}")
    if rewards.device.type not in ("cpu", "cuda"):
        raise ValueError(f"rewards are on {rewards.device}")
    if any(type(x) not in (float, int) for x in (gamma, lam)):
        raise ValueError(f"gamma is {gamma!r}, lam {lam!r}")


def _make(original: Any, settings: Any) -> Any:
    from verl.utils import torch_functional

    try:
        kernel = ops.resolve_backend(settings.backend, "cpu")  # verl computes advantages on the CPU
    except ValueError as error:
        raise PatchRefused(f"gae.backend={settings.backend}: {error}") from error
    if settings.backend == "auto" and kernel not in _EXACT_KERNELS:
        missing = ops.available_backends()["numba"]
        raise BackendMissing(f"no bit-exact kernel: {missing}; gae.backend={kernel} works, equal to float rounding")
    column_seconds: dict[tuple[int, str], float] = {}

    def compute_gae_advantage_return(
        token_level_rewards: Any, values: Any, response_mask: Any, gamma: Any, lam: Any
    ) -> Any:
        arguments = (token_level_rewards, values, response_mask, gamma, lam)
        _require_proven(*arguments)
        started = time.perf_counter()
        advantages, returns = ops.gae(
            *arguments, backend=settings.backend, chunk_size=settings.chunk_size, num_threads=settings.threads
        )
        with torch.no_grad():
            advantages = torch_functional.masked_whiten(advantages, response_mask)
        if not PROBING.get():
            metrics.put(f"gae/kernel/{ops.resolve_backend(settings.backend, values.device)}", 1)
            seconds = time.perf_counter() - started
            metrics.add("gae/seconds", seconds)
            stock = _stock_seconds(original, arguments, column_seconds)
            if stock is not None:
                metrics.add("gae/seconds_saved", stock - seconds)
        return advantages, returns

    return with_fallback(compute_gae_advantage_return, original, "gae")


def _stock_seconds(original: Any, arguments: tuple[Any, ...], known: dict[tuple[int, str], float]) -> float | None:
    """Estimates the seconds that verl's loop over tokens would take for a batch; None if the batch is too small to be timed.

    Times the loop on the first token columns only. ``known`` caches the seconds per column, by (bit length of B, device). Batches
    of similar size share an entry. ``arguments``: rewards, values and mask [B, T], gamma and lambda.
    """
    rows, tokens = arguments[0].shape
    key = rows.bit_length(), str(arguments[0].device)
    if key not in known:
        rewards, values, mask = (x[:, :_TIMED_COLUMNS] for x in arguments[:3])
        if mask.numel() < 2:
            return None
        head = (rewards, values, torch.ones_like(mask), *arguments[3:])  # whitening refuses an all-zero mask
        known[key] = min(_seconds(original, head) for _ in range(2)) / mask.shape[1]
    return known[key] * int(tokens)


def _seconds(function: Any, arguments: tuple[Any, ...]) -> float:
    device = arguments[0].device
    started = time.perf_counter()
    function(*arguments)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _probe(original: Any, replacement: Any, settings: Any) -> None:
    random = torch.Generator().manual_seed(0)
    rewards, values, noise = torch.rand(3, 7, 41, generator=random) - 0.5
    inside = torch.arange(41) < torch.tensor([41, 1, 17, 0, 40, 2, 30])[:, None]
    holes = noise < -0.3  # tool output inside a response is masked
    exact = ops.resolve_backend(settings.backend, "cpu") in _EXACT_KERNELS
    rtol, atol = (0.0, 0.0) if exact else (1e-4, 1e-5)
    # verl passes int64 masks. A probe with each further dtype would compile another kernel in every process.
    for mask in (inside.long(), (inside & ~holes).long()):
        for gamma, lam in ((1.0, 1.0), (0.99, 0.95), (1, 0.0)):
            arguments = dict(zip(_PARAMS, (rewards, values, mask, gamma, lam), strict=True))
            require_agreement(original, replacement, arguments, rtol=rtol, atol=atol)


SWITCHES = (
    Patch(
        name="verl.gae",
        target=f"{_MODULE}:compute_gae_advantage_return",
        bindings=(f"{_MODULE}:ADV_ESTIMATOR_REGISTRY[gae]",),
        supports="verl>=0.6.1",
        params=_PARAMS,
        make=_make,
        probe=_probe,
        no_seam="registered estimators get no values, gamma or lam, and register_adv_est refuses a second GAE",
        remove_when="verl's GAE is no loop over tokens, or a registered estimator gets values, gamma and lam",
    ),
)
