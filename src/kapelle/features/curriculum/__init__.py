"""Difficulty and curriculum: select the tasks that a run is trained on by their difficulty, and order them by difficulty."""
