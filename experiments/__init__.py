"""Experiments: every algorithm's claim, as a prediction that could have failed."""
