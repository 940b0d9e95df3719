"""Signals: results about sampled turns that credit and losses need before an update, one per file."""
