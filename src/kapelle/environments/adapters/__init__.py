"""Adapters for environments of other libraries and for your own classes."""
