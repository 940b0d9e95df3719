"""Replay: a step trains on groups of earlier steps in which some episodes succeeded and others did not."""
