"""Rollouts ahead of the update: samples of older weights, sampling in another process, and groups that a later step finishes."""
