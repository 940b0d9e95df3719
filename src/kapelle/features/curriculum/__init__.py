"""Difficulty and curriculum: which tasks a run learns from by how hard they are, and in which order."""
