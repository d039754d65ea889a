"""Time limits for reward executions, learned from correct executions, so that a hanging grader cannot stall a training step."""
