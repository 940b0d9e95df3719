"""The turns of a step, and the values that are computed for them before the update.

A `Sample` is a sequence of tokens with the targets at which a learner is evaluated. A `Signal` evaluates samples
for credit; the results of all signals are the step's `Signals`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from kapelle.team import Team
    from kapelle.types import Constraint, Episode, Group, Image, Message, Routing, Turn


class TurnKey(NamedTuple):
    """Position of a turn in a step's groups."""

    group: int
    episode: int
    turn: int


class Column(StrEnum):
    """Kinds of values in a sample, with one float for each of its targets."""

    BEHAVIOUR = "behaviour"
    """Log-prob under the weights that sampled it, in nats."""
    ADVANTAGE = "advantage"
    """The advantage; for pairs, +1 on the chosen side and −1 on the rejected side."""
    REFERENCE = "reference"
    """Log-prob under the policy's reference (`ReferenceLogProbs`)."""
    PROXIMAL = "proximal"
    """Log-prob under the trainer's own weights before the update (`ProximalLogProbs`)."""
    RETURN = "return"
    """The target of a critic, or the label for a verifier."""
    VALUE = "value"
    """The critic's value before the update."""
    WEIGHT = "weight"
    """Weight of the target; absent if all are 1. Losses without weights ignore it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence and the target tokens in it at which a learner is evaluated."""

    learner: str
    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    """Ascending indices of the target tokens, each predicted from the token before it; a critic may
    also have the index after the last token and, if it reads text, the same index several times (`signals.samples`)."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """`Column` → one float per target."""
    mask: Tensor | None = None
    """1.0 for targets that count, else 0.0; None counts all."""
    temperature: float = 1.0
    bundle: int | None = None
    """The loss compares samples with the same learner and bundle, which share a forward pass and a step."""
    observed: bool = False
    """True if the agent observed the targets, False if it generated them."""
    images: tuple[Image, ...] = ()
    """Images of the placeholders among the tokens, in order."""
    routing: Routing | None = None
    """Experts to which its tokens are routed; None leaves it to the routers."""
    constraint: Constraint | None = None
    """Constraint of the completion; log-probs are those of the distribution over allowed tokens."""
    begin: int = 0
    """Index of the completion's first token, if there is a constraint."""

    def __post_init__(self) -> None:
        assert self.targets, "a sample has targets"
        assert self.targets[0] > 0, "nothing predicts the first token"
        assert self.targets[-1] <= len(self.tokens), "targets are in the sequence, or right after it"
        wrong = [name for name, column in self.columns.items() if column.shape != (len(self.targets),)]
        assert not wrong, f"columns {wrong} need one value per target"


class Embedding(NamedTuple):
    """One turn as vectors of a frozen model."""

    observation_D: Tensor
    """Mean last hidden state over the prompt's tokens."""
    action_D: Tensor
    """Mean last hidden state over the completion's tokens."""


class MissingSignal(KeyError):
    """Credit or a loss needs results that were not computed."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError shows its message in quotes


@dataclass(frozen=True, slots=True)
class Signals:
    """Results for the sampled turns before the update; a field is empty unless `Algorithm.needs` contains its signal."""

    values: Mapping[TurnKey, Tensor] = field(default_factory=dict)
    """`values_T` of each turn's critic at each completion token (`CriticValues`)."""
    bootstrap: Mapping[TurnKey, Tensor] = field(default_factory=dict)
    """The critic's value (scalar) after an agent's last turn of a truncated episode (`CriticValues`)."""
    after: Mapping[TurnKey, Tensor] = field(default_factory=dict)
    """The same value (scalar) after every turn, in a step with a truncated episode; the critics are trained on it (`CriticValues`)."""
    reference: Mapping[TurnKey, Tensor] = field(default_factory=dict)
    """`reference_logp_T` (`ReferenceLogProbs`)."""
    proximal: Mapping[TurnKey, Tensor] = field(default_factory=dict)
    """`logp_T` under the trainer's own weights before the update (`ProximalLogProbs`)."""
    greedy: Mapping[int, Episode] = field(default_factory=dict)
    """Group → the greedy episode of its task (`GreedyBaseline`)."""
    embedding: Mapping[TurnKey, Embedding] = field(default_factory=dict)
    """The texts that the agent read and wrote, as vectors (`Embeddings`)."""
    score: Mapping[TurnKey, float] = field(default_factory=dict)
    """A verifier's probability that the turn's answer is correct (`VerifierScores`)."""
    step: int = 1
    """Number of the step, from 1."""
    more: Mapping[str, Mapping[TurnKey, Tensor]] = field(default_factory=dict)
    """Results of other signals, by their own names."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            raise AttributeError(
                f"`Signals` has no field '{name}'. Read the results of your own signal as `signals['{name}']`"
            )

    def __getitem__(self, name: str) -> Mapping[TurnKey, Tensor]:
        """Return the results of a signal by its own name; raise MissingSignal if no signal of `Algorithm.needs` gave them."""
        if name in self.more:
            return self.more[name]
        if name in NAMED:
            raise MissingSignal(f"'{name}' is a field: write `signals.{name}`")
        gathered = [field for field in sorted(NAMED) if getattr(self, field)] + sorted(self.more)
        raise MissingSignal(
            f"no signal gave '{name}' (gathered: {', '.join(gathered) or 'nothing'}). Put the signal that gives it into `needs` of "
            "the algorithm, `needs=(MySignal(),)`"
        )


class Reader(Protocol):
    """Converts text to the tokens of one model."""

    @property
    def context(self) -> int:
        """Maximum number of tokens of prompt and completion together."""
        ...

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the prompt ids of a new conversation, ready for the agent's completion."""
        ...

    def completion(self, text: str) -> tuple[int, ...]:
        """Return the ids of a completion, including the end of turn."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return tokens as text, with special tokens in their written form."""
        ...


class Learners(Protocol):
    """The methods that signals and hooks need from the holder of the weights; every train engine has them."""

    def renderer(self, learner: str) -> Reader:
        """Return the converter from text to the tokens of a policy or critic."""
        ...

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return log-probs (policies, references) or values (critics) `_T` of each sample's targets."""
        ...

    def embed(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the mean last hidden state `_D` over the tokens before each sample's targets."""
        ...

    def exchange(self, one: str, other: str) -> None:
        """Swap two policies: weights, optimiser state and references, bitwise."""
        ...

    def refresh_references(self) -> None:
        """Make every reference policy a copy of the current weights of its policy."""
        ...


@dataclass(frozen=True)
class Sampled:
    """A step whose episodes have been collected but not trained on yet; the input of a signal."""

    number: int
    """Number of the step, from 1."""
    groups: Sequence[Group]
    team: Team
    greedily: Callable[[], Sequence[Group]]
    """Rolls out one additional episode of each group's task, with greedy sampling for all agents."""

    @cached_property
    def turns(self) -> Sequence[tuple[TurnKey, Turn]]:
        """Every turn of every valid episode with its key (`turns_of`)."""
        return turns_of(self.groups, trained_only=False)

    @cached_property
    def trained(self) -> Sequence[tuple[TurnKey, Turn]]:
        """The turns that are trained on."""
        return [(key, turn) for key, turn in self.turns if turn.trained]


class Signal(Protocol):
    """Values of a step's turns that credit or a loss needs; each file of `signals` defines one."""

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[Any, Any]]:
        """Return results by field of `Signals`, or by their own name (`Signals.more`)."""
        ...


class Beside:
    """A signal with weights that do not act for an agent."""

    def beside(self, team: Team) -> Team:
        """Return the team with those weights in `Team.beside`; raise ConfigError if they do not suit the team."""
        raise NotImplementedError


class ReadsTokens:
    """A signal whose weights read the token ids of policies, so that their tokenisers must be equal."""

    def readers(self, team: Team) -> Mapping[str, str]:
        """Return a mapping from each policy to the policy in `Team.beside` that reads its tokens."""
        raise NotImplementedError


class ReadsText:
    """A signal that reads text and does not support images."""


class PlaysAlone:
    """A signal with individual episodes, which are not compared with the episodes of a group."""


class Loads:
    """A signal with its own model, outside of the train engine."""

    def load(self) -> None:
        """Load the model before the first step; raise ModelError if it cannot be loaded."""
        raise NotImplementedError


NAMED = {"values", "bootstrap", "after", "reference", "proximal", "greedy", "embedding", "score"}
"""Fields of `Signals` that signals fill."""


def turns_of(groups: Sequence[Group], trained_only: bool = True) -> list[tuple[TurnKey, Turn]]:
    """Return every turn of every valid episode with its key, in order; branches come after the turns of the episode."""
    return [
        (TurnKey(g, e, turn.index), turn)
        for g, group in enumerate(groups)
        for e, episode in enumerate(group.episodes)
        if episode.error is None
        for turn in (*episode.turns, *episode.branches)
        if turn.trained or not trained_only
    ]


def in_rounds(groups: Sequence[Group]) -> list[tuple[TurnKey, Turn, int]]:
    """Return every trained turn of every valid episode, without branches, with its number among its agent's turns."""
    found: list[tuple[TurnKey, Turn, int]] = []
    for g, group in enumerate(groups):
        for e, episode in enumerate(group.episodes):
            rounds = enumerate(episode.rounds(trained=True))
            number = {turn.index: k for k, movers in rounds for turn in movers.values()}
            if episode.error is None:
                found += [(TurnKey(g, e, t.index), t, number[t.index]) for t in episode.turns if t.trained]
    return found


def label_of(episode: Episode, turn: Turn) -> float | None:
    """Return the correctness of a turn's answer, in [0, 1]: its score, or else, for its agent's last turn, the terminal reward.

    The result is None for a turn that was not graded.
    """
    if turn.score is not None:
        return turn.score
    if turn.agent in episode.rewards and turn is episode.by(turn.agent)[-1]:
        return episode.rewards[turn.agent]
    return None
