"""The environment `remote`: environment servers hold its tasks, grading and episodes."""

from kapelle.environments.remote.environment import Remote

__all__ = ["Remote"]
