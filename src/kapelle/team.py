"""Data types for a team, which maps agents to weights and thereby determines sampling, training, saving and serving.

An `Agent` is a role in a workflow. A `Policy` is a set of weights. The map supports shared weights, one LoRA adapter per agent,
different models, frozen agents and remote endpoints. Other modules do not depend on how weights are shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from kapelle.errors import ConfigError, did_you_mean
from kapelle.types import Json, Sampling

VERIFIER = "judge:verifier"
"""Name of the critic that evaluates answers. Agents and policies cannot use this name."""

EMBEDDER = "judge:embedder"
"""Name of the base model and of the learner of a separate embedding model, which does not act for any agent."""


def embedder_name(policy: str) -> str:
    """Return the name under which the frozen base model of a policy computes embeddings."""
    return f"embedder:{policy}"


def reference_name(policy: str) -> str:
    """Return the name under which the frozen reference of a policy is stored and computes log-probs."""
    return f"reference:{policy}"


@dataclass(frozen=True, slots=True)
class Agent:
    """A role in a workflow, with a name, prompts and sampling settings."""

    name: str
    system: str | None = None
    """System message at the start of the agent's conversation."""
    prompt: str | None = None
    """Template of the agent's user message, with `{question}` and the names of other agents in braces. If None, the default prompt of the
    workflow is used."""
    sampling: Sampling = Sampling()
    examples: tuple[tuple[str, str], ...] = ()
    """Few-shot examples: pairs of a user message and the agent's answer, which the agent reads before its task."""
    chat_template_kwargs: Mapping[str, Json] = field(default_factory=dict, hash=False)
    """Arguments of the chat template of the agent's model, such as `enable_thinking`."""


ALL_LINEAR = "all-linear"
"""Name that selects every linear layer in the decoder blocks to which an adapter can be added."""


@dataclass(frozen=True, slots=True)
class Lora:
    """Settings of a low-rank adapter (LoRA, arXiv:2106.09685), which changes a weight matrix to W + (alpha / rank) · B·A."""

    rank: int = 16
    """The rank r of the adapter, which is the inner dimension of the product B·A."""
    alpha: float = 32.0
    """Scaling factor alpha of the adapter."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Names of the linear layers with an adapter, as in `target_modules` of PEFT, or `all-linear`, which selects the layers by a rule for
    each architecture (`models/adapters.py`)."""
    dropout: float = 0.0
    """Dropout probability of the adapter's inputs during training."""
    fan_in_fan_out: bool = field(default=False, compare=False)
    """Whether the layers store weights in the shape (in, out), as in GPT-2. The function `adapters.named` sets this field for PEFT."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server that acts for a frozen agent."""

    url: str
    model: str
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable with the API key. The key itself is never stored."""


@dataclass(frozen=True, slots=True)
class Place:
    """The device and the data type of a base model."""

    dtype: str = "float32"
    device: str | None = None
    """Name of the device. If None, the device is `cuda` if a GPU is available, or else `cpu`."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A learning rate and its schedule. If a field is None, the value of the run's `optimizer` section is used."""

    lr: float | None = None
    schedule: str | None = None
    warmup_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """A set of weights: a base model with or without an adapter, or a remote endpoint."""

    name: str
    base: str = "base"
    """Key of the base model in `Team.bases`. The key is empty for endpoints and scripts."""
    lora: Lora | None = None
    """Settings of the adapter. If None, the policy uses the weights of the base model without an adapter."""
    trained: bool = True
    endpoint: Endpoint | None = None
    past: str | None = None
    """PEFT folder of a saved adapter. A policy with this field is frozen."""
    rate: Rate = Rate()
    learns_for: str = ""
    """The policy in whose roles this policy is trained, if a feature added this policy. Both policies start from the same weights."""


@dataclass(frozen=True, slots=True)
class Critic:
    """A value function that consists of a base model, an optional adapter and a scalar head."""

    name: str
    base: str = "base"
    lora: Lora | None = field(default_factory=Lora)
    """Settings of the critic's adapter. If None, the critic uses the weights of the base model without an adapter."""
    trained: bool = True
    rate: Rate = Rate()
    whole: bool = False
    """Whether the weights of the base model are trained together with the head. The base model is then used only by this critic."""
    reads_text: bool = False
    """Whether the critic reads conversations as text with the tokeniser of its own model, which differs from the agents' model."""


@dataclass(frozen=True, slots=True)
class Team:
    """A list of agents, with the policies that act for them and the critics that evaluate them."""

    agents: tuple[Agent, ...]
    policies: Mapping[str, Policy]
    policy_of: Mapping[str, str]
    """Mapping from each agent's name to the name of its policy. If an agent has a different policy in each turn, this is the policy of
    its first turn."""
    bases: Mapping[str, str] = field(default_factory=lambda: {"base": "embedded"})
    """Mapping from the name of each base model to its path, its name on the hub, or `embedded`."""
    critics: Mapping[str, Critic] = field(default_factory=dict)
    critic_of: Mapping[str, str] = field(default_factory=dict)
    """Mapping from each agent's name to the name of its critic; empty if there are no critics."""
    turns_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Mapping from an agent's name to the policies of its turns in an episode, for agents with different weights in each turn."""
    beside: Mapping[str, Policy] = field(default_factory=dict)
    """Frozen policies that do not act for any agent and only read turns, such as teachers and embedding models."""
    places: Mapping[str, Place] = field(default_factory=dict)
    """Mapping from the name of a base model to its device and data type. Other base models use the device and data type in the run's
    `model` section."""

    def __post_init__(self) -> None:
        names = [agent.name for agent in self.agents]
        if not names:
            raise ConfigError("`team.agents` is empty. Define at least one agent.")
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError(f"`team.agents` contains '{repeated[0]}' twice. Give every agent its own name.")
        for agent, policy in self.policy_of.items():
            if agent not in names:
                raise ConfigError(
                    f"The team map contains an unknown agent '{agent}'.{did_you_mean(agent, names)}"
                )
            if policy not in self.policies:
                raise ConfigError(
                    f"Agent '{agent}' uses the unknown policy '{policy}'.{did_you_mean(policy, self.policies)}"
                )
        missing = [name for name in names if name not in self.policy_of]
        assert not missing, f"agents without a policy: {missing}"
        for agent, listed in self.turns_of.items():
            bases = {self.policies[name].base for name in listed}
            assert len(bases) == 1, f"one conversation of '{agent}' is read by one model, not by {bases}"
            assert listed[0] == self.policy_of[agent], f"the first turn of '{agent}' has two policies"
        self._check_trained_bases()

    def _check_trained_bases(self) -> None:
        """Raise ConfigError if a policy trains the weights of a base model that another policy uses."""
        owner = {
            p.base: p.name for p in self.policies.values() if p.trained and p.lora is None and not p.endpoint
        }
        for policy in (*self.policies.values(), *self.beside.values()):
            if policy.name != owner.get(policy.base, policy.name):
                raise ConfigError(
                    f"Policies '{owner[policy.base]}' and '{policy.name}' use the same base weights, but "
                    f"'{owner[policy.base]}' trains them, which would change '{policy.name}' too. Give every trained agent "
                    "on this base `weights: lora`, or give one of them its own model."
                )

    @classmethod
    def alone(cls, agent: Agent, policy: Policy, bases: Mapping[str, str] = MappingProxyType({})) -> Team:
        """Return a team with a single agent. Scripts, people and endpoints need no base model."""
        return cls((agent,), {policy.name: policy}, {agent.name: policy.name}, bases)

    @classmethod
    def filling(cls, roles: Mapping[str, tuple[Team, str]]) -> Team:
        """Return a team without critics that consists of agents from several teams, for an episode in which they act together.

        The argument `roles` maps each role to a team and to the name of the agent of this team that takes the role. The same policy
        must have the same name in all teams.
        """
        agents: list[Agent] = []
        policies: dict[str, Policy] = {}
        policy_of, bases, turns_of = dict[str, str](), dict[str, str](), dict[str, tuple[str, ...]]()
        for role, (team, name) in roles.items():
            agents.append(replace(team[name], name=role))
            policies |= {each: team.policies[each] for each in team.policies_of(name)}
            policy_of[role] = team.policy_of[name]
            bases |= team.bases
            if name in team.turns_of:
                turns_of[role] = team.turns_of[name]
        return cls(tuple(agents), policies, policy_of, bases, turns_of=turns_of)

    def agent_for_role(self, role: int, roles: int) -> str:
        """Return the agent for role number `role` (from 0) of a game with `roles` roles.

        The result is the agent with the same number, or the first agent if the number of agents differs from the number of roles.
        """
        return self.names[role if len(self.names) == roles else 0]

    def __getitem__(self, name: str) -> Agent:
        for agent in self.agents:
            if agent.name == name:
                return agent
        raise ConfigError(f"Unknown agent '{name}'.{did_you_mean(name, self.names)}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the agents in team order."""
        return tuple(agent.name for agent in self.agents)

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the policies that are trained, in the order of the team map."""
        return tuple(name for name, policy in self.policies.items() if policy.trained)

    @property
    def trained_bases(self) -> frozenset[str]:
        """Names of the base models whose own weights are trained. Other base models are frozen."""
        policies = {p.base for p in self.policies.values() if p.trained and p.lora is None}
        return frozenset(policies | {c.base for c in self.critics.values() if c.trained and c.whole})

    @property
    def every(self) -> Mapping[str, Policy]:
        """Mapping from the names of all policies, including those in `beside`, to the policies."""
        return {**self.policies, **self.beside}

    def with_beside(self, policy: Policy, path: str, device: str | None = None) -> Team:
        """Return a copy of the team with an additional frozen policy in `beside`.

        The base model of this policy is loaded from `path`, on `device` if it is given.
        """
        assert not policy.trained, "a policy that acts for no agent is not trained"
        places = dict(self.places)
        if device is not None:
            usual = places.get(next(iter(self.bases)), Place())
            places[policy.base] = replace(usual, device=device)
        return replace(
            self,
            bases={**self.bases, policy.base: path},
            beside={**self.beside, policy.name: policy},
            places=places,
        )

    def policy(self, agent: str, turn: int = 0) -> Policy:
        """Return the policy that acts for an agent in its turn with this number (from 0).

        Raises ConfigError if the agent has a list of policies by turn and this list is too short.
        """
        listed = self.turns_of.get(agent)
        if listed is None:
            return self.policies[self.policy_of[agent]]
        if turn >= len(listed):
            raise ConfigError(
                f"Agent '{agent}' takes turn {turn + 1}, but its `weights.per_turn` has weights for only {len(listed)} turns. Raise it to "
                "the workflow's number of turns per agent, or set fewer rounds."
            )
        return self.policies[listed[turn]]

    def policies_of(self, agent: str) -> tuple[str, ...]:
        """Return the distinct names of all policies that act for an agent, in the order of the agent's turns."""
        return tuple(dict.fromkeys(self.turns_of.get(agent, (self.policy_of[agent],))))

    def agents_of(self, policy: str) -> tuple[str, ...]:
        """Return the agents that use a policy in at least one turn, in team order."""
        return tuple(name for name in self.names if policy in self.policies_of(name))


ANY_TEAM = "team"
"""Name that refers to any team, regardless of the name of its run, in training, in serving and on the command line."""


def own_name(called: str, team: str) -> str:
    """Return the name of an agent without the prefix `team/` or the name of its team, and other strings unchanged.

    For the agent `planner` of the team `demo`, the strings `planner`, `team/planner` and `demo/planner` all give `planner`.
    """
    of, slash, agent = called.partition("/")
    return agent if slash and of in (ANY_TEAM, team) else called


def split_scored(team: Team) -> tuple[Team, Team]:
    """Return a team without the frozen models that only score text, and a second team with only these frozen models.

    The frozen models that only score text are the frozen critics and the policies in `beside`. Each of the two teams contains only
    the base models that it needs.
    """
    frozen = {name: critic for name, critic in team.critics.items() if not critic.trained}
    trained = {name: critic for name, critic in team.critics.items() if critic.trained}
    scoring = {critic.base for critic in frozen.values()} | {policy.base for policy in team.beside.values()}
    acting = {critic.base for critic in trained.values()} | {policy.base for policy in team.policies.values()}
    first = {base: path for base, path in team.bases.items() if base in acting or base not in scoring}
    second = {base: path for base, path in team.bases.items() if base in scoring}
    return replace(team, critics=trained, beside={}, bases=first), replace(team, critics=frozen, bases=second)
