"""The policies of a league: members that are always there, slots for past selves, and who learns beside the team."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

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
"""Most adapters that a league holds beside the team's: far more than one machine samples from, few enough to be counted one by one."""


def slot_name(slot: int, policy: str) -> str:
    """Return the name of the policy that plays a past self of `policy` from a slot of the league."""
    return f"league:{slot}:{policy}"


def exploiter_name(policy: str) -> str:
    """Return the name of the policy that learns to beat `policy`."""
    return f"exploiter:{policy}"


def partner_name(partner: int, policy: str) -> str:
    """Return the name of the policy that the partner of this number learns in place of `policy` (`league.population: fcp`)."""
    return f"partner:{partner}:{policy}"


def follower_name(follower: int, policy: str) -> str:
    """Return the name of the policy that the follower of this number learns in place of `policy` (`league.population.learners`)."""
    return f"follower:{follower}:{policy}"


def added_learners(league: LeagueConfig) -> dict[str, Callable[[str], str]]:
    """Return who learns beside the team, each with how its policies are called after those at whose seats it learns."""
    exploiter = {} if league.exploiter is None else {EXPLOITER: exploiter_name}
    partners = {f"{PARTNER}{k}": partial(partner_name, k) for k in range(partners_of(league))}
    followers = {f"{FOLLOWER}{k}": partial(follower_name, k) for k in range(followers_of(league))}
    return {**exploiter, **partners, **followers}


def _member_name(member: str, policy: str) -> str:
    return f"member:{member}:{policy}" if policy else f"member:{member}"


def added_policies(
    league: LeagueConfig, config: RunConfig, learners: Mapping[str, Policy], bases: Bases
) -> dict[str, Policy]:
    """Return the policies that a league adds to the team: members, slots for past selves, further learners.

    Raises ConfigError for learners without an adapter and for more adapters than `MOST_ADAPTERS`.
    """
    for name, policy in learners.items():
        if policy.lora is None:
            raise ConfigError(
                f"`league` keeps past selves as adapters, and '{name}' trains all weights of its model. Set `team.sharing: lora`, or give "
                "agents that share weights one adapter: `weights: {adapter: player}`."
            )
    found: dict[str, Policy] = {}
    followers = followers_of(league)
    slots = min(league.slots, league.keep) if league.enter is not None else 0
    # Counted before they are made: making thousands of millions would take the machine's memory before its check is reached.
    count = (slots + partners_of(league) + 2 * followers + (league.exploiter is not None)) * len(learners)
    if count > MOST_ADAPTERS:
        asked = {
            "league.slots": slots,
            "league.population.partners": partners_of(league),
            "league.population.learners": 2 * followers,
        }
        most = max(asked, key=lambda key: asked[key])
        raise ConfigError(
            f"`{most}` asks for {asked[most]} adapters for each policy that learns, {count} with all others, and a league holds at most "
            f"{MOST_ADAPTERS} in memory. Lower it{'; the other past selves rest on the disk' if most == 'league.slots' else ''}."
        )
    for slot in range(
        slots + followers
    ):  # each learner with one behind it is met as a draft, which has a slot
        found |= {
            slot_name(slot, name): replace(policy, name=slot_name(slot, name), trained=False, rate=Rate())
            for name, policy in learners.items()
        }
    for named in added_learners(league).values():
        found |= {
            named(name): replace(policy, name=named(name), learns_for=name)
            for name, policy in learners.items()
        }
    for member, said in league.members.items():
        match said:
            case PastAdapter():
                from kapelle.models.adapters import read_lora

                for name, policy in learners.items():
                    folder = weights_of(name, said.past, f"league.members.{member}.past")
                    own = _member_name(member, name)
                    found[own] = Policy(own, policy.base, read_lora(folder), trained=False, past=str(folder))
            case OwnModel():
                frozen = AgentConfig.model_construct(name=_member_name(member, ""))
                made = policy_for(frozen, said.model_copy(update={"train": "none"}), config.team, bases)
                found[_member_name(member, "")] = replace(made, name=_member_name(member, ""))
            case EndpointConfig():
                frozen = AgentConfig.model_construct(name=_member_name(member, ""))
                found[_member_name(member, "")] = policy_for(frozen, said, config.team, bases)
            case "frozen":
                found[_member_name(member, "")] = Policy(_member_name(member, ""), BASE, None, trained=False)
    return found


def fixed_members(league: LeagueConfig, team: Team) -> list[LeagueMember]:
    """Return the members of a league that are always there, with the policies of the team map that play for them."""
    found = []
    for name, said in league.members.items():
        if isinstance(said, str) and said != "frozen":
            found.append(LeagueMember(name, kind="player", plays=said))
            continue
        own = {
            agent: _member_name(name, team.policy_of[agent] if isinstance(said, PastAdapter) else "")
            for agent in team.names
        }
        policies = {
            agent: policy if policy in team.policies else team.policy_of[agent]
            for agent, policy in own.items()
        }
        found.append(LeagueMember(name, kind="policy", policies=policies))
    return found
