"""Servers that score answers with a verifier or a reward model, for training runs and other programs."""
