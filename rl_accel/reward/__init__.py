"""Rewards that cannot stall a step: time limits of executions, learned from correct executions."""
