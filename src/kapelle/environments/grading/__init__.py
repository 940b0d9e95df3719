"""Graders: extract the answer from a text and decide whether it is correct, without executing any of the text."""
