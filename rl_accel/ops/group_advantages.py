"""Advantages from one score per response (GRPO and its relatives), without a Python loop over responses.

Results are bit-identical to verl 0.9.1 (``verl/trainer/ppo/core_algos.py``) on CPU in float32 and float64. The chain of operations
is that of verl, but each operation runs on all groups of equal size at once. In verl and here, a group of one response has mean
0 and standard deviation 1, so the score of this response stays as it is.

Shapes: B responses, T tokens, G groups of one size, R responses of a prompt group. Arguments that the functions share:

- ``token_level_rewards``: [B, T] float32 or float64, on CPU, no gradient. The score of a response is the sum over T.
- ``response_mask``: [B, T], any number type or bool; the result is multiplied by the mask.
- ``index``: [B] array of group labels (``uid`` in verl): integers, strings or objects.

All functions return advantages [B, T]. Arguments that violate these requirements raise ``TypeError`` or ``ValueError``; the message
names the argument.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from rl_accel.ops.inputs import MASKS, check_labels, check_rows, check_tensor

Index = npt.NDArray[np.generic]
Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function ``rule(scores [G, R], rows [G, R])`` that returns the advantage [G, R] of each response; ``rows`` holds row numbers
of the batch."""


def grpo(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Index,
    epsilon: float = 1e-6,
    normalise: bool = True,
) -> torch.Tensor:
    """Returns the advantages of GRPO: (score - group mean) / (group std + epsilon).

    Without ``normalise``, the advantage is score - group mean, as in Dr. GRPO and in REINFORCE++-baseline before whitening.

    Source: ``compute_grpo_outcome_advantage`` and ``compute_reinforce_plus_plus_baseline_outcome_advantage``; arXiv 2402.03300,
    arXiv 2503.20783, arXiv 2501.03262.
    """

    def rule(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        alone = rows.shape[1] == 1
        centred = scores if alone else scores - scores.mean(dim=-1, keepdim=True)
        if not normalise:
            return centred
        # verl's standard deviation of a single response is 1.0 in float32 for all scores; std + epsilon is rounded to float32.
        std = torch.ones(len(rows)) if alone else group_std(scores)
        return centred / (std + epsilon).to(scores.dtype).unsqueeze(-1)

    return _spread(_by_group(_scores(token_level_rewards, response_mask, index), index, rule), response_mask)


def rloo(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Index) -> torch.Tensor:
    """Returns the advantages of RLOO: score minus the mean score of the other responses of the prompt group.

    Source: ``compute_rloo_outcome_advantage``; arXiv 2402.14740.
    """

    def rule(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        size = rows.shape[1]
        if size == 1:
            return scores
        return scores * size / (size - 1) - scores.mean(dim=-1, keepdim=True) * size / (size - 1)

    return _spread(_by_group(_scores(token_level_rewards, response_mask, index), index, rule), response_mask)


def opo(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Index) -> torch.Tensor:
    """Returns the advantages of OPO: score minus a weighted mean score of the prompt group.

    The weight of a response is its length (sum of the mask).

    Source: ``compute_opo_outcome_advantage``; arXiv 2505.23585.
    """
    scores = _scores(token_level_rewards, response_mask, index)
    lengths = response_mask.sum(dim=-1)

    def rule(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if rows.shape[1] == 1:
            return scores
        weights = lengths[rows]
        return scores - ((weights * scores).sum(dim=-1) / weights.sum(dim=-1)).unsqueeze(-1)

    return _spread(_by_group(scores, index, rule), response_mask)


def gpg(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Index, f_norm: float = 1.0
) -> torch.Tensor:
    """Returns the advantages of GPG: alpha * (score - group mean) / f_norm, where alpha = B / number of nonzero scores.

    Source: ``compute_gpg_outcome_advantage``; arXiv 2504.02546.
    """
    scores = _scores(token_level_rewards, response_mask, index)
    alpha = len(scores) / torch.count_nonzero(scores).clamp(min=1)

    def rule(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return alpha * (scores if rows.shape[1] == 1 else scores - scores.mean(dim=-1, keepdim=True)) / f_norm

    return _spread(_by_group(scores, index, rule), response_mask)


def passk(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Index,
    epsilon: float = 1e-6,
    normalise: bool = True,
) -> torch.Tensor:
    """Returns the advantages of Pass@k: best - second-best score for the best response of a prompt group, 0 for the other
    responses.

    With ``normalise``, the advantage is divided by (group std + epsilon).

    Source: ``compute_grpo_passk_outcome_advantage``; arXiv 2503.19595.

    Raises:
        ValueError: a group has a single response.
    """

    def rule(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if rows.shape[1] < 2:
            raise ValueError(
                f"index wants at least 2 responses in a group for Pass@k, found row {int(rows[0, 0])} alone"
            )
        top, best = torch.topk(scores, 2, dim=-1)
        lead = top[:, 0] - top[:, 1]
        if normalise:
            lead = lead / (group_std(scores) + epsilon)
        return torch.zeros_like(scores).scatter_(1, best[:, :1], lead.unsqueeze(-1))

    return _spread(_by_group(_scores(token_level_rewards, response_mask, index), index, rule), response_mask)


def group_rows(index: Index) -> list[torch.Tensor]:
    """Returns the row numbers of each prompt group in ``index`` [B], with one tensor for all groups of equal size.

    Returns:
        One int64 tensor [G, R] per group size R, in ascending order of R. Each line holds the row numbers of one group in batch
        order. The lines are in the order in which the groups first appear in the batch.

    Raises:
        TypeError: a label is not hashable.
    """
    numbers: dict[object, int] = {}
    ids = np.fromiter((numbers.setdefault(label, len(numbers)) for label in index.tolist()), np.int64, len(index))
    counts = np.bincount(ids, minlength=len(numbers))
    by_group = np.argsort(ids, kind="stable")
    starts = np.cumsum(counts) - counts
    return [
        torch.from_numpy(by_group[starts[counts == size][:, None] + np.arange(size)])
        for size in np.unique(counts).tolist()
    ]


def group_std(scores: torch.Tensor) -> torch.Tensor:
    """Returns the unbiased standard deviation [G] of each line of ``scores`` ([G, R], R >= 2, float32 or float64, CPU).

    The result is bit-identical to ``torch.std`` of each line alone. ``torch.std`` makes two passes in float64 over a vector, but
    uses Welford's algorithm with ``dim=-1`` on a matrix, and the results of the two algorithms differ in the last bits. This
    function makes the two passes for all groups at once, in the same order of addition.
    """
    groups, size = scores.shape
    if groups < size:
        return torch.stack([torch.std(line) for line in scores])
    values = scores.double().numpy()
    mean = scores.mean(dim=-1).double().numpy()
    total = np.zeros(groups)
    with np.errstate(invalid="ignore", over="ignore"):
        for position in range(size):
            deviation = values[:, position] - mean
            total += deviation * deviation
        # numpy's square root is correctly rounded; torch's vectorised square root is not.
        return torch.from_numpy(np.sqrt(total / (size - 1))).to(scores.dtype)


def _scores(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Index) -> torch.Tensor:
    name = "token_level_rewards"
    rewards = check_rows(name, token_level_rewards, (torch.float32, torch.float64), gradient=False)
    check_tensor("response_mask", response_mask, MASKS, like=rewards, of=name, gradient=False)
    check_labels(index, len(rewards))
    if torch.get_default_dtype() != torch.float32:
        raise ValueError(f"torch's default dtype wants to be float32, found {torch.get_default_dtype()}")
    return rewards.sum(dim=-1)


def _by_group(scores: torch.Tensor, index: Index, rule: Rule) -> torch.Tensor:
    out = torch.empty_like(scores)
    for rows in group_rows(index):
        out[rows] = rule(scores[rows], rows).to(out.dtype)
    return out


def _spread(scores: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    if response_mask.dtype.is_floating_point:
        return scores.unsqueeze(-1) * response_mask
    # the product would convert an integer mask anyway, and multiplying the converted mask in place saves a [B, T] buffer
    return response_mask.to(scores.dtype).mul_(scores.unsqueeze(-1))
