"""How many GPUs share one copy of the model during rollout: which tensor-parallel sizes are possible, and when to change."""
