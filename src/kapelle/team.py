"""Who plays with which weights: the one map that drives sampling, training, saving and serving.

An `Agent` is a seat in a workflow. A `Policy` is a set of weights. Shared weights, one LoRA adapter
per agent, different models, frozen agents and remote endpoints are values in this map. The rest
of the library need not know how weights are shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from kapelle.errors import ConfigError, did_you_mean
from kapelle.types import Json, Sampling

VERIFIER = "judge:verifier"
"""Name of the critic that judges answers; reserved, so that agents and policies cannot have it."""

EMBEDDER = "judge:embedder"
"""Name of a model that turns texts into vectors and acts for no agent: of its base, and of its learner."""


def embedder_name(policy: str) -> str:
    """Return the name under which the frozen base of a policy computes embeddings."""
    return f"embedder:{policy}"


def reference_name(policy: str) -> str:
    """Return the name under which a policy's frozen reference is kept and scored."""
    return f"reference:{policy}"


@dataclass(frozen=True, slots=True)
class Agent:
    """A seat in a workflow: a name, its prompts, and how it samples."""

    name: str
    system: str | None = None
    """System message at the start of its conversation."""
    prompt: str | None = None
    """Template of its user message, with `{question}` and the names of other agents in braces;
    None uses the workflow's own."""
    sampling: Sampling = Sampling()
    chat_template_kwargs: Mapping[str, Json] = field(default_factory=dict, hash=False)
    """Arguments of its model's chat template, such as `enable_thinking`."""


ALL_LINEAR = "all-linear"
"""Stands for every linear layer of a decoder's blocks that is fit for an adapter."""


@dataclass(frozen=True, slots=True)
class Lora:
    """Size and place of a low-rank adapter (2106.09685): W + (alpha / rank) · B·A."""

    rank: int = 16
    """r, the width between B and A."""
    alpha: float = 32.0
    """Scale of the update."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Names of the linear layers that it adapts, like PEFT's `target_modules`; or `all-linear`, by a rule for each
    architecture (`models/adapters.py`)."""
    dropout: float = 0.0
    """Share of the adapter's inputs that are dropped while it learns."""
    fan_in_fan_out: bool = field(default=False, compare=False)
    """Whether its layers keep their weights with features in first, as GPT-2's do; `adapters.named` sets it for PEFT."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server that plays a frozen agent."""

    url: str
    model: str
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; the key itself is never stored."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a base is held, and in which type it computes."""

    dtype: str = "float32"
    device: str | None = None
    """None is `cuda` where there is one, else `cpu`."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A learning rate and its schedule; what is None is that of the run's `optimizer`."""

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
    """PEFT folder of an adapter that is used as it was saved; such a policy is not trained."""
    rate: Rate = Rate()
    learns_for: str = ""
    """The policy at whose seats it learns, where a league added it; it starts from what that one starts from."""


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
    """Whether the base's own weights are trained with the head; the base is then this critic's alone."""
    reads_text: bool = False
    """Whether it reads what was said as text, in the tokens of its own model: another model than that of a turn that it reads."""


@dataclass(frozen=True, slots=True)
class Team:
    """Agents in seat order, their policies and their critics."""

    agents: tuple[Agent, ...]
    policies: Mapping[str, Policy]
    policy_of: Mapping[str, str]
    """Agent name → policy name; where each turn has its own policy, that of the first turn."""
    bases: Mapping[str, str] = field(default_factory=lambda: {"base": "embedded"})
    """Base name → model path, hub name or `embedded`."""
    critics: Mapping[str, Critic] = field(default_factory=dict)
    critic_of: Mapping[str, str] = field(default_factory=dict)
    """Agent name → critic name; empty without critics."""
    turns_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Agent name → the policy of each of its turns in an episode, for agents whose weights differ by turn."""
    beside: Mapping[str, Policy] = field(default_factory=dict)
    """Frozen policies that act for no agent and only read turns: a teacher, a model that computes embeddings."""
    places: Mapping[str, Place] = field(default_factory=dict)
    """Base name → where it is held; other bases are where the run's `model` is."""

    def __post_init__(self) -> None:
        names = [agent.name for agent in self.agents]
        if not names:
            raise ConfigError("`team.agents` is empty. Name at least one agent.")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"`team.agents` names '{twice[0]}' twice. Give every agent a name of its own.")
        for agent, policy in self.policy_of.items():
            if agent not in names:
                raise ConfigError(
                    f"The team map names an unknown agent '{agent}'.{did_you_mean(agent, names)}"
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
        self._refuse_adapters_on_moving_base()

    def _refuse_adapters_on_moving_base(self) -> None:
        moving = {
            p.base: p.name for p in self.policies.values() if p.trained and p.lora is None and not p.endpoint
        }
        for policy in (*self.policies.values(), *self.beside.values()):
            if policy.name != moving.get(policy.base, policy.name):
                raise ConfigError(
                    f"Policies '{moving[policy.base]}' and '{policy.name}' use the same base weights, which "
                    f"'{moving[policy.base]}' trains: its updates would change '{policy.name}' too. "
                    "Give every trained agent on this base `weights: lora`, or give one of them its own model."
                )

    @classmethod
    def alone(cls, agent: Agent, policy: Policy, bases: Mapping[str, str] = MappingProxyType({})) -> Team:
        """Return the team of one agent; scripts, people and endpoints need no base."""
        return cls((agent,), {policy.name: policy}, {agent.name: policy.name}, bases)

    @classmethod
    def gathered(cls, seats: Mapping[str, tuple[Team, str]]) -> Team:
        """Return the team that plays where agents of several teams meet, without their critics.

        `seats` are seat → a team, and the name of its agent who sits there. A policy has one name in all these teams.
        """
        agents: list[Agent] = []
        policies: dict[str, Policy] = {}
        policy_of, bases, turns_of = dict[str, str](), dict[str, str](), dict[str, tuple[str, ...]]()
        for seat, (team, name) in seats.items():
            agents.append(replace(team[name], name=seat))
            policies |= {each: team.policies[each] for each in team.policies_of(name)}
            policy_of[seat] = team.policy_of[name]
            bases |= team.bases
            if name in team.turns_of:
                turns_of[seat] = team.turns_of[name]
        return cls(tuple(agents), policies, policy_of, bases, turns_of=turns_of)

    def sitting(self, seat: int, seats: int) -> str:
        """Return which agent sits at a place (from 0) of a game for `seats`: the one at that place, or the first of a team of another size."""
        return self.names[seat if len(self.names) == seats else 0]

    def __getitem__(self, name: str) -> Agent:
        for agent in self.agents:
            if agent.name == name:
                return agent
        raise ConfigError(f"Unknown agent '{name}'.{did_you_mean(name, self.names)}")

    @property
    def names(self) -> tuple[str, ...]:
        """Agent names in seat order."""
        return tuple(agent.name for agent in self.agents)

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the policies that are trained, in the order of the team map."""
        return tuple(name for name, policy in self.policies.items() if policy.trained)

    @property
    def trained_bases(self) -> frozenset[str]:
        """Names of the bases whose own weights are trained; the others are frozen, under adapters or alone."""
        policies = {p.base for p in self.policies.values() if p.trained and p.lora is None}
        return frozenset(policies | {c.base for c in self.critics.values() if c.trained and c.whole})

    @property
    def every(self) -> Mapping[str, Policy]:
        """All policies by name, those beside the team too."""
        return {**self.policies, **self.beside}

    def with_beside(self, policy: Policy, path: str, device: str | None = None) -> Team:
        """Return the team with a frozen policy beside it, whose base is loaded from `path`, on a device of its own if one is named."""
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
        """Return the policy that acts for an agent in its turn of this number, counted from 0.

        Raises ConfigError for a turn after the last one listed.
        """
        listed = self.turns_of.get(agent)
        if listed is None:
            return self.policies[self.policy_of[agent]]
        if turn >= len(listed):
            raise ConfigError(
                f"Agent '{agent}' takes turn {turn + 1}, but its `weights.per_turn` has weights for {len(listed)}. Raise "
                "it to the number of turns that the workflow gives an agent, or play fewer rounds."
            )
        return self.policies[listed[turn]]

    def policies_of(self, agent: str) -> tuple[str, ...]:
        """Return the names of all policies that act for an agent, in the order of its turns, each once."""
        return tuple(dict.fromkeys(self.turns_of.get(agent, (self.policy_of[agent],))))

    def agents_of(self, policy: str) -> tuple[str, ...]:
        """Return the agents that act with a policy in some turn, in seat order."""
        return tuple(name for name in self.names if policy in self.policies_of(name))


ANY_TEAM = "team"
"""What every team may be called, whatever the name of its run: in training, where it is served, and on the command line."""


def own_name(called: str, team: str) -> str:
    """Return an agent's own name for `planner`, `team/planner` or (of a `team` named so) `demo/planner`; other texts as they are."""
    of, slash, agent = called.partition("/")
    return agent if slash and of in (ANY_TEAM, team) else called


def split_scored(team: Team) -> tuple[Team, Team]:
    """Return a team without what is only scored (frozen critics, and what is beside it), and with nothing else that is scored.

    Each has the bases that it needs; one that both need is in both.
    """
    scored = {name: critic for name, critic in team.critics.items() if not critic.trained}
    others = {name: critic for name, critic in team.critics.items() if critic.trained}
    read = {critic.base for critic in scored.values()} | {policy.base for policy in team.beside.values()}
    kept = {critic.base for critic in others.values()} | {policy.base for policy in team.policies.values()}
    paths = team.bases.items()
    rest = {base: path for base, path in paths if base in kept or base not in read}
    apart = {base: path for base, path in paths if base in read}
    return replace(team, critics=others, beside={}, bases=rest), replace(team, critics=scored, bases=apart)
