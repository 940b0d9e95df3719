"""Replay: groups of earlier steps in which some episodes succeeded and others did not are learned from again."""
