"""Evaluations of a team, and the results with which they are compared."""
