"""Evaluations of a team, and the baselines to compare them with."""
