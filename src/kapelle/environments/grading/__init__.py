"""Graders: what a text answered, and whether that is right, without executing any of it."""
