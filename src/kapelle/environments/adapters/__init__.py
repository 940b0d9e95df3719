"""Environments of other libraries and classes of your own."""
