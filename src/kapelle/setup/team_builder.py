"""Creates a team from settings: the weights and the critic of each agent. This module does not load any model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from kapelle.algorithm import Algorithm, row_of
from kapelle.algorithms.signals.verifier import VerifierScores
from kapelle.errors import ConfigError, did_you_mean
from kapelle.models.chat_template import PLAIN, PLAIN_END
from kapelle.rows import Beside
from kapelle.settings.checks import RunToCheck
from kapelle.settings.schema import AgentConfig, LoraConfig, RateConfig, RunConfig, TeamConfig
from kapelle.settings.weights import EndpointConfig, NamedAdapter, OwnModel, PastAdapter, PerTurn
from kapelle.setup.bases import BASE, Bases
from kapelle.setup.feature import plans_of
from kapelle.team import VERIFIER, Agent, Critic, Endpoint, Lora, Policy, Rate, Team

REWARD_BASE = "base@reward"
"""The name of the base model of a reward model that has its own device."""


def build_algorithm(config: RunConfig) -> Algorithm:
    """Return the algorithm with the additions of the run's features. Raises ConfigError if a feature is incompatible with the algorithm."""
    row = row_of(config.algorithm.name, config.algorithm.build)
    for plan in plans_of(config):
        row = plan.extend(row)
    return row


OneForAll = Literal["shared", "lora", "frozen"] | OwnModel | NamedAdapter | PastAdapter | EndpointConfig
"""The kinds of weights that an agent can use in all its turns."""


def build_team(config: RunConfig, algorithm: Algorithm, absent: list[str] | None = None) -> Team:
    """Return the team of a recipe. Raises ConfigError for contradictory settings and missing devices.

    If `absent` is given, missing devices are added to it and do not raise an error.
    """
    roles = agent_configs(config.team)
    bases = Bases(config.model, config.team, absent)
    policies: dict[str, Policy] = {}
    policy_of: dict[str, str] = {}
    turns_of: dict[str, tuple[str, ...]] = {}
    for role in roles:
        own = _policies(role, config.team, bases)
        for policy in own:
            known = policies.setdefault(policy.name, policy)
            if known != policy:
                raise ConfigError(
                    f"The settings of agent '{role.name}' for policy '{policy.name}' differ from those of an "
                    "earlier agent. Set the same `lora` and `optimizer` for both."
                )
        policy_of[role.name] = own[0].name
        if isinstance(role.weights, PerTurn):
            turns_of[role.name] = tuple(policy.name for policy in own)
    learners = {name: policies[name] for name in dict.fromkeys(policy_of.values()) if policies[name].trained}
    for plan in plans_of(config):
        policies |= plan.policies(config, learners, bases)
    critics, critic_of = _critics(config.team, roles, algorithm, policies, policy_of, bases)
    verifier = algorithm.need(VerifierScores)
    if verifier is not None:
        model = config.reward_model
        if model is not None and (model.device, model.dtype) != (None, None):
            base = REWARD_BASE
            bases.add(base, config.model.path, model.dtype, model.device, "reward_model.device")
        else:  # the verifier was trained on a frozen base model
            moving = next((p for p in policies.values() if p.base == BASE and p.trained), None)
            base = bases.frozen(BASE) if moving is None else bases.untrained(moving)
        from kapelle.models.adapters import read_lora

        refresh = verifier.refresh
        rate = Rate() if refresh is None else Rate(refresh.lr, "constant", 0)
        for name, folder in verifier.folders.items():
            lora = read_lora(Path(folder))
            critics[name] = Critic(name, base, lora, trained=refresh is not None, rate=rate)
    agents = []
    for role in roles:
        sampling = (role.sampling or config.team.sampling).build()
        if role.chat_template_kwargs and policies[policy_of[role.name]].endpoint is not None:
            raise ConfigError(
                f"Agent '{role.name}' is an endpoint, whose server renders prompts. Remove its `chat_template_kwargs`."
            )
        # The arguments in the section `model` are meant for that model's own chat template.
        shared = bases.paths.get(policies[policy_of[role.name]].base) == config.model.path
        template = config.model.chat_template if shared else None
        if template == PLAIN and PLAIN_END not in sampling.stop:
            sampling = replace(sampling, stop=(*sampling.stop, PLAIN_END))
        examples = tuple((each.user, each.assistant) for each in role.examples)
        arguments = {**(config.model.chat_template_kwargs if shared else {}), **role.chat_template_kwargs}
        agents.append(Agent(role.name, role.system, role.prompt, sampling, examples, arguments))
    team = Team(
        tuple(agents), policies, policy_of, bases.paths, critics, critic_of, turns_of, places=bases.places
    )
    for signal in algorithm.needs:
        team = signal.beside(team) if isinstance(signal, Beside) else team
    return team


def agent_configs(team: TeamConfig) -> tuple[AgentConfig, ...]:
    """Return the agents in order. If the settings give a number, that many identical agents are returned."""
    if isinstance(team.agents, int):
        if team.agents < 1:
            raise ConfigError(f"`team.agents` is {team.agents}, but a team needs at least one agent.")
        return tuple(AgentConfig(name=f"agent_{k}") for k in range(team.agents))
    return team.agents


def _policies(role: AgentConfig, team: TeamConfig, bases: Bases) -> tuple[Policy, ...]:
    """Return the policies of an agent with their learning rates: either a single policy, or one policy for each of the agent's turns."""
    weights = role.weights or team.sharing
    if isinstance(weights, PerTurn):
        listed = weights.per_turn
        # No agent's name contains "@", so these names are unique.
        names = [f"{role.name}@{k + 1}" for k in range(listed)] if isinstance(listed, int) else listed
        made = tuple(Policy(name, BASE, _lora(role.lora or team.lora)) for name in names)
    else:
        made = (policy_for(role, weights, team, bases),)
    if role.optimizer is None:
        return made
    if not all(policy.trained for policy in made):
        raise ConfigError(
            f"`optimizer` of agent '{role.name}' sets a learning rate, but the agent's weights are not "
            "trained. Remove `optimizer`."
        )
    return tuple(replace(policy, rate=_rate(role.optimizer, role.optimizer.lr)) for policy in made)


def policy_for(role: AgentConfig, weights: OneForAll, team: TeamConfig, bases: Bases) -> Policy:
    """Return the policy for the weights of an agent, and add the model that the weights specify to `bases`."""
    lora = _lora(role.lora or team.lora)
    if isinstance(weights, EndpointConfig):
        endpoint = Endpoint(weights.endpoint, weights.model, weights.api_key_env)
        return Policy(role.name, base="", trained=False, endpoint=endpoint)
    if isinstance(weights, NamedAdapter):
        return Policy(weights.adapter, BASE, lora)
    if isinstance(weights, PastAdapter):
        from kapelle.models.adapters import read_lora

        return Policy(role.name, BASE, read_lora(Path(weights.past)), past=weights.past, trained=False)
    if isinstance(weights, OwnModel):
        # A fully trained model belongs to its agent; other models are loaded once for all agents. The prefixes
        # distinguish both kinds of names from `base`.
        kind = "".join(f"@{each}" for each in (weights.dtype, weights.device) if each is not None)
        base = f"own:{role.name}" if weights.train == "full" else f"model:{weights.model}{kind}"
        setting = f"weights.device` of agent `{role.name}"
        bases.add(base, weights.model, weights.dtype, weights.device, setting)
        if weights.train == "lora":
            return Policy(role.name, base, lora)
        name = role.name if weights.train == "full" else f"frozen:{weights.model}{kind}"
        return Policy(name, base, None, trained=weights.train == "full")
    if weights == "lora":
        return Policy(role.name, BASE, lora)
    return Policy(weights, BASE, None, trained=weights == "shared")


def _critics(
    team: TeamConfig,
    roles: tuple[AgentConfig, ...],
    algorithm: Algorithm,
    policies: Mapping[str, Policy],
    policy_of: Mapping[str, str],
    bases: Bases,
) -> tuple[dict[str, Critic], dict[str, str]]:
    sharers = [role.name for role in roles if role.share_critic_with is not None]
    if algorithm.critic is None:
        if sharers or team.critic_sharing is not None:
            raise ConfigError(
                f"`{algorithm.name}` has no critics. Remove `share_critic_with` and `team.critic_sharing`."
            )
        scores = algorithm.need(VerifierScores) is not None
        if (team.critic_model is not None and not scores) or team.critic_train != "lora":
            key = "critic_train" if team.critic_train != "lora" else "critic_model"
            raise ConfigError(
                f"`{algorithm.name}` has no critics. Remove `team.{key}`, or use ppo, ippo, mappo or marft."
            )
        return {}, {}
    if algorithm.critic.everyone and team.critic_train != "lora":
        raise ConfigError(
            f"`team.critic_train` is {team.critic_train}, but `{algorithm.name}` saves its verifier as an "
            "adapter. Set it to `lora`."
        )
    if algorithm.critic.everyone:
        judge = Critic(VERIFIER, bases.frozen(BASE), _lora(team.critic_lora))
        return {VERIFIER: judge}, {role.name: VERIFIER for role in roles}
    learning = [role for role in roles if policies[policy_of[role.name]].trained]
    shared = (team.critic_sharing or algorithm.critic.sharing) == "shared"
    first = learning[0].name if learning else ""
    critics: dict[str, Critic] = {}
    critic_of: dict[str, str] = {}
    for role in learning:
        owner = _critic_owner(role, roles)  # the setting is checked even if all agents share one critic
        owner = first if shared else owner
        name = f"critic:{owner}"  # no policy can have this name
        critic_of[role.name] = name
        policy, whole = policies[policy_of[owner]], team.critic_train == "full"
        base = bases.moving(policy, name) if whole else bases.untrained(policy)
        lora = _lora(team.critic_lora) if team.critic_train == "lora" else None
        critics[name] = Critic(name, base, lora, rate=_critic_rate(owner, critic_of, roles), whole=whole)
    for name, critic in critics.items():
        read = (
            roles
            if algorithm.critic.view == "central"
            else [s for s in learning if critic_of[s.name] == name]
        )
        models = {bases.paths.get(policies[policy_of[role.name]].base) for role in read}
        critics[name] = replace(critic, reads_text=models != {bases.paths[critic.base]})
    return critics, critic_of


def _critic_owner(role: AgentConfig, roles: tuple[AgentConfig, ...]) -> str:
    names = [other.name for other in roles]
    owner, wanted = role.name, role.share_critic_with
    for _ in roles:
        if wanted is None:  # 0 is a valid index
            return owner
        if isinstance(wanted, int):
            if not 0 <= wanted < len(roles):
                raise ConfigError(
                    f"`share_critic_with` of agent '{role.name}' is {wanted}, but agents are numbered from 0 "
                    f"to {len(roles) - 1}."
                )
            wanted = names[wanted]
        if wanted not in names:
            raise ConfigError(
                f"`share_critic_with` of agent '{role.name}' is the unknown agent "
                f"'{wanted}'.{did_you_mean(wanted, names)}"
            )
        owner, wanted = wanted, roles[names.index(wanted)].share_critic_with
    if wanted is None:
        return owner
    raise ConfigError(
        f"`share_critic_with` of agent '{role.name}' leads back to the same agent. Remove one `share_critic_with` "
        "of this cycle."
    )


def _critic_rate(owner: str, critic_of: Mapping[str, str], roles: tuple[AgentConfig, ...]) -> Rate:
    """Return the learning rate of an agent's critic.

    Raises ConfigError if another agent that shares the critic sets a different rate.
    """
    of = {role.name: role.optimizer for role in roles}
    own = of[owner]
    for agent, critic in critic_of.items():
        other = of[agent]
        wanted = None if other is None else other.critic_lr
        if critic == f"critic:{owner}" and wanted not in {None, own and own.critic_lr}:
            raise ConfigError(
                f"`optimizer.critic_lr` of agent '{agent}' is {wanted:g}, but the agent uses the critic of "
                f"'{owner}'. Set it only for '{owner}'."
            )
    return Rate() if own is None else _rate(own, own.critic_lr)


def _rate(config: RateConfig, lr: float | None) -> Rate:
    return Rate(lr, config.schedule, config.warmup_steps)


def _lora(config: LoraConfig) -> Lora:
    return Lora(config.rank, config.alpha, config.targets, config.dropout)


# -------- The policies that each pool of a cluster holds (`ray.pools`)


def pools_of(config: RunConfig, team: Team) -> dict[str, tuple[str, ...]]:
    """Return the policies of each pool of sampling workers, by the name of the pool.

    Raises ConfigError for agents that cannot be in a pool.
    """
    found: dict[str, tuple[str, ...]] = {}
    held: dict[str, str] = {}
    """Mapping from the name of a base model to the pool that holds the model."""
    for pool, settings in config.ray.pools.items():
        where = f"ray.pools.{pool}.agents"
        for agent in settings.agents:
            if agent not in team.names:
                raise ConfigError(
                    f"`{where}` contains '{agent}', which is not an agent of this team.{did_you_mean(agent, team.names)}"
                )
            policy = team.policy(agent)
            if policy.endpoint is not None:
                raise ConfigError(
                    f"`{where}` contains '{agent}', which is an endpoint ({policy.endpoint.url}). Remove it "
                    "from the pool."
                )
            if held.setdefault(policy.base, pool) != pool:
                raise ConfigError(
                    f"`{where}` contains '{agent}', whose model is also in the pool '{held[policy.base]}'. "
                    "Put all agents of this model into one pool."
                )
        bases = {team.policy(agent).base for agent in settings.agents}
        left = [
            name for name in team.names if team.policy(name).base in bases and name not in settings.agents
        ]
        if left:
            raise ConfigError(
                f"`{where}` lacks '{left[0]}', which shares a model with the agents of this pool. Add it."
            )
        found[pool] = tuple(name for name, policy in team.policies.items() if policy.base in bases)
    return found


def check_pools(run: RunToCheck) -> None:
    """Raise ConfigError if an agent cannot be in its pool of sampling workers."""
    pools_of(run.config, run.team)
