"""The public face of the advantage kernels: which backend, and the calls themselves."""

import difflib
import functools
import importlib
from typing import Any

import torch

from rl_accel.errors import BackendMissing
from rl_accel.ops import chunk, naive
from rl_accel.ops.inputs import check, check_count, check_rate

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

    Going back in time with V the next value, A the advantage (both 0 after the last token) and m the mask of token t:

        candidate = rewards[t] + gamma * V - values[t] + gamma * lam * A
        V = m * values[t] + (1 - m) * V
        A = m * candidate + (1 - m) * A

    So a token with mask 0 (an observation, or padding) is stepped over, and its advantage is the one carried through it.

    Args:
        rewards: [B, T] float32, float64, bfloat16 or float16; [N] when packed.
        values: the critic's values; shape, dtype and device of ``rewards``.
        mask: shape and device of ``rewards``, bool, integer or float with values from 0 to 1 (1: a response token); fractions
            blend. None counts every token. On the CPU a value outside [0, 1] is refused; on an accelerator it is not looked
            for, because the answer would stall the device's queue.
        gamma: discount per token, in [0, 1].
        lam: GAE's lambda, in [0, 1].
        cu_seqlens: [S + 1] int32 or int64, on any device: packed sequence s is tokens cu_seqlens[s] to cu_seqlens[s + 1].
        backend: "auto" (numba for CPU tensors, triton for CUDA tensors, chunk where those are missing and elsewhere), or one of
            "naive", "chunk", "numba", "triton".
        chunk_size: tokens a chunk of the chunk backend; the others do not chunk.
        num_threads: threads of the numba backend; None takes the usable cores, at most 16.

    Returns:
        advantages and returns (advantages + values), new contiguous tensors in the shape and dtype of ``rewards``, detached from
        autograd. numba equals verl 0.9.1's loop bit for bit in float32, unless there are fewer sequences than threads and they
        have 16,384 tokens or more. NaN and inf spread as in the loop. In half precision naive rounds at every step as
        verl's loop does; the others compute in float32 and round once.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, dtype, device or value; the message names it.
        BackendMissing: ``backend`` was asked for by name and cannot run here.

    Source: Schulman et al. 2016 (arXiv:1506.02438); verl/trainer/ppo/core_algos.py, compute_gae_advantage_return.
    """
    inputs = check(rewards, values, mask, cu_seqlens, needs_values=True)
    gamma, lam = check_rate("gamma", gamma), check_rate("lam", lam)
    chunk_size, num_threads = check_count("chunk_size", chunk_size), check_count("num_threads", num_threads)
    backend = resolve_backend(backend, inputs.rewards.device)
    with torch.no_grad():
        if backend == "naive":
            return naive.gae(inputs, gamma, lam)
        if backend == "chunk":
            return chunk.gae(inputs, gamma, lam, chunk_size)
        if backend == "numba":
            from rl_accel.ops import scan_numba

            return scan_numba.gae(inputs, gamma, lam, num_threads)
        from rl_accel.ops import scan_triton

        return scan_triton.gae(inputs, gamma, lam)


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

    Going back in time with G the running return (0 after the last token) and m the mask of token t:

        candidate = rewards[t] + gamma * G
        returns[t] = m * candidate
        G = m * candidate + (1 - m) * G

    So a token with mask 0 gets 0, and the running return is carried through it.

    Args, precision and errors: as for :func:`gae`.

    Returns:
        A new contiguous tensor in the shape and dtype of ``rewards``, detached from autograd.

    Source: verl/trainer/ppo/core_algos.py, compute_reinforce_plus_plus_outcome_advantage.
    """
    inputs = check(rewards, None, mask, cu_seqlens, needs_values=False)
    gamma = check_rate("gamma", gamma)
    chunk_size, num_threads = check_count("chunk_size", chunk_size), check_count("num_threads", num_threads)
    backend = resolve_backend(backend, inputs.rewards.device)
    with torch.no_grad():
        if backend == "naive":
            return naive.discounted_returns(inputs, gamma)
        if backend == "chunk":
            return chunk.discounted_returns(inputs, gamma, chunk_size)
        if backend == "numba":
            from rl_accel.ops import scan_numba

            return scan_numba.discounted_returns(inputs, gamma, num_threads)
        from rl_accel.ops import scan_triton

        return scan_triton.discounted_returns(inputs, gamma)


def available_backends() -> dict[str, str | None]:
    """Return every backend's name with None if it can run in this process, else with the reason why not."""
    return {name: _missing(name) for name in BACKENDS}


def resolve_backend(backend: str, device: torch.device | str) -> str:
    """Return the backend that a call with tensors on ``device`` uses.

    Raises:
        ValueError: no backend has this name, or it does not take tensors on this device.
        BackendMissing: it was asked for by name and cannot run here.
    """
    kind = torch.device(device).type
    if backend == "auto":
        preferred = {"cpu": "numba", "cuda": "triton"}.get(kind, "chunk")
        return "chunk" if _missing(preferred) else preferred
    if backend not in BACKENDS:
        close = difflib.get_close_matches(str(backend), BACKENDS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"backend wants auto or one of {', '.join(BACKENDS)}, found {backend!r}{hint}")
    reason = _missing(backend)
    if reason is not None:
        raise BackendMissing(f"backend {backend!r} was asked for, but {reason}")
    if (backend == "numba" and kind != "cpu") or (backend == "triton" and kind != _triton_device()):
        wanted = "cpu" if backend == "numba" else _triton_device()
        raise ValueError(f"backend {backend!r} wants tensors on {wanted}, found {kind}")
    return backend


@functools.cache
def _missing(backend: str) -> str | None:
    if backend in ("naive", "chunk"):
        return None
    package: Any = backend
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        how = "pip install numba" if backend == "numba" else "pip install triton, or the extra rl-accel[triton]"
        return f"{error.name} is not installed ({how})"
    except (
        Exception
    ) as error:  # a library can fail on import in many ways, for instance with another numpy than it was built for
        return f"importing {backend} fails: {error}"
    if backend == "triton" and _triton_device() == "cuda" and not torch.cuda.is_available():
        return "there is no CUDA device (TRITON_INTERPRET=1 runs it on the CPU, slowly, for tests)"
    return None


def _triton_device() -> str:
    from rl_accel.ops import scan_triton

    return "cpu" if scan_triton.INTERPRETED else "cuda"
