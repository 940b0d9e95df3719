"""Rollout engines: whoever samples, behind one protocol."""
