"""Refresh: a verifier that pays is trained further, on answers of the team that the environment grades."""
