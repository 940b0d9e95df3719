"""Supervised warm-up of the base model on demonstrations by the environment's scripted expert, before training."""
