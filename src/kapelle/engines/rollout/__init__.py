"""Rollout engines: whoever samples, behind one protocol."""

from kapelle.former_names import contents_of

__getattr__ = contents_of(__name__)
