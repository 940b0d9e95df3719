"""Adapters for environments of other libraries and for environment classes that users write themselves."""
