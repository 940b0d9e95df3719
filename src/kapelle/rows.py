"""The turns of a step, what is asked about them before the update, and who answers.

A question to a learner is a `Sample`: a sequence of tokens and the places in it that count. A `Signal` asks such
questions for credit; what all of them find are the step's `Signals`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from kapelle.team import Team
    from kapelle.types import Episode, Group, Message, Turn


class TurnKey(NamedTuple):
    """Where a turn stands in a step's groups."""

    group: int
    episode: int
    turn: int


class Column(StrEnum):
    """What a sample says of each of its targets, beside the token: one float each."""

    BEHAVIOUR = "behaviour"
    """Log-prob by the weights that sampled it, nats."""
    ADVANTAGE = "advantage"
    """How much better than expected it was; of pairs +1 on the chosen side, −1 on the rejected."""
    REFERENCE = "reference"
    """Log-prob by the policy's reference (`ReferenceLogProbs`)."""
    PROXIMAL = "proximal"
    """Log-prob by the trainer's own weights before the update (`ProximalLogProbs`)."""
    RETURN = "return"
    """What a critic is fitted to; of a verifier the label."""
    VALUE = "value"
    """What the critic said before the update."""
    WEIGHT = "weight"
    """How much the target counts; a loss that knows no weights leaves it unread."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence and the tokens in it that a learner is asked about."""

    learner: str
    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    """Ascending places of the target tokens, each asked for from the token before it; a critic may
    also be asked for the place after the last token."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """`Column` → one float per target."""
    mask: Tensor | None = None
    """1.0 where a target counts; None counts all."""
    temperature: float = 1.0
    bundle: int | None = None
    """Samples of one learner and one bundle are compared by the loss: they share a forward pass and a step."""
    observed: bool = False
    """True where the agent heard the targets, False where it said them."""

    def __post_init__(self) -> None:
        assert self.targets, "a sample asks for something"
        assert self.targets[0] > 0, "the first token has nothing before it"
        assert self.targets[-1] <= len(self.tokens), "targets lie in the sequence, or right after it"
        wrong = [name for name, column in self.columns.items() if column.shape != (len(self.targets),)]
        assert not wrong, f"columns {wrong} need one value per target"


class Embedding(NamedTuple):
    """One turn as a frozen model reads it."""

    observation_D: Tensor
    """Mean last hidden state over the prompt's tokens."""
    action_D: Tensor
    """Mean last hidden state over the completion's tokens."""


@dataclass(frozen=True, slots=True)
class Signals:
    """What is known of the sampled turns before the update; each part is empty unless `Algorithm.needs` asks for it."""

    values: Mapping[TurnKey, Tensor] = field(default_factory=dict)
    """`values_T` of each turn's critic at each completion token (`CriticValues`)."""
    bootstrap: Mapping[TurnKey, Tensor] = field(default_factory=dict)
    """Value (scalar) after the last token of a turn at which an episode was cut short (`CriticValues`)."""
    reference: Mapping[TurnKey, Tensor] = field(default_factory=dict)
    """`reference_logp_T` (`ReferenceLogProbs`)."""
    proximal: Mapping[TurnKey, Tensor] = field(default_factory=dict)
    """`logp_T` by the trainer's own weights before the update (`ProximalLogProbs`)."""
    greedy: Mapping[int, Episode] = field(default_factory=dict)
    """Group → the greedy episode of its task (`GreedyBaseline`)."""
    embedding: Mapping[TurnKey, Embedding] = field(default_factory=dict)
    """What the agent saw and said, as vectors (`Embeddings`)."""
    score: Mapping[TurnKey, float] = field(default_factory=dict)
    """A verifier's probability that the turn's answer is right (`VerifierScores`)."""
    step: int = 1
    """Number of the step, from 1."""
    more: Mapping[str, Mapping[TurnKey, Tensor]] = field(default_factory=dict)
    """What further signals have found, by the name that each gives it."""

    def __getitem__(self, name: str) -> Mapping[TurnKey, Tensor]:
        return self.more[name]


class Reader(Protocol):
    """How text becomes the tokens of one model."""

    @property
    def context(self) -> int:
        """Most tokens that prompt and completion may have together."""
        ...

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the prompt ids of a new conversation, ready for the agent to speak."""
        ...

    def completion(self, text: str) -> tuple[int, ...]:
        """Return the ids of a completion, end of turn included."""
        ...


class Learners(Protocol):
    """What signals and hooks ask of whoever holds the weights; every train engine is one."""

    def renderer(self, learner: str) -> Reader:
        """Return how text becomes the tokens of the model that a policy or critic stands on."""
        ...

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return log-probs (policies, references) or values (critics) `_T` of each sample's targets."""
        ...

    def embed(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the mean last hidden state `_D` over the tokens before each sample's targets."""
        ...

    def exchange(self, one: str, other: str) -> None:
        """Let two policies change places: weights, optimiser state and references, bit for bit."""
        ...

    def refresh_references(self) -> None:
        """Make every reference policy a copy of its policy as it is now."""
        ...


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step that was played and is not learned from yet: what a signal looks at."""

    number: int
    """From 1."""
    groups: Sequence[Group]
    team: Team
    greedily: Callable[[], Sequence[Group]]
    """Plays each group's task once more with every agent at its likeliest, one episode a task."""


class Signal(Protocol):
    """Something that credit or the loss wants to know of the turns of a step; `signals` has one in each file."""

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[Any, Any]]:
        """Return what is found: by the field of `Signals` that it goes to, or by a name of its own (`Signals.more`)."""
        ...


@runtime_checkable
class Beside(Protocol):
    """A signal that asks weights which nobody acts with."""

    def beside(self, team: Team) -> Team:
        """Return the team with those weights in `Team.beside`; ConfigError when they do not suit the team."""
        ...


@runtime_checkable
class ReadsTokens(Protocol):
    """A signal whose weights beside the team read the very tokens of policies: their tokenisers have to be the same."""

    def readers(self, team: Team) -> Mapping[str, str]:
        """Return, by policy, the policy beside the team that reads its tokens."""
        ...


@runtime_checkable
class Loads(Protocol):
    """A signal that reads turns with something that no train engine holds."""

    def load(self) -> None:
        """Load it before the first step; ModelError says why it cannot be."""
        ...


def gathered(needs: Sequence[Signal], step: Sampled, engine: Learners) -> Signals:
    """Return what the signals have found."""
    found = {name: rows for signal in needs for name, rows in signal.gather(step, engine).items()}
    named = {name: found.pop(name) for name in NAMED & found.keys()}
    return Signals(**named, step=step.number, more=found)


NAMED = {"values", "bootstrap", "reference", "proximal", "greedy", "embedding", "score"}
"""Fields of `Signals` that signals fill."""


def turns_of(groups: Sequence[Group], trained_only: bool = True) -> list[tuple[TurnKey, Turn]]:
    """Return every turn of every valid episode with its key, in order, branches after the turns that went on."""
    return [
        (TurnKey(g, e, turn.index), turn)
        for g, group in enumerate(groups)
        for e, episode in enumerate(group.episodes)
        if episode.error is None
        for turn in (*episode.turns, *episode.branches)
        if turn.trained or not trained_only
    ]


def in_rounds(groups: Sequence[Group]) -> list[tuple[TurnKey, Turn, int]]:
    """Return every trained turn of every valid episode, its branches left out, with its number among its agent's."""
    found: list[tuple[TurnKey, Turn, int]] = []
    for g, group in enumerate(groups):
        for e, episode in enumerate(group.episodes):
            rounds = enumerate(episode.rounds(trained=True))
            number = {turn.index: k for k, movers in rounds for turn in movers.values()}
            if episode.error is None:
                found += [(TurnKey(g, e, t.index), t, number[t.index]) for t in episode.turns if t.trained]
    return found


def label_of(episode: Episode, turn: Turn) -> float | None:
    """Return how right a turn's answer is, in [0, 1]: its score, else what its agent was paid at the end.

    The latter is for the agent's last turn; None where nothing graded the turn.
    """
    if turn.score is not None:
        return turn.score
    if turn.agent in episode.rewards and turn is episode.by(turn.agent)[-1]:
        return episode.rewards[turn.agent]
    return None
