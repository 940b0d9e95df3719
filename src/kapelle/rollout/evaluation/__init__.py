"""Evaluate a team, and compute baselines for comparison."""
