"""Replace agents with the frozen base model when an episode is continued with a change (`Change("swap")`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kapelle.errors import ConfigError
from kapelle.rows import Beside, Learners, Sampled
from kapelle.team import Policy, Team


def substitute_name(base: str) -> str:
    """Return the name of the policy that has the initial weights of a base model."""
    return f"substitute_name:{base}"


@dataclass(frozen=True, slots=True)
class Substitute(Beside):
    """A signal that adds the base model of the trained agents, without an adapter, to the policies of a team.

    No agent uses this policy by default.
    """

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[Any, Any]]:
        """Return no results, because the policy is used during the rollout of continuations."""
        return {}

    def beside(self, team: Team) -> Team:
        """Return the team with the policy added.

        Raises ConfigError if trained agents have different base models, or if a base model itself is trained.
        """
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
