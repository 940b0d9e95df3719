"""The frozen base model as a replacement for agents when an episode is continued with a change (`Change("swap")`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kapelle.errors import ConfigError
from kapelle.rows import Beside, Learners, Sampled
from kapelle.team import Policy, Team


def substitute_name(base: str) -> str:
    """Return the name of the policy with a base model's initial weights."""
    return f"substitute_name:{base}"


@dataclass(frozen=True, slots=True)
class Substitute(Beside):
    """Signal that adds the trained agents' base, without an adapter, to a team's policies; it acts for no agent by itself."""

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[Any, Any]]:
        """Return no results: continuations use the policy during the rollout."""
        return {}

    def beside(self, team: Team) -> Team:
        """Return the team with that policy; ConfigError if several bases have trained agents, or a base itself is trained."""
        bases = list(dict.fromkeys(team.policies[name].base for name in team.trained))
        if len(bases) != 1:
            raise ConfigError(
                f"The trained agents have {len(bases)} base models, but `algorithm.absent: reference` needs one common "
                "base. Use one base model for all agents, or set `algorithm.absent: silent`."
            )
        moving = [name for name in team.trained if team.policies[name].lora is None]
        if moving:
            raise ConfigError(
                f"Policy '{moving[0]}' trains the base model itself, so its initial weights are not kept. Set `weights: lora`, "
                "or `algorithm.absent: silent`."
            )
        own = Policy(substitute_name(bases[0]), bases[0], trained=False)
        return replace(team, policies={**team.policies, own.name: own})
