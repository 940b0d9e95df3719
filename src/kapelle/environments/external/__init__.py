"""Episodes that an outside program plays: it calls the agents over HTTP and posts their reward."""

from kapelle.environments.external.environment import External

__all__ = ["External"]
