"""Tests that verl's decoupled PPO loss (``algorithm.rollout_correction``) equals the one of AReaL on the same numbers.

AReaL (arXiv 2505.24298, equation 5): with pi the policy in training, prox that of the step's beginning, behav the one that
generated,

    J = E[ prox / behav * min( u A, clip(u, 1 - eps, 1 + eps) A ) ],   u = pi / prox,

over all tokens. Its code drops tokens whose weight prox / behav is above a cap; verl cuts weights off there, or with a threshold
"lower_upper" drops the tokens too.
"""

import math

import pytest
import torch
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config import ActorConfig

EPSILON, DUAL_CLIP, CAP = 0.2, 3.0, 5.0


@pytest.fixture(scope="module")
def batch():
    """Log-probabilities of pi, prox and behav, advantages and mask, (B, T) = (6, 40), with weights above the cap."""
    generator = torch.Generator().manual_seed(0)

    def normal(scale):
        return scale * torch.randn(6, 40, generator=generator, dtype=torch.float64)

    behav = -normal(1.0).abs() - 0.1
    prox = behav + normal(1.4)
    logp = (prox + normal(0.4)).requires_grad_()
    lengths = torch.randint(5, 41, (6, 1), generator=generator)
    return logp, prox, behav, normal(1.0), (torch.arange(40) < lengths).double()


def published(logp, prox, behav, advantages, mask, beyond_cap):
    """Return the loss token by token, from the formula. ``beyond_cap``: what becomes of a weight above the cap."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for b, t in mask.nonzero().tolist():
        advantage = advantages[b, t].item()
        ratio = (logp[b, t] - prox[b, t]).exp()
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantage)
        if advantage < 0:  # dual clip, which both have
            surrogate = torch.maximum(surrogate, torch.tensor(DUAL_CLIP * advantage, dtype=torch.float64))
        weight = math.exp(prox[b, t].item() - behav[b, t].item())
        total = total - (weight if weight <= CAP else beyond_cap) * surrogate
        count += 1
    return total / count


def of_verl(logp, prox, behav, advantages, mask, threshold):
    logged = {"old_log_prob": prox, "rollout_log_prob": behav, "response_mask": mask}
    capped = {"rollout_is": "token", "rollout_is_threshold": threshold}
    weights, kept, _ = compute_rollout_correction_and_rejection_mask(**logged, **capped)
    assert torch.equal(kept, mask)
    clip = {"clip_ratio": EPSILON, "clip_ratio_low": EPSILON, "clip_ratio_high": EPSILON, "clip_ratio_c": DUAL_CLIP}
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **clip)
    weights = {"rollout_is_weights": weights.batch["rollout_is_weights"]}
    return compute_policy_loss_vanilla(prox, logp, advantages, mask, config=config, **weights)[0]


@pytest.mark.parametrize(("threshold", "beyond_cap"), [(f"1e-9_{CAP}", 0.0), (CAP, CAP)], ids=["dropped", "cut off"])
def test_value_and_gradient_are_those_of_the_published_formula(batch, threshold, beyond_cap):
    logp, prox, behav, _, mask = batch
    above = ((prox - behav).exp() > CAP) & mask.bool()
    assert 3 < above.sum() < mask.sum() / 4
    ours, theirs = (published(*batch, beyond_cap), of_verl(*batch, threshold))
    assert theirs.item() == pytest.approx(ours.item(), rel=1e-12)
    gradients = [torch.autograd.grad(loss, logp)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0.0)
    assert bool((gradients[1][above] == 0).all()) == (beyond_cap == 0.0)


def test_with_fresh_samples_it_is_ppo(batch):
    logp, prox, _, advantages, mask = batch
    decoupled = of_verl(logp, prox, prox, advantages, mask, f"1e-9_{CAP}")
    assert decoupled.item() == pytest.approx(published(logp, prox, prox, advantages, mask, 0.0).item(), rel=1e-12)
