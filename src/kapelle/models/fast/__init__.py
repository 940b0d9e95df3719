"""Fast forward passes for common model families, with the same results as the model's own pass."""
