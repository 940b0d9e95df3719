"""Fast passes for common families, with the same numbers as the model's own pass."""
