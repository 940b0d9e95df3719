"""Graders, which extract the answer from a response and decide whether it is correct, without executing any of its text."""
