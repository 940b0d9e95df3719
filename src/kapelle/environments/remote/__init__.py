"""The environment `remote`, whose tasks, graders and episodes run on environment servers."""

from kapelle.environments.remote.environment import Remote

__all__ = ["Remote"]
