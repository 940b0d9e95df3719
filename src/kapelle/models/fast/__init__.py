"""Fast passes for common families, with the same results as the model's own pass."""
