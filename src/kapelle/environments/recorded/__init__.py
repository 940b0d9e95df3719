"""Recorded answers, preferences and trajectories."""
