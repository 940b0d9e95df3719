"""What settings are: the base of every configurable piece, the schema of a run, and what a wrong one is told."""
