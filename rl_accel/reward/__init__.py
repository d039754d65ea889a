"""Rewards that cannot stall a step: how long an execution may take, learned from those that were correct."""
