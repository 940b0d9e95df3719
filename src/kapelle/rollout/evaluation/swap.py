"""The swap test of AT-GRPO (arXiv:2510.11062): evaluate a team whose roles act with one another's weights.

Each role keeps its prompts, its sampling settings and its place in the workflow, and acts with the weights of the next agent in
team order; the last role acts with the weights of the first. Two agents thus exchange their weights. Agents with the same weights
count as one. If success falls, the weights are specialised for their roles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from kapelle.errors import ConfigError
from kapelle.functional.statistics import mean_interval
from kapelle.rollout.evaluation.evaluate import Evaluation
from kapelle.rollout.setup import RolloutSetup
from kapelle.rows import agent_renderer
from kapelle.types import Group, Message

PROBE = (Message("system", "Answer."), Message("user", "1+1"))
"""A conversation that two models must convert to the same tokens if they can exchange roles."""


@dataclass(frozen=True, slots=True)
class Swap:
    """The results of a team whose roles have exchanged their weights."""

    acts_with: Mapping[str, str]
    """Mapping from each role to the agent whose weights it acted with."""
    result: Evaluation
    change: float | None
    """Mean over problems of the success after the exchange minus the success before it, or None if no problem has both."""
    interval: tuple[float, float] | None
    """The 95 % confidence interval of `change` (Student's t over the differences of the problems), or None below two problems."""

    def row(self) -> dict[str, Any]:
        """Return the results as a JSON object."""
        interval = None if self.interval is None else list(self.interval)
        return {
            **self.result.row(),
            "acts_with": dict(self.acts_with),
            "change": self.change,
            "change_interval": interval,
        }


def swapped(setup: RolloutSetup) -> tuple[RolloutSetup, Mapping[str, str]]:
    """Return a copy of the rollout setup with exchanged weights, and a mapping from each role to the agent whose weights it has.

    Raises ConfigError if all agents have the same weights, or if a role's prompt differs between its own model and the new one.
    """
    team, engine = setup.team, setup.engine
    weights = {name: team.turns_of.get(name, (team.policy_of[name],)) for name in team.names}
    owners = {own: name for name, own in reversed(weights.items())}  # the first agent with these weights
    order = list(dict.fromkeys(weights.values()))
    if len(order) == 1:
        raise ConfigError(
            f"--swap: all agents of the team ({', '.join(team.names)}) have the same weights, so there is nothing to exchange. "
            "Evaluate a team with `team.sharing: lora`, or with a model for each agent."
        )
    following = dict(zip(order, [*order[1:], order[0]], strict=True))
    acts_with: dict[str, str] = {}
    for name in team.names:
        new = following[weights[name]]
        acts_with[name] = other = owners[new]
        for own, policy in ((name, weights[name][0]), (other, new[0])):
            if team.policies[policy].endpoint is not None:
                raise ConfigError(
                    f"--swap: agent '{own}' is served by an endpoint, whose weights cannot act for other agents. "
                    "Remove --swap, or evaluate a team of local models."
                )
        tokens = [
            agent_renderer(team[name], engine.renderer(policy)).start(PROBE)
            for policy in (weights[name][0], new[0])
        ]
        if tokens[0] != tokens[1]:
            raise ConfigError(
                f"--swap: the models of agents '{name}' and '{other}' convert the same prompt to different tokens, so an "
                "exchange would compare the models and not their roles. Evaluate a team whose agents have the same base model."
            )
    new_weights = {name: following[own] for name, own in weights.items()}
    changed = replace(
        team,
        policy_of={name: own[0] for name, own in new_weights.items()},
        turns_of={name: own for name, own in new_weights.items() if len(own) > 1},
        critic_of={},
    )
    return replace(setup, team=changed), acts_with


def compare_swap(before: Evaluation, after: Evaluation, acts_with: Mapping[str, str]) -> Swap:
    """Return the results after an exchange, with the change against the evaluation `before` on the same problems."""
    pairs = [
        (own, other)
        for one, changed in zip(before.groups, after.groups, strict=True)
        if (own := _success(one)) is not None and (other := _success(changed)) is not None
    ]
    changes = [other - own for own, other in pairs]
    return Swap(acts_with, after, fmean(changes) if changes else None, mean_interval(changes))


def _success(group: Group) -> float | None:
    scores = [episode.success for episode in group.valid if episode.success is not None]
    return fmean(scores) if scores else None
