"""Trials of verl's own functions on random data, which measure what a configuration key alone does not tell."""

import inspect
from typing import Any

import numpy as np
import torch

_GROUPS = (0.0, 1.0, None)
"""Rewards of the prompt groups of :func:`gives_zero_advantages`. None: the rewards of the group differ."""


def gives_zero_advantages(algorithm: Any, group_size: int, with_kl: bool = False) -> bool:
    """Returns whether verl's advantage estimator gives a response the advantage 0 if all rewards of its group are equal.

    Calls the estimator with three random groups. Returns True if the estimator is not registered in this process or cannot be
    called, because nothing is known then.

    Args:
        algorithm: section ``algorithm`` of verl's configuration.
        group_size: number of responses of a prompt.
        with_kl: subtracts a KL penalty from the reward of each token, as verl does with ``algorithm.use_kl_in_reward``.
    """
    from verl.trainer.ppo import core_algos

    rows = group_size * len(_GROUPS)
    lengths = 2 + torch.arange(rows)
    columns = torch.arange(int(lengths.max()))
    mask = (columns < lengths[:, None]).long()
    random = torch.Generator().manual_seed(0)

    def noise() -> torch.Tensor:
        return torch.rand(mask.shape, generator=random) * mask

    scores = [float(row % 2) if reward is None else reward for reward in _GROUPS for row in range(group_size)]
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(rows), lengths - 1] = torch.tensor(scores)
    if with_kl:
        rewards -= 0.1 * noise()
    index = np.repeat(np.array([f"prompt {number}" for number in range(len(_GROUPS))], dtype=object), group_size)
    given = {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "index": index,
        "config": algorithm,
        "values": noise(),
        "gamma": float(algorithm.get("gamma", 1.0)),
        "lam": float(algorithm.get("lam", 1.0)),
        "norm_adv_by_std_in_grpo": algorithm.get("norm_adv_by_std_in_grpo", True),
        "reward_baselines": torch.tensor(scores),
        "old_log_probs": -noise(),
        "sum_pi_squared": noise(),
    }
    try:
        estimator = inspect.unwrap(core_algos.get_adv_estimator_fn(algorithm.get("adv_estimator")))
        known = inspect.signature(estimator).parameters
        advantages, _ = estimator(**{name: value for name, value in given.items() if name in known})
    except Exception:  # an estimator of the user's own may need other data
        return True
    return bool((~advantages.any(dim=1)).any())
