"""Rewards for planners that call other agents in parallel, which are annealed to 0, and the metrics of their calls."""
