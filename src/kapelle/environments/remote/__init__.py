"""Environments that live on environment servers, played as if they were here. `docs/environment_server.md` has both sides."""

from kapelle.environments.remote.environment import Remote

__all__ = ["Remote"]
