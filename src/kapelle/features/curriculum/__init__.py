"""Difficulty and curriculum: which tasks a run is trained on according to their difficulty, and in which order."""
