"""A supervised warm-up of the base model on demonstrations by the environment's script, before training."""
