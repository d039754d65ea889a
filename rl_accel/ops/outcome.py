"""Advantages from one score a response (GRPO and its relatives), without a Python loop over responses.

Each function gives the bits that verl 0.9.1 gives (``verl/trainer/ppo/core_algos.py``) on CPU in float32 and float64.
The arithmetic of one group is the same chain of operations; it runs over all groups of equal size at once. What a group
of one response means is the framework's rule, not ours: it keeps its score as it is (mean 0, standard deviation 1).

Shapes: B responses, T tokens, R responses of a prompt group. Common arguments:

- ``token_level_rewards``: [B, T] float32 or float64, on CPU, no gradient. The score of a response is the sum over T.
- ``response_mask``: [B, T], any number type or bool; the result is multiplied by it, so it is 0 where the mask is 0.
- ``index``: [B] array of group labels (``uid`` in verl): integers, strings or objects.

All return advantages [B, T] and raise ``TypeError`` or ``ValueError``, naming the argument, for anything else.
"""

import numpy as np
import numpy.typing as npt
import torch

from rl_accel.ops.groups import LABEL_KINDS, describe, group_std, map_groups

Index = npt.NDArray[np.generic]


def unsupported(token_level_rewards: object, response_mask: object, index: object) -> Exception | None:
    """Return the error that the functions below would raise for these arguments, or None when they take them.

    A caller with a slower path that takes anything asks this first.
    """
    rewards, mask = token_level_rewards, response_mask
    if not isinstance(rewards, torch.Tensor) or rewards.dtype not in (torch.float32, torch.float64):
        return TypeError(f"token_level_rewards: wanted a float32 or float64 tensor, found {describe(rewards)}")
    if rewards.layout != torch.strided or rewards.ndim != 2 or rewards.device.type != "cpu" or rewards.requires_grad:
        return ValueError(
            f"token_level_rewards: wanted dense [B, T] on cpu without gradient, found {describe(rewards)}"
        )
    if not isinstance(mask, torch.Tensor) or mask.is_complex() or mask.layout != torch.strided:
        return TypeError(f"response_mask: wanted a dense tensor of numbers, found {describe(mask)}")
    if mask.shape != rewards.shape or mask.device != rewards.device or mask.requires_grad:
        return ValueError(
            f"response_mask: wanted {tuple(rewards.shape)} on cpu without gradient, found {describe(mask)}"
        )
    if not isinstance(index, np.ndarray) or index.dtype.kind not in LABEL_KINDS:
        return TypeError(f"index: wanted an array of integers, strings or objects, found {describe(index)}")
    if index.shape != rewards.shape[:1]:
        return ValueError(f"index: wanted one label for each of {len(rewards)} rows, found {describe(index)}")
    if torch.get_default_dtype() != torch.float32:
        return ValueError(f"torch default dtype: wanted float32, found {torch.get_default_dtype()}")
    return None


def grpo(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Index,
    epsilon: float = 1e-6,
    normalise: bool = True,
) -> torch.Tensor:
    """GRPO: (score - group mean) / (group std + epsilon); without ``normalise`` the difference alone (Dr. GRPO).

    Source: ``compute_grpo_outcome_advantage``; arXiv 2402.03300, arXiv 2503.20783.
    """

    def rule(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        alone = rows.shape[1] == 1
        centred = scores if alone else scores - scores.mean(dim=-1, keepdim=True)
        if not normalise:
            return centred
        # The framework's 1.0 of a lone response is float32 whatever the scores are; the sum is rounded there.
        std = torch.ones(len(rows)) if alone else group_std(scores)
        return centred / (std + epsilon).to(scores.dtype).unsqueeze(-1)

    return _spread(map_groups(_scores(token_level_rewards, response_mask, index), index, rule), response_mask)


def rloo(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Index) -> torch.Tensor:
    """RLOO: score minus the mean score of the other responses of the group.

    Source: ``compute_rloo_outcome_advantage``; arXiv 2402.14740.
    """

    def rule(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        size = rows.shape[1]
        if size == 1:
            return scores
        return scores * size / (size - 1) - scores.mean(dim=-1, keepdim=True) * size / (size - 1)

    return _spread(map_groups(_scores(token_level_rewards, response_mask, index), index, rule), response_mask)


def opo(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Index) -> torch.Tensor:
    """OPO: score minus the group's mean score weighted by response length (sum of the mask).

    Source: ``compute_opo_outcome_advantage``; arXiv 2505.23585.
    """
    scores = _scores(token_level_rewards, response_mask, index)
    lengths = response_mask.sum(dim=-1)

    def rule(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if rows.shape[1] == 1:
            return scores
        weights = lengths[rows]
        return scores - ((weights * scores).sum(dim=-1) / weights.sum(dim=-1)).unsqueeze(-1)

    return _spread(map_groups(scores, index, rule), response_mask)


def centred(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Index) -> torch.Tensor:
    """Score minus group mean: REINFORCE++-baseline before it whitens.

    Source: ``compute_reinforce_plus_plus_baseline_outcome_advantage``; arXiv 2501.03262.
    """
    return grpo(token_level_rewards, response_mask, index, normalise=False)


def gpg(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Index, f_norm: float = 1.0
) -> torch.Tensor:
    """GPG: alpha * (score - group mean) / f_norm, where alpha = B / number of nonzero scores.

    Source: ``compute_gpg_outcome_advantage``; arXiv 2504.02546.
    """
    scores = _scores(token_level_rewards, response_mask, index)
    alpha = len(scores) / torch.count_nonzero(scores).clamp(min=1)

    def rule(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return alpha * (scores if rows.shape[1] == 1 else scores - scores.mean(dim=-1, keepdim=True)) / f_norm

    return _spread(map_groups(scores, index, rule), response_mask)


def passk(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Index,
    epsilon: float = 1e-6,
    normalise: bool = True,
) -> torch.Tensor:
    """Pass@k: only the best response of a group counts, with best - second best (/ (group std + epsilon)).

    Source: ``compute_grpo_passk_outcome_advantage``; arXiv 2503.19595.

    Raises:
        ValueError: a group has a single response.
    """

    def rule(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if rows.shape[1] < 2:
            raise ValueError(
                f"index: Pass@k needs at least 2 responses in a group, row {int(rows[0, 0])} is alone in its"
            )
        top, best = torch.topk(scores, 2, dim=-1)
        lead = top[:, 0] - top[:, 1]
        if normalise:
            lead = lead / (group_std(scores) + epsilon)
        return torch.zeros_like(scores).scatter_(1, best[:, :1], lead.unsqueeze(-1))

    return _spread(map_groups(_scores(token_level_rewards, response_mask, index), index, rule), response_mask)


def _scores(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Index) -> torch.Tensor:
    error = unsupported(token_level_rewards, response_mask, index)
    if error is not None:
        raise error
    return token_level_rewards.sum(dim=-1)


def _spread(scores: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    if response_mask.dtype.is_floating_point:
        return scores.unsqueeze(-1) * response_mask
    # the conversion that the product would make of an integer mask becomes the result: one [B, T] buffer less
    return response_mask.to(scores.dtype).mul_(scores.unsqueeze(-1))
