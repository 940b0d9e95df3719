"""A frozen base model that can speak in the place of agents when an episode is played on (`Change("swap")`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kapelle.errors import ConfigError
from kapelle.rows import Beside, Learners, Sampled
from kapelle.team import Policy, Team


def stand_in(base: str) -> str:
    """Return the name of the policy that is a base model as it was before training."""
    return f"stand_in:{base}"


@dataclass(frozen=True, slots=True)
class StandIn(Beside):
    """Adds the base of the trained agents to a team's policies, without an adapter; it plays no agent by itself."""

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[Any, Any]]:
        """Return nothing: continuations ask it while they are played."""
        return {}

    def beside(self, team: Team) -> Team:
        """Return the team with that policy; ConfigError if agents are trained on several bases, or a base itself is."""
        bases = list(dict.fromkeys(team.policies[name].base for name in team.trained))
        if len(bases) != 1:
            raise ConfigError(
                f"The trained agents have {len(bases)} base models, and one model has to speak for all that are absent. "
                "Train them on one base, or set `algorithm.absent: silent`."
            )
        moving = [name for name in team.trained if team.policies[name].lora is None]
        if moving:
            raise ConfigError(
                f"Policy '{moving[0]}' trains the base model itself, so that nothing of it stays as it was. Set `weights: lora`, or "
                "`algorithm.absent: silent`."
            )
        own = Policy(stand_in(bases[0]), bases[0], trained=False)
        return replace(team, policies={**team.policies, own.name: own})
