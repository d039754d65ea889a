"""Tensor-parallel size of the rollout engine (number of GPUs that share one copy of the model): possible sizes and changes."""
