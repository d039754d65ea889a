"""Advantages with the optimal token baseline (OTB), in the single-turn and the multi-turn form.

Source: ``compute_optimal_token_baseline_advantage`` and ``compute_multi_turn_optimal_token_baseline_advantage`` of verl 0.9.1
(``verl/trainer/ppo/core_algos.py``). A response has the reward-to-go G_t and the weight W_t = sum_{j<=t} (1 - 2 pi_j + sum pi^2).
The baseline of a prompt group at token t is B_t = sum(G_t W_t) / (sum(W_t) + epsilon), with sums over the responses of the group.
The advantage is G_t - B_t. In the multi-turn form, t counts only tokens with mask 1, so that turns of different length line up.

The result is bit-identical to verl's function in float32 on CPU. Two compiled passes run over the rows, with one sum per group in
between. Running sums add in float64 and round each element, as torch's ``cumsum`` does. The sum over the responses of a group is
left to torch, on a matrix of the same shape as in verl, because torch's order of addition depends on the column, the vector unit
and the number of threads.

Shapes: B responses, T tokens, R responses of a group.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from rl_accel.ops.cpu import compiled, run
from rl_accel.ops.group_advantages import group_rows
from rl_accel.ops.inputs import BINARY_MASKS, check_labels, check_rows, check_tensor, default_threads, is_binary

Rows = npt.NDArray[np.int64]

BLOCK = 2**21
"""Number of tokens processed at a time, rounded to whole prompt groups. Limits the size of the two scratch buffers."""


def optimal_token_baseline(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: npt.NDArray[np.generic],
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    *,
    multi_turn: bool = False,
    num_threads: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the advantage of each token relative to the token's variance-optimal baseline, and the reward-to-go.

    Args:
        token_level_rewards: [B, T] float32, CPU.
        response_mask: [B, T] of 0 and 1 (bool, int32, int64 or float32); 1 marks a token that the policy wrote.
        index: [B] label of the prompt group of each row.
        old_log_probs: [B, T] float32, log pi of the tokens taken.
        sum_pi_squared: [B, T] float32, sum of pi squared over the vocabulary.
        rollout_is_weights: [B, T] float32 importance weights, whose squares scale the terms of W (see the module docstring).
            None: no weights.
        handle_zero_tail: whether the baseline is 0 at tokens that only the longest response of a group reaches.
        epsilon: number added to the denominator of the baseline.
        multi_turn: whether the position of a token in a response counts only tokens with mask 1, so that turns of different
            length line up.
        num_threads: number of threads. None: the usable cores, at most 16. The result does not depend on this number.

    Returns:
        (advantages, returns), each [B, T] float32; returns is the reward-to-go.

    Raises:
        TypeError, ValueError: an argument violates the requirements above; the message names the argument.
    """
    name = "token_level_rewards"
    check_rows(name, token_level_rewards, (torch.float32,))
    check_tensor("old_log_probs", old_log_probs, (torch.float32,), like=token_level_rewards, of=name)
    check_tensor("sum_pi_squared", sum_pi_squared, (torch.float32,), like=token_level_rewards, of=name)
    if rollout_is_weights is not None:
        check_tensor("rollout_is_weights", rollout_is_weights, (torch.float32,), like=token_level_rewards, of=name)
    mask = check_tensor("response_mask", response_mask, BINARY_MASKS, like=token_level_rewards, of=name)
    if not is_binary(mask):
        raise ValueError("response_mask wants 0 and 1 only, found other values")
    check_labels(index, len(mask))
    if not isinstance(epsilon, float):
        raise TypeError(f"epsilon wants a float, found {type(epsilon).__name__}")
    threads = num_threads or default_threads()
    # exp is computed by torch, because other libraries differ in the last bit
    pi, rewards = torch.exp(old_log_probs.detach()).numpy(), token_level_rewards.detach().numpy()
    mask_array, pi_squared = mask.numpy(), sum_pi_squared.detach().numpy()
    importance = np.ones((1, 1), np.float32) if rollout_is_weights is None else rollout_is_weights.detach().numpy()
    lengths = mask.sum(dim=-1).long().numpy()
    width = int(lengths.max(initial=0)) if multi_turn else mask.shape[1]
    advantages, returns = np.empty(mask.shape, np.float32), np.empty(mask.shape, np.float32)

    groups = [line for rows in group_rows(index) for line in rows.numpy()]
    if multi_turn:
        # a response without tokens enters no group sum, but still needs a row of zeros
        groups = [kept for group in groups if len(kept := group[lengths[group] > 0])]
        groups += list(np.flatnonzero(lengths == 0).reshape(-1, 1))
    number = np.cumsum([len(group) for group in groups]) * mask.shape[1] // BLOCK
    cuts = {0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(groups)}
    for first, last in pairwise(sorted(cuts)):
        block = groups[first:last]
        rows = np.concatenate(block)
        reward, weight = np.empty((2, len(rows), width), np.float32)
        inputs = (rewards, mask_array, pi, pi_squared, importance, rollout_is_weights is not None)
        _split(threads, _forward, rows, *inputs, multi_turn, returns, reward, weight)
        baseline = _baselines(block, torch.from_numpy(reward), torch.from_numpy(weight), epsilon)
        line = np.repeat(np.arange(len(block)), [len(group) for group in block])
        end = _tails(block, lengths, width) if handle_zero_tail else np.full(len(rows), width)
        _split(threads, _subtract, rows, mask_array, returns, baseline, line, end, multi_turn, advantages)
    return torch.from_numpy(advantages), torch.from_numpy(returns)


def _split(threads: int, kernel: Callable[..., None], rows: Rows, *arguments: object) -> None:
    """Splits ``rows`` among threads. Each thread runs ``kernel(first, last, rows, *arguments)`` for its part; the kernel
    releases the interpreter lock."""
    cuts = [len(rows) * part // threads for part in range(threads + 1)]
    run([partial(kernel, i, j, rows, *arguments) for i, j in pairwise(cuts) if i < j], threads)


def _baselines(
    block: list[Rows], reward: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> npt.NDArray[np.float32]:
    baseline = torch.zeros(len(block), reward.shape[1])
    first = 0
    for line, group in zip(baseline, block, strict=True):
        last = first + len(group)
        if len(group) > 1:
            torch.div(reward[first:last].sum(dim=0), weight[first:last].sum(dim=0) + epsilon, out=line)
        first = last
    return np.asarray(baseline.numpy())


def _tails(block: list[Rows], lengths: Rows, width: int) -> Rows:
    """Returns, for each row of the block, the token position from which the baseline is 0.

    For the single longest response of a group, this position is the length of the second-longest response. For all other responses,
    this position is ``width``, so that the baseline is never set to 0.
    """
    ends = []
    for group in block:
        end = [width] * len(group)
        if len(group) > 1:
            of_group = lengths[group].tolist()
            second, longest = sorted(of_group)[-2:]
            if longest > second:
                end[of_group.index(longest)] = second
        ends += end
    return np.array(ends, np.int64)


@compiled
def _forward(  # type: ignore[no-untyped-def]
    first, last, rows, rewards, mask, pi, pi_squared, importance, weighted, multi_turn, returns, reward, weight
):
    """Writes the reward-to-go G of rows[first:last] to ``returns``. Writes G * W to ``reward`` and W to ``weight``, whose sums over
    a prompt group give the baseline (see the module docstring)."""
    tokens = rewards.shape[1]
    for k in range(first, last):
        row = rows[k]
        total = 0.0
        for t in range(tokens - 1, -1, -1):
            total += np.float64(rewards[row, t] * np.float32(mask[row, t]))
            returns[row, t] = np.float32(total)
        total = 0.0
        written = 0
        for t in range(tokens):
            m = np.float32(mask[row, t])
            energy = np.float32(1) - np.float32(2) * pi[row, t] + pi_squared[row, t]
            if weighted:
                energy = energy * (importance[row, t] * importance[row, t])
            total += np.float64(energy * m)
            w = np.float32(total)
            if not multi_turn:
                reward[k, t] = returns[row, t] * w * m
                weight[k, t] = w * m
            elif m != 0:
                reward[k, written] = returns[row, t] * w
                weight[k, written] = w
                written += 1
        if multi_turn:
            reward[k, written:] = 0
            weight[k, written:] = 0


@compiled
def _subtract(first, last, rows, mask, returns, baseline, line, end, multi_turn, advantages):  # type: ignore[no-untyped-def]
    """Writes the advantages of rows[first:last]: reward-to-go minus the baseline of the prompt group. ``end`` holds, for
    each row, the token position from which the baseline is 0."""
    for k in range(first, last):
        row, of_group, stop = rows[k], baseline[line[k]], end[k]
        position = 0
        for t in range(mask.shape[1]):
            m = np.float32(mask[row, t])
            if multi_turn and m == 0:
                advantages[row, t] = 0
                continue
            b = of_group[position] if position < stop else np.float32(0)
            advantages[row, t] = (returns[row, t] - b) * m
            position += 1
