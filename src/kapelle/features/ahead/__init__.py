"""Rollouts ahead of the update: samples of older weights, sampling in another process, groups that a later step finishes."""
