"""Create the policies of a league: permanent members, slots for past selves, and additional learners."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from kapelle.errors import ConfigError
from kapelle.features.league.pool import EXPLOITER, FOLLOWER, PARTNER, LeagueMember, followers_of, partners_of
from kapelle.features.league.settings import LeagueConfig
from kapelle.runs.named_checkpoint import weights_of
from kapelle.settings.schema import AgentConfig, RunConfig
from kapelle.settings.weights import EndpointConfig, OwnModel, PastAdapter
from kapelle.setup.bases import BASE, Bases
from kapelle.setup.team_builder import policy_for
from kapelle.team import Policy, Rate, Team

MOST_ADAPTERS = 10_000
"""Maximum number of adapters of a league, which is far more than a machine can hold."""


def slot_name(slot: int, policy: str) -> str:
    """Return the name of the policy that acts as a past self of `policy` in a slot of the league."""
    return f"league:{slot}:{policy}"


def added_learners(league: LeagueConfig) -> dict[str, Callable[[str], str]]:
    """Return the additional learners, each with a function that maps the name of a team policy to the name of the learner's policy."""
    names = [EXPLOITER] if league.exploiter is not None else []
    names += [f"{PARTNER}{k}" for k in range(partners_of(league))]
    names += [f"{FOLLOWER}{k}" for k in range(followers_of(league))]
    return {name: f"{name.replace('_', ':')}:{{}}".format for name in names}


def _member_name(member: str, policy: str) -> str:
    return f"member:{member}:{policy}" if policy else f"member:{member}"


def added_policies(
    league: LeagueConfig, config: RunConfig, learners: Mapping[str, Policy], bases: Bases
) -> dict[str, Policy]:
    """Return the policies that a league adds to the team: members, slots for past selves, and additional learners.

    Raises ConfigError if a learner has no adapter, or if there are more than `MOST_ADAPTERS` adapters.
    """
    for name, policy in learners.items():
        if policy.lora is None:
            raise ConfigError(
                f"`league` keeps past selves as adapters, but '{name}' trains all weights of its model. Set `team.sharing: lora`, or give "
                "agents that share weights one adapter: `weights: {adapter: player}`."
            )
    found: dict[str, Policy] = {}
    followers = followers_of(league)
    slots = min(league.slots, league.keep) if league.enter is not None else 0
    # Checked before the adapters are created, because creating them would fill the machine's memory.
    count = (slots + partners_of(league) + 2 * followers + (league.exploiter is not None)) * len(learners)
    if count > MOST_ADAPTERS:
        raise ConfigError(
            f"`league` has {count} adapters in memory, more than {MOST_ADAPTERS}. Lower `league.slots` (other past selves are on the "
            "disk), or the partners or learners of `league.population`."
        )
    for slot in range(
        slots + followers
    ):  # the draft of each learner that is followed by another one has a slot
        found |= {
            slot_name(slot, name): replace(policy, name=slot_name(slot, name), trained=False, rate=Rate())
            for name, policy in learners.items()
        }
    for named in added_learners(league).values():
        found |= {
            named(name): replace(policy, name=named(name), learns_for=name)
            for name, policy in learners.items()
        }
    for member, weights in league.members.items():
        match weights:
            case PastAdapter():
                from kapelle.models.adapters import read_lora

                for name, policy in learners.items():
                    folder = weights_of(name, weights.past, f"league.members.{member}.past")
                    own = _member_name(member, name)
                    found[own] = Policy(own, policy.base, read_lora(folder), trained=False, past=str(folder))
            case OwnModel():
                frozen = AgentConfig.model_construct(name=_member_name(member, ""))
                made = policy_for(frozen, weights.model_copy(update={"train": "none"}), config.team, bases)
                found[_member_name(member, "")] = replace(made, name=_member_name(member, ""))
            case EndpointConfig():
                frozen = AgentConfig.model_construct(name=_member_name(member, ""))
                found[_member_name(member, "")] = policy_for(frozen, weights, config.team, bases)
            case "frozen":
                found[_member_name(member, "")] = Policy(_member_name(member, ""), BASE, None, trained=False)
    return found


def fixed_members(league: LeagueConfig, team: Team) -> list[LeagueMember]:
    """Return the permanent members of a league, with the policies of the team map that act for them."""
    found = []
    for name, weights in league.members.items():
        if isinstance(weights, str) and weights != "frozen":
            found.append(LeagueMember(name, kind="player", player=weights))
            continue
        own = {
            agent: _member_name(name, team.policy_of[agent] if isinstance(weights, PastAdapter) else "")
            for agent in team.names
        }
        policies = {
            agent: policy if policy in team.policies else team.policy_of[agent]
            for agent, policy in own.items()
        }
        found.append(LeagueMember(name, kind="policy", policies=policies))
    return found
