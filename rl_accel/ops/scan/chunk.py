"""GAE and discounted returns by a chunk scan in plain torch.

Supports any device, fractional masks and packed sequences. Memory is linear in the number of tokens.

Like slime's chunk-scan GAE (THUDM/slime pull request 850), this scan solves all chunks of tokens at once from a zero state, then
passes the state from chunk to chunk. slime multiplies a chunk by a triangular matrix of powers of gamma*lambda. Here the mask makes
the coefficients differ between tokens. Chunks are therefore walked position by position, with one vector operation for all chunks
of all rows. The pass from chunk to chunk is the same scan on a shorter sequence.
"""

import torch

from rl_accel.ops.inputs import Inputs
from rl_accel.ops.scan import naive

DEFAULT_CHUNK = 64
"""Number of tokens in a chunk: the number of steps of the walk. With fewer, there are more chunks to pass the state through."""


def scan(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Computes GAE, or discounted returns if ``inputs`` has no values. Half-precision inputs are computed in float32."""
    gamma = inputs.gamma
    lam = inputs.lam
    chunk_size = inputs.chunk_size
    rewards = _rows(inputs.rewards, inputs)
    mask = torch.ones_like(rewards) if inputs.mask is None else _rows(inputs.mask, inputs)
    values = None if inputs.values is None else _rows(inputs.values, inputs)
    keep = 1 - mask
    if values is None:
        running = reverse_scan(_cut(gamma * mask + keep, inputs), rewards * mask, chunk_size)
        results = (rewards + gamma * _shift(running, inputs)) * mask
    else:
        next_values = _shift(reverse_scan(_cut(keep, inputs), values * mask, chunk_size), inputs)
        terms = (rewards + gamma * next_values - values) * mask
        results = reverse_scan(_cut(gamma * lam * mask + keep, inputs), terms, chunk_size)
    for row, first, last in _not_finite(results, inputs):
        where = (slice(row, row + 1), slice(first, last))
        if values is None:
            results[where] = naive.returns_rows(rewards[where], mask[where], gamma)
        else:
            results[where] = naive.gae_rows(rewards[where], values[where], mask[where], gamma, lam)
    outputs = (results,) if values is None else (results, results + values)
    return tuple(out.reshape(inputs.rewards.shape).to(inputs.rewards.dtype).contiguous() for out in outputs)


def reverse_scan(coefficients: torch.Tensor, terms: torch.Tensor, chunk_size: int | None = None) -> torch.Tensor:
    """Returns y with y[:, t] = terms[:, t] + coefficients[:, t] * y[:, t + 1] and y[:, T] = 0, for [B, T] tensors.

    If T > ``chunk_size``, solves all chunks of tokens at once, each from state 0. The states at the starts of the chunks follow a
    recurrence of the same form, which this function solves by calling itself.
    """
    chunk = DEFAULT_CHUNK if chunk_size is None else max(chunk_size, 2)
    batch, tokens = terms.shape
    if tokens <= chunk:
        return _walk(coefficients.t().clone(), terms.t().clone()).t()
    chunks = -(-tokens // chunk)
    padding = (0, chunks * chunk - tokens)
    # the position in the chunk is the first dimension, so that each step of the walk reads and writes contiguous memory
    local = torch.nn.functional.pad(terms, padding).view(batch, chunks, chunk).permute(2, 0, 1).contiguous()
    decay = torch.nn.functional.pad(coefficients, padding, value=1.0).view(batch, chunks, chunk)
    decay = decay.permute(2, 0, 1).contiguous()
    _walk(decay, local)
    at_chunk_start = reverse_scan(decay[0], local[0], chunk_size)
    entering = torch.nn.functional.pad(at_chunk_start[:, 1:], (0, 1))
    local.addcmul_(decay, entering)
    return local.permute(1, 2, 0).reshape(batch, chunks * chunk)[:, :tokens]


def _walk(decay: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Computes local[i] += decay[i] * local[i + 1] in place, from the last index i of dim 0 to the first. Returns ``local``.

    Also replaces each decay[i] in place by the product decay[i] * ... * decay[-1]. If a state s, not 0, enters a chunk at its end,
    this product times s must be added to local[i].
    """
    for position in range(len(local) - 2, -1, -1):
        local[position].addcmul_(decay[position], local[position + 1])
        decay[position].mul_(decay[position + 1])
    return local


def _rows(tensor: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    rows = tensor if inputs.offsets is None else tensor[None]
    return rows.to(torch.float64 if inputs.rewards.dtype is torch.float64 else torch.float32)


def _ends(inputs: Inputs) -> torch.Tensor:
    assert inputs.offsets is not None
    ends = sorted({end - 1 for end in inputs.offsets if end > 0})
    return torch.tensor(ends, dtype=torch.int64, device=inputs.rewards.device)


def _cut(coefficients: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Returns ``coefficients`` with 0 at the last token of each packed sequence, where :func:`reverse_scan` then starts anew."""
    return coefficients if inputs.offsets is None else coefficients.index_fill(1, _ends(inputs), 0.0)


def _shift(states: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Shifts ``states`` [B, T] by one token: token t gets the state of token t + 1, and the last token of a sequence gets 0."""
    shifted = torch.nn.functional.pad(states[:, 1:], (0, 1))
    return shifted if inputs.offsets is None else shifted.index_fill_(1, _ends(inputs), 0.0)


def _not_finite(results: torch.Tensor, inputs: Inputs) -> list[tuple[int, int, int]]:
    """Returns ``(row, first token, end)`` of each sequence with NaN or inf in its results, which must be recomputed."""
    segments = [(first, first + length) for first, length in inputs.segments() if length]
    if not segments:
        return []
    tokens = results.shape[1]
    # Every NaN or inf propagates to the first token of its sequence. The chunk scan may have NaN where the token-by-token loop has
    # inf: it multiplies inf by the zeros between packed sequences, and multiplies in another order.
    firsts = torch.tensor([first for first, _ in segments], device=results.device)
    bad = (~results[firsts // tokens, firsts % tokens].isfinite()).nonzero()[:, 0].tolist()
    return [(s // tokens, s % tokens, s % tokens + (e - s)) for s, e in (segments[i] for i in bad)]
