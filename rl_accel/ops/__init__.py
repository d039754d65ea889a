"""Advantage kernels. A module's name is its algorithm and backend; :mod:`rl_accel.ops.naive` is the truth they are held to.

>>> from rl_accel.ops import gae
>>> advantages, returns = gae(rewards, values, response_mask, gamma=1.0, lam=0.95)
"""

from rl_accel.ops.dispatch import available_backends, discounted_returns, gae, resolve_backend

__all__ = ["available_backends", "discounted_returns", "gae", "resolve_backend"]
