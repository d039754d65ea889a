"""Tensor-parallel size of the rollout (GPUs that share one copy of the model): possible sizes, and when to change the size."""
