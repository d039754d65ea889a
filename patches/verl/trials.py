"""Trials of verl's own functions on random data, which measure what a configuration key alone does not tell."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from rl_accel.errors import PatchRefused, refuse
from rl_accel.patches import upstream

LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
"""Key of verl's policy loss."""
LENGTHS = (1, 9, 33, 17, 40, 5, 12, 64)
"""Lengths in tokens of the 8 random responses of :func:`random_batch`. Chosen by hand."""
ZERO_ROWS = (0, 3, 7)
"""Indices in ``LENGTHS`` of the responses that get advantage 0: the first, one in the middle, and the last."""
_PROMPT = 3  # tokens of each random prompt
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


def random_batch(random: torch.Generator, distance: float | None) -> dict[str, list[torch.Tensor]]:
    """Returns a random batch, as a mapping from field name to a list with one tensor per row (response).

    Shapes for a response of T tokens: [_PROMPT + T] for the model's outputs ``log_probs`` and ``entropy``, [_PROMPT] for
    ``prompts``, and [T] for other fields. ``distance`` is the standard deviation of
    old minus new log-probabilities; None: both are drawn independently, and differ so much that losses clip.
    """
    batch: dict[str, list[torch.Tensor]] = {}
    for row, length in enumerate(LENGTHS):
        mask = torch.rand(length, generator=random) < 0.8
        mask[0] = True
        # Advantages of masked tokens are 0 in verl; large values let losses clip, and choose tokens by their covariance.
        advantages = 3 * torch.randn((), generator=random) * mask * (row not in ZERO_ROWS)
        fields = {
            "prompts": torch.ones(_PROMPT, dtype=torch.long),
            "responses": torch.ones(length, dtype=torch.long),
            "response_mask": mask.long(),
            "advantages": advantages,
            **{name: -3 * torch.rand(length, generator=random) for name in ("old_log_probs", "ref_log_prob")},
            "rollout_is_weights": 0.5 + torch.rand(length, generator=random),
            "log_probs": -3 * torch.rand(_PROMPT + length, generator=random),
            "entropy": torch.rand(_PROMPT + length, generator=random),
        }
        if distance is not None:  # the model's output at a token is for the token after it
            noise = distance * torch.randn(length, generator=random)
            fields["old_log_probs"] = fields["log_probs"][_PROMPT - 1 : -1] + noise
        for name, value in fields.items():
            batch.setdefault(name, []).append(value)
    return batch


def gradients(loss_function: Any, batch: dict[str, list[torch.Tensor]], rows: Any) -> dict[int, torch.Tensor]:
    """Returns the gradients of the loss of ``rows`` with respect to the model's outputs ``log_probs`` and ``entropy``, by row.

    The gradients of a row with T response tokens are a tensor [2, _PROMPT + T]. The loss is normalised by the size of ``batch``,
    not by that of ``rows``.
    """
    from verl.utils import tensordict_utils as tu

    chosen = {name: [values[row] for row in rows] for name, values in batch.items()}
    outputs = {name: [value.requires_grad_() for value in chosen.pop(name)] for name in ("log_probs", "entropy")}
    nested = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    tokens = int(sum(mask.sum() for mask in batch["response_mask"]))
    constants = {"dp_size": 2, "batch_num_tokens": tokens, "global_batch_size": len(LENGTHS)}
    data = tu.get_tensordict({name: nested(values) for name, values in chosen.items()}, constants)
    with torch.enable_grad():
        model_output = {name: nested(values) for name, values in outputs.items()}
        loss, _ = loss_function(model_output=model_output, data=data, dp_group=None)
        leaves = [value for values in outputs.values() for value in values]
        of_leaves = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return {row: torch.stack(of_leaves[n :: len(rows)]) for n, row in enumerate(rows)}


def find_jump(loss_function: Callable[..., Any]) -> str:
    """Returns the reason why old log-probabilities that equal the new ones train otherwise than ones a rounding apart, or "".

    Computes gradients for random batches twice: with old log-probabilities equal to the new ones, and 1e-6 apart. ``loss_function``
    is verl's, with its configuration, and takes ``model_output``, ``data`` and ``dp_group``.
    """
    rows = range(len(LENGTHS))
    try:
        for seed in range(3):
            with torch.random.fork_rng(devices=[]):
                of_distance = {}
                for distance in (0.0, 1e-6):
                    torch.default_generator.manual_seed(seed)
                    batch = random_batch(torch.Generator().manual_seed(seed), distance)
                    of_distance[distance] = gradients(loss_function, batch, rows)
            for row in rows:
                equal, apart = (of_distance[distance][row] for distance in (0.0, 1e-6))
                if not torch.allclose(equal, apart, rtol=1e-3, atol=1e-6):
                    return "its gradient jumps where old and new log-probabilities are equal"
    except Exception as error:  # an unknown loss function may need data that the trial lacks
        return f"it cannot be tried: {type(error).__name__}: {error}"
    return ""


def loss_of(run: Any) -> Callable[..., Any] | None:
    """Returns verl's loss for the actor of ``run``; None if this process does not know it, or verl's workers will refuse it."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss

    if run.get(LOSS_MODE, "vanilla") not in POLICY_LOSS_REGISTRY:
        return None
    try:
        config = omega_conf_to_dataclass(run.get("actor_rollout_ref.actor"))
    except Exception:  # verl's workers refuse this configuration, with a better message
        return None
    return functools.partial(ppo_loss, config=config)


def config_and_mode(loss_function: Any) -> tuple[Any, Any]:
    """Returns the actor's configuration and ``loss_mode`` that verl's ``loss_function`` uses; None where unknown."""
    config = getattr(loss_function, "keywords", {}).get("config")
    return config, getattr(getattr(config, "policy_loss", None), "loss_mode", None)


def require_verls(loss_function: Any, flag: str) -> None:
    """Raises ConfigError unless verl itself defines the loss. A user's loss may have a state, which a test call could change."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    _, mode = config_and_mode(loss_function)
    policy_loss = [POLICY_LOSS_REGISTRY[mode]] if mode in POLICY_LOSS_REGISTRY else []
    for function in (getattr(loss_function, "func", loss_function), *policy_loss):
        try:
            upstream.require_own(function, "verl:the loss")
        except PatchRefused:
            reason = f"a trial would change the state of a loss that has one; {flag}.enable=True tries it"
            refuse(flag, LOSS_MODE, "a loss of verl's own", mode or upstream.describe(function), reason)


def random_parts(model: torch.nn.Module) -> Iterator[str]:
    """Yields the parts of ``model`` that draw random numbers in training: dropout, and noise of expert routers."""
    for module in model.modules():
        for name, value in vars(module).items():
            is_rate = "drop" in name or "jitter" in name or (name == "p" and "Dropout" in type(module).__name__)
            if is_rate and isinstance(value, float) and value > 0:
                yield f"{type(module).__name__}.{name} = {value}"
