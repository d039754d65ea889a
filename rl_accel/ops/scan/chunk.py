"""Chunk scan in plain torch: any device, masks with fractions, packed sequences, memory linear in the tokens.

The idea is the one of slime's chunk-scan GAE (THUDM/slime pull request 850): solve all chunks at once from a zero state,
then pass the state along the chunks. There the inside of a chunk is a product with a triangular matrix of powers of
gamma*lambda; a mask makes the coefficient differ from token to token, so here a chunk is walked position by position, all
chunks of all rows in one vector operation, and the pass along the chunks is the same scan again on a shorter sequence.
"""

import torch

from rl_accel.ops.inputs import Inputs, check_mask_values
from rl_accel.ops.scan import naive

DEFAULT_CHUNK = 64


def gae(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns in the dtype of the rewards; half precision is computed in float32."""
    check_mask_values(inputs.mask)
    assert inputs.values is not None
    gamma, lam, chunk_size = inputs.gamma, inputs.lam, inputs.chunk_size
    rewards, mask = _prepare(inputs.rewards, inputs.offsets), _prepare_mask(inputs)
    values = _prepare(inputs.values, inputs.offsets)
    keep = 1 - mask
    next_values = _shift(reverse_scan(_cut(keep, inputs), values * mask, chunk_size), inputs)
    terms = (rewards + gamma * next_values - values) * mask
    advantages = reverse_scan(_cut(gamma * lam * mask + keep, inputs), terms, chunk_size)
    for row, first, last in _not_finite(advantages, inputs):
        where = (slice(row, row + 1), slice(first, last))
        advantages[where] = naive.gae_rows(rewards[where], values[where], mask[where], gamma, lam)
    shape, dtype = inputs.rewards.shape, inputs.rewards.dtype
    returns = advantages + values
    return advantages.reshape(shape).to(dtype).contiguous(), returns.reshape(shape).to(dtype).contiguous()


def discounted_returns(inputs: Inputs) -> torch.Tensor:
    """Return discounted returns in the dtype of the rewards; half precision is computed in float32."""
    check_mask_values(inputs.mask)
    gamma, chunk_size = inputs.gamma, inputs.chunk_size
    rewards, mask = _prepare(inputs.rewards, inputs.offsets), _prepare_mask(inputs)
    running = reverse_scan(_cut(gamma * mask + (1 - mask), inputs), rewards * mask, chunk_size)
    returns = (rewards + gamma * _shift(running, inputs)) * mask
    for row, first, last in _not_finite(returns, inputs):
        where = (slice(row, row + 1), slice(first, last))
        returns[where] = naive.returns_rows(rewards[where], mask[where], gamma)
    return returns.reshape(inputs.rewards.shape).to(inputs.rewards.dtype).contiguous()


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


def _prepare(tensor: torch.Tensor, offsets: tuple[int, ...] | None) -> torch.Tensor:
    rows = tensor if offsets is None else tensor[None]
    return rows.to(torch.float64 if tensor.dtype is torch.float64 else torch.float32)


def _prepare_mask(inputs: Inputs) -> torch.Tensor:
    rewards = _prepare(inputs.rewards, inputs.offsets)
    if inputs.mask is None:
        return torch.ones_like(rewards, memory_format=torch.contiguous_format)
    return (inputs.mask if inputs.offsets is None else inputs.mask[None]).to(rewards.dtype)


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
