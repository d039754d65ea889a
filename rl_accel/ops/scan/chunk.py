"""Chunk scan in plain torch: any device, masks with fractions, packed sequences, memory linear in the tokens.

The idea is the one of slime's chunk-scan GAE (THUDM/slime pull request 850): solve all chunks at once from a zero state,
then pass the state along the chunks. There the inside of a chunk is a product with a triangular matrix of powers of
gamma*lambda; a mask makes the coefficient differ from token to token, so here a chunk is walked position by position, all
chunks of all rows in one vector operation, and the pass along the chunks is the same scan again on a shorter sequence.
"""

import torch

from rl_accel.ops.inputs import Inputs
from rl_accel.ops.scan import naive

DEFAULT_CHUNK = 64


def scan(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """Return advantages and returns, or discounted returns alone where there are no values, in the dtype of the rewards.

    Half precision is computed in float32.
    """
    gamma, lam, chunk_size = inputs.gamma, inputs.lam, inputs.chunk_size
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
    """Solve y[:, t] = terms[:, t] + coefficients[:, t] * y[:, t + 1] for [B, T] tensors, with y[:, T] = 0."""
    chunk = DEFAULT_CHUNK if chunk_size is None else max(chunk_size, 2)
    batch, tokens = terms.shape
    if tokens <= chunk:
        return _walk(coefficients.t().clone(), terms.t().clone()).t()
    chunks = -(-tokens // chunk)
    padding = (0, chunks * chunk - tokens)
    # position in the chunk comes first, so that each step of the walk reads and writes contiguous memory
    local = torch.nn.functional.pad(terms, padding).view(batch, chunks, chunk).permute(2, 0, 1).contiguous()
    decay = torch.nn.functional.pad(coefficients, padding, value=1.0).view(batch, chunks, chunk)
    decay = decay.permute(2, 0, 1).contiguous()
    _walk(decay, local)
    at_chunk_start = reverse_scan(decay[0], local[0], chunk_size)
    entering = torch.nn.functional.pad(at_chunk_start[:, 1:], (0, 1))
    local.addcmul_(decay, entering)
    return local.permute(1, 2, 0).reshape(batch, chunks * chunk)[:, :tokens]


def _walk(decay: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Scan along dim 0 in place; ``decay`` becomes the product of the coefficients from each position to the end."""
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
    """Keep the state of one packed sequence out of the sequence before it."""
    return coefficients if inputs.offsets is None else coefficients.index_fill(1, _ends(inputs), 0.0)


def _shift(states: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Move each state one token back: what token t sees of its successor; 0 at the end of a sequence."""
    shifted = torch.nn.functional.pad(states[:, 1:], (0, 1))
    return shifted if inputs.offsets is None else shifted.index_fill_(1, _ends(inputs), 0.0)


def _not_finite(results: torch.Tensor, inputs: Inputs) -> list[tuple[int, int, int]]:
    """Sequences to redo with the loop, as (row, first, last).

    A value that is not finite stays so up to the first token of its sequence, in the loop as here. But the scan multiplies
    it with the zero that separates packed sequences, and products in another order turn inf into NaN elsewhere.
    """
    segments = [(first, first + length) for first, length in inputs.segments() if length]
    if not segments:
        return []
    tokens = results.shape[1]
    firsts = torch.tensor([first for first, _ in segments], device=results.device)
    bad = (~results[firsts // tokens, firsts % tokens].isfinite()).nonzero()[:, 0].tolist()
    return [(s // tokens, s % tokens, s % tokens + (e - s)) for s, e in (segments[i] for i in bad)]
