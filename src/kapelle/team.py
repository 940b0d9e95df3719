"""The team map from agents to weights, which determines sampling, training, saving and serving.

An `Agent` is a role in a workflow. A `Policy` is a set of weights. Shared weights, one LoRA adapter per agent, different models,
frozen agents and remote endpoints are all entries in this map. Other modules do not depend on how weights are shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from kapelle.errors import ConfigError, did_you_mean
from kapelle.types import Json, Sampling

VERIFIER = "judge:verifier"
"""Name of the critic that evaluates answers; agents and policies cannot use it."""

EMBEDDER = "judge:embedder"
"""Name of the base and of the learner of a separate embedding model, which does not act for an agent."""


def embedder_name(policy: str) -> str:
    """Return the name under which the frozen base of a policy computes embeddings."""
    return f"embedder:{policy}"


def reference_name(policy: str) -> str:
    """Return the name under which a policy's frozen reference is stored and scored."""
    return f"reference:{policy}"


@dataclass(frozen=True, slots=True)
class Agent:
    """A role in a workflow: a name, prompts, and sampling settings."""

    name: str
    system: str | None = None
    """System message at the start of its conversation."""
    prompt: str | None = None
    """Template of its user message, with `{question}` and names of other agents in braces; None means the workflow's default."""
    sampling: Sampling = Sampling()
    examples: tuple[tuple[str, str], ...] = ()
    """User messages and the agent's answers to them, which it reads before its task (few-shot)."""
    chat_template_kwargs: Mapping[str, Json] = field(default_factory=dict, hash=False)
    """Arguments of its model's chat template, such as `enable_thinking`."""


ALL_LINEAR = "all-linear"
"""Every linear layer of a decoder's blocks that supports an adapter."""


@dataclass(frozen=True, slots=True)
class Lora:
    """Size and place of a low-rank adapter (2106.09685): W + (alpha / rank) · B·A."""

    rank: int = 16
    """r, the width between B and A."""
    alpha: float = 32.0
    """Scale of the update."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Names of the adapted linear layers, as in PEFT's `target_modules`, or `all-linear`, which follows a rule per architecture
    (`models/adapters.py`)."""
    dropout: float = 0.0
    """Dropout of the adapter's inputs in training."""
    fan_in_fan_out: bool = field(default=False, compare=False)
    """Whether the layers store weights as (in, out), as in GPT-2; `adapters.named` sets it for PEFT."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server that acts for a frozen agent."""

    url: str
    model: str
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the key; the key itself is never stored."""


@dataclass(frozen=True, slots=True)
class Place:
    """Device and data type of a base."""

    dtype: str = "float32"
    device: str | None = None
    """Device; None means `cuda` if there is one, else `cpu`."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A learning rate and its schedule; None means the value of the run's `optimizer`."""

    lr: float | None = None
    schedule: str | None = None
    warmup_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """One set of weights: a base model with or without an adapter, or a remote endpoint."""

    name: str
    base: str = "base"
    """Key of the base model in `Team.bases`; empty for endpoints and scripts."""
    lora: Lora | None = None
    """The adapter; None means the base's own weights."""
    trained: bool = True
    endpoint: Endpoint | None = None
    past: str | None = None
    """PEFT folder of a saved adapter; such a policy is frozen."""
    rate: Rate = Rate()
    learns_for: str = ""
    """The policy in whose roles it is trained, if a feature added it; both start from the same weights."""


@dataclass(frozen=True, slots=True)
class Critic:
    """A value function: a scalar head on its own adapter of a base, or on the base alone."""

    name: str
    base: str = "base"
    lora: Lora | None = field(default_factory=Lora)
    """The adapter; None means the base's own weights."""
    trained: bool = True
    rate: Rate = Rate()
    whole: bool = False
    """Whether the base's own weights are trained with the head; the base then belongs to this critic."""
    reads_text: bool = False
    """Whether it reads conversations as text with the tokeniser of its own model, which differs from the agents' model."""


@dataclass(frozen=True, slots=True)
class Team:
    """Agents in order, their policies and their critics."""

    agents: tuple[Agent, ...]
    policies: Mapping[str, Policy]
    policy_of: Mapping[str, str]
    """Agent name → policy name; if each turn has its own policy, that of the first turn."""
    bases: Mapping[str, str] = field(default_factory=lambda: {"base": "embedded"})
    """Base name → model path, hub name or `embedded`."""
    critics: Mapping[str, Critic] = field(default_factory=dict)
    critic_of: Mapping[str, str] = field(default_factory=dict)
    """Agent name → critic name; empty without critics."""
    turns_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Agent name → the policy of each of its turns in an episode, for agents whose weights differ by turn."""
    beside: Mapping[str, Policy] = field(default_factory=dict)
    """Frozen policies that do not act for an agent and only read turns: teachers and embedding models."""
    places: Mapping[str, Place] = field(default_factory=dict)
    """Base name → device and data type; other bases use those of the run's `model`."""

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
        """Raise ConfigError if a policy trains the base weights that another policy uses."""
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
        """Return the team of one agent; scripts, people and endpoints need no base."""
        return cls((agent,), {policy.name: policy}, {agent.name: policy.name}, bases)

    @classmethod
    def filling(cls, roles: Mapping[str, tuple[Team, str]]) -> Team:
        """Return a team, without critics, of agents from several teams that act in one episode.

        `roles` maps a role to a team and the name of its agent for that role. A policy has the same name in all teams.
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

        This is the agent of the same number, or the first agent if the team has a different size.
        """
        return self.names[role if len(self.names) == roles else 0]

    def __getitem__(self, name: str) -> Agent:
        for agent in self.agents:
            if agent.name == name:
                return agent
        raise ConfigError(f"Unknown agent '{name}'.{did_you_mean(name, self.names)}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the agents in order."""
        return tuple(agent.name for agent in self.agents)

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the policies that are trained, in the order of the team map."""
        return tuple(name for name, policy in self.policies.items() if policy.trained)

    @property
    def trained_bases(self) -> frozenset[str]:
        """Names of the bases whose own weights are trained; other bases are frozen."""
        policies = {p.base for p in self.policies.values() if p.trained and p.lora is None}
        return frozenset(policies | {c.base for c in self.critics.values() if c.trained and c.whole})

    @property
    def every(self) -> Mapping[str, Policy]:
        """All policies by name, including those in `beside`."""
        return {**self.policies, **self.beside}

    def with_beside(self, policy: Policy, path: str, device: str | None = None) -> Team:
        """Return the team with an additional frozen policy in `beside`, whose base is loaded from `path`, on `device` if given."""
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
        """Return the policy that acts for an agent in its turn of this number (from 0).

        Raises ConfigError for a turn after the last listed one.
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
        """Return the distinct names of all policies that act for an agent, in the order of its turns."""
        return tuple(dict.fromkeys(self.turns_of.get(agent, (self.policy_of[agent],))))

    def agents_of(self, policy: str) -> tuple[str, ...]:
        """Return the agents that use a policy in some turn, in order."""
        return tuple(name for name in self.names if policy in self.policies_of(name))


ANY_TEAM = "team"
"""A name that refers to any team, whatever the name of its run, in training, serving and on the command line."""


def own_name(called: str, team: str) -> str:
    """Return an agent's own name for `planner`, `team/planner` or `demo/planner` (for the team `demo`), and other strings unchanged."""
    of, slash, agent = called.partition("/")
    return agent if slash and of in (ANY_TEAM, team) else called


def split_scored(team: Team) -> tuple[Team, Team]:
    """Return two teams: one without the frozen models that only score, and one with only these, as critics and in `beside`.

    The frozen models are frozen critics and the policies in `beside`. Each team has the bases that it needs.
    """
    frozen = {name: critic for name, critic in team.critics.items() if not critic.trained}
    trained = {name: critic for name, critic in team.critics.items() if critic.trained}
    scoring = {critic.base for critic in frozen.values()} | {policy.base for policy in team.beside.values()}
    acting = {critic.base for critic in trained.values()} | {policy.base for policy in team.policies.values()}
    first = {base: path for base, path in team.bases.items() if base in acting or base not in scoring}
    second = {base: path for base, path in team.bases.items() if base in scoring}
    return replace(team, critics=trained, beside={}, bases=first), replace(team, critics=frozen, bases=second)
