"""Settings of whatever is graded between nothing and all."""

from __future__ import annotations

from kapelle.settings.base import Settings


class Graded(Settings):
    """Its episodes pay each agent a score from 0 to 1."""

    @property
    def reward_range(self) -> tuple[float, float]:
        """From nothing to all."""
        return (0.0, 1.0)
