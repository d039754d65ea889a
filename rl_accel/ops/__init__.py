"""Kernels that compute advantages. Each operator is one module; an operator with several backends has one module per backend.

>>> from rl_accel.ops import gae
>>> advantages, returns = gae(rewards, values, response_mask, gamma=1.0, lam=0.95)
"""

from rl_accel.ops.scan import available_backends, discounted_returns, gae, gae_of_lists, resolve_backend

__all__ = ["available_backends", "discounted_returns", "gae", "gae_of_lists", "resolve_backend"]
