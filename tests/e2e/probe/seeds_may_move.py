"""Responses with a seed move as well. On the CPU platform all have one, and vLLM goes on with other tokens than without a move."""

from rl_accel.integrations.verl.balance.client import MOVABLE

MOVABLE.add("seed")
