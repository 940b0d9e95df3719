"""Graders: extract the answer of a text and decide whether it is correct, without executing any of it."""
