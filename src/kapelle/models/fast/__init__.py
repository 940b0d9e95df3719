"""Fast passes for common families; every number as in the model's own pass."""
