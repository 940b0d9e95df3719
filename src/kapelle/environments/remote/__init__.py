"""The environment `remote`: its tasks, grading and episodes live on environment servers."""

from kapelle.environments.remote.environment import Remote

__all__ = ["Remote"]
