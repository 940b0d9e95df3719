"""Servers that score answers: a verifier or a reward model, offered to training runs and other programs."""
