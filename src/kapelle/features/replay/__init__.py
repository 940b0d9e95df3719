"""Replay: train each step also on groups of earlier steps in which some episodes succeeded and others failed."""
