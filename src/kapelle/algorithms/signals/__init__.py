"""Signals compute results about sampled turns that credit and losses need before an update. Each signal has its own module."""
