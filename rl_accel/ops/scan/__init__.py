"""GAE and discounted returns: recurrences over time, from the last token to the first.

Each module of this package is a backend. The backend ``naive``, a token-by-token loop, is the reference for the others. Each has a
function ``scan(inputs)`` that returns (advantages, returns), or (discounted returns,) if the inputs hold no values. The results
have the dtype of the rewards.
"""

import functools
import importlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from rl_accel.errors import BackendMissing, did_you_mean
from rl_accel.ops.inputs import Inputs, check_mask_values, check_scan

BACKENDS = ("naive", "chunk", "numba", "triton")


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    *,
    cu_seqlens: torch.Tensor | None = None,
    backend: str = "auto",
    chunk_size: int | None = None,
    num_threads: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation, with verl's treatment of masked tokens and without whitening.

    The recurrence goes from the last token to the first. V is the next value, A the advantage of the next token (both
    0 after the last token), and m the mask of token t:

        candidate = rewards[t] + gamma * V - values[t] + gamma * lam * A
        V = m * values[t] + (1 - m) * V
        A = m * candidate + (1 - m) * A

    A token with mask 0 leaves V and A unchanged, so an observation or padding token gets the advantage of the token after it.

    Args:
        rewards: [B, T] float32, float64, bfloat16 or float16; [N] when packed.
        values: the critic's values; shape, dtype and device of ``rewards``.
        mask: shape and device of ``rewards``; bool, integer or float with values from 0 to 1 (1: a response token). Fractions blend
            the results for 0 and 1. None: all ones. Values outside [0, 1] raise an error on the CPU; on an accelerator, the check
            would stall the device's queue and is left out.
        gamma: discount per token, in [0, 1].
        lam: GAE's lambda, in [0, 1].
        cu_seqlens: [S + 1] int32 or int64, on any device. Packed sequence s holds tokens cu_seqlens[s] to cu_seqlens[s + 1] - 1.
            None: the tensors are not packed.
        backend: "naive", "chunk", "numba", "triton" or "auto". "auto" is numba for CPU tensors and triton for CUDA tensors; chunk
            for other devices or if the backend of the device is missing.
        chunk_size: tokens per chunk of the chunk backend; the other backends ignore this number.
        num_threads: threads of the numba backend. None: one thread for small inputs, else the usable cores, at most 16.

    Returns:
        advantages and returns (advantages + values): new contiguous tensors in the shape and dtype of ``rewards``, detached from
        autograd. In float32, the numba backend is bit-identical to verl 0.9.1's loop. NaN and inf propagate as in the loop. In half
        precision, the naive backend rounds at every step as verl's loop does; the other backends compute in float32 and round once.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, dtype, device or value; the message names the argument.
        BackendMissing: ``backend`` names a backend that cannot run here.

    Source: Schulman et al. 2016 (arXiv:1506.02438); verl/trainer/ppo/core_algos.py, compute_gae_advantage_return.
    """
    numbers = (gamma, lam, cu_seqlens, chunk_size, num_threads)
    advantages, returns = _scan(backend, check_scan(rewards, values, mask, *numbers, needs_values=True))
    return advantages, returns


def discounted_returns(
    rewards: torch.Tensor,
    mask: torch.Tensor | None = None,
    gamma: float = 1.0,
    *,
    cu_seqlens: torch.Tensor | None = None,
    backend: str = "auto",
    chunk_size: int | None = None,
    num_threads: int | None = None,
) -> torch.Tensor:
    """Discounted sums of future rewards as in verl's REINFORCE++, without whitening.

    The recurrence goes from the last token to the first. G is the running return (0 after the last token), m the mask of token t:

        candidate = rewards[t] + gamma * G
        returns[t] = m * candidate
        G = m * candidate + (1 - m) * G

    A token with mask 0 gets the return 0 and leaves G unchanged.

    Args, precision and errors: as for :func:`gae`.

    Returns a new contiguous tensor in the shape and dtype of ``rewards``, detached from autograd.

    Source: verl/trainer/ppo/core_algos.py, compute_reinforce_plus_plus_outcome_advantage.
    """
    numbers = (gamma, 1.0, cu_seqlens, chunk_size, num_threads)
    return _scan(backend, check_scan(rewards, None, mask, *numbers, needs_values=False))[0]


def cu_seqlens_of(lengths: Sequence[int]) -> torch.Tensor:
    """Returns the boundaries [S + 1] of packed sequences with these ``lengths`` [S], as a tensor on the CPU."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int64)


def gae_of_lists(
    rewards: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    gamma: float = 1.0,
    lam: float = 1.0,
    *,
    backend: str = "auto",
    chunk_size: int | None = None,
    num_threads: int | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Generalised advantage estimation of separate sequences, without padding and without a mask.

    Args:
        rewards: one tensor [T_i] per sequence, cast to the dtype of the values.
        values: one tensor [T_i] per sequence; all of one dtype and device.
        gamma, lam, backend, chunk_size, num_threads: as for :func:`gae`.

    Returns:
        Two lists, advantages and returns, each with one tensor [T_i] per sequence in the dtype of the values.

    Raises:
        TypeError, ValueError, BackendMissing: as for :func:`gae`; ValueError also for no sequences or unequal lengths.
    """
    if not values:
        raise ValueError("values wants at least one sequence, found none")
    lengths = [len(row) for row in values]
    reward_lengths = [len(row) for row in rewards]
    if reward_lengths != lengths:
        raise ValueError(f"rewards wants the lengths of values, {_shown(lengths)}, found {_shown(reward_lengths)}")
    flat = torch.cat(list(values))
    options: dict[str, Any] = {"backend": backend, "chunk_size": chunk_size, "num_threads": num_threads}
    flat_rewards = torch.cat(list(rewards)).to(flat)
    advantages, returns = gae(flat_rewards, flat, None, gamma, lam, cu_seqlens=cu_seqlens_of(lengths), **options)
    return list(torch.split(advantages, lengths)), list(torch.split(returns, lengths))


def available_backends() -> dict[str, str | None]:
    """Returns, for each backend name, None if the backend can run in this process, else the reason why it cannot."""
    return {name: _missing(name) for name in BACKENDS}


def resolve_backend(backend: str, device: torch.device | str) -> str:
    """Returns the name of the backend that is used for tensors on ``device`` if a caller asks for ``backend``, which may be "auto".

    Raises:
        ValueError: no backend has this name, or the backend does not support this device.
        BackendMissing: ``backend`` names a backend that cannot run here.
    """
    kind = torch.device(device).type
    if backend == "auto":
        preferred = {"cpu": "numba", "cuda": "triton"}.get(kind, "chunk")
        return "chunk" if _missing(preferred) else preferred
    if backend not in BACKENDS:
        hint = did_you_mean(backend, BACKENDS)
        raise ValueError(f"backend wants auto or one of {', '.join(BACKENDS)}, found {backend!r}{hint}")
    reason = _missing(backend)
    if reason is not None:
        raise BackendMissing(f"backend {backend!r} was asked for, but {reason}")
    if (backend == "numba" and kind != "cpu") or (backend == "triton" and kind != _triton_device()):
        wanted = "cpu" if backend == "numba" else _triton_device()
        raise ValueError(f"backend {backend!r} wants tensors on {wanted}, found {kind}")
    return backend


def _scan(backend: str, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    name = resolve_backend(backend, inputs.rewards.device)
    if name != "numba":  # numba checks mask values during its scan, without an extra pass
        check_mask_values(inputs.mask)
    with torch.no_grad():
        results: tuple[torch.Tensor, ...] = importlib.import_module(f"{__name__}.{name}").scan(inputs)
    return results


@functools.cache
def _missing(backend: str) -> str | None:
    if backend in ("naive", "chunk"):
        return None
    try:
        importlib.import_module(backend)
    except ModuleNotFoundError as error:
        how = "pip install numba" if backend == "numba" else "pip install triton, or the extra rl-accel[triton]"
        return f"{error.name} is not installed ({how})"
    except Exception as error:  # for example, a library built for another numpy
        return f"importing {backend} fails: {error}"
    if backend == "triton" and _triton_device() == "cuda" and not torch.cuda.is_available():
        return "there is no CUDA device (TRITON_INTERPRET=1 runs it on the CPU, slowly, for tests)"
    return None


def _triton_device() -> str:
    from rl_accel.ops.scan import triton

    return "cpu" if triton.INTERPRETED else "cuda"


def _shown(lengths: list[int]) -> str:
    more = "" if len(lengths) <= 8 else f" and {len(lengths) - 8} more"
    return f"{lengths[:8]}{more}"
