"""Data types for the turns of a step and for the values that are computed for these turns before the update.

A `Sample` is a sequence of tokens with the target tokens for which a learner computes log-probs or values. A `Signal` computes values
that the credit function needs. The results of all signals of a step are stored in `Signals`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from kapelle.team import Agent, Team
    from kapelle.types import Constraint, Episode, Group, Image, Json, Message, Routing, Turn


class TurnKey(NamedTuple):
    """The position of a turn in the groups of a step."""

    group: int
    episode: int
    turn: int


class Column(StrEnum):
    """Names of the additional values of a sample, which contain one float for each of its targets."""

    BEHAVIOUR = "behaviour"
    """Log-prob of the target, in nats, under the weights that sampled it."""
    ADVANTAGE = "advantage"
    """The advantage of the target. For losses over pairs, the advantage is +1 for the chosen turn of a pair and −1 for the rejected
    turn."""
    REFERENCE = "reference"
    """Log-prob of the target under the reference of the policy (`ReferenceLogProbs`)."""
    PROXIMAL = "proximal"
    """Log-prob of the target under the trainer's own weights before the update (`ProximalLogProbs`)."""
    RETURN = "return"
    """The training target of a critic, or the label on which a verifier is trained."""
    VALUE = "value"
    """The critic's value before the update."""
    WEIGHT = "weight"
    """Weight of the target in the loss. The column is absent if all weights are 1. Losses without weights ignore this column."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence of tokens, and the indices of the target tokens for which a learner computes log-probs or values."""

    learner: str
    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    """Ascending indices of the target tokens, each of which is predicted from the token before it. For a critic, the index after the last
    token is also allowed. If the critic reads text, the same index may occur several times (`signals.samples`)."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Mapping from each `Column` to a tensor with one float per target."""
    mask: Tensor | None = None
    """Mask with 1.0 for targets that count in the loss and 0.0 for other targets; None if all targets count."""
    temperature: float = 1.0
    bundle: int | None = None
    """Identifier of a bundle of samples that the loss compares. Samples with the same learner and bundle share a forward pass and an
    optimiser step."""
    observed: bool = False
    """Whether the agent observed the targets instead of generating them."""
    images: tuple[Image, ...] = ()
    """Images for the placeholders among the tokens, in order."""
    routing: Routing | None = None
    """Experts to which the tokens are routed; None if the routers of the model choose the experts."""
    constraint: Constraint | None = None
    """Constraint of the completion. Log-probs are computed under the distribution over the tokens that the constraint allows."""
    begin: int = 0
    """Index of the first token of the completion, which is used only if there is a constraint."""

    def __post_init__(self) -> None:
        assert self.targets, "a sample has targets"
        assert self.targets[0] > 0, "nothing predicts the first token"
        assert self.targets[-1] <= len(self.tokens), "targets are in the sequence, or right after it"
        wrong = [name for name, column in self.columns.items() if column.shape != (len(self.targets),)]
        assert not wrong, f"columns {wrong} need one value per target"


class Embedding(NamedTuple):
    """The embeddings of the prompt and the completion of one turn, computed with a frozen model."""

    observation_D: Tensor
    """Mean of the last hidden states over the tokens of the prompt."""
    action_D: Tensor
    """Mean of the last hidden states over the tokens of the completion."""


class MissingSignal(KeyError):
    """The credit function or the loss reads results that no signal has computed."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError shows its message in quotes


@dataclass(frozen=True, slots=True)
class Signals:
    """The results of all signals for the sampled turns of a step, computed before the update.

    A field is empty unless `Algorithm.needs` contains the corresponding signal.
    """

    values: Mapping[TurnKey, Tensor] = field(default_factory=dict)
    """Mapping from each turn to the critic's values at its completion tokens, of shape (T,) (`CriticValues`)."""
    bootstrap: Mapping[TurnKey, Tensor] = field(default_factory=dict)
    """The critic's value (scalar) after an agent's last turn in a truncated episode (`CriticValues`)."""
    after: Mapping[TurnKey, Tensor] = field(default_factory=dict)
    """The critic's value (scalar) after every turn, computed only in steps with a truncated episode. The critics are trained on these
    values (`CriticValues`)."""
    reference: Mapping[TurnKey, Tensor] = field(default_factory=dict)
    """Log-probs of the completion tokens under the reference of the policy, of shape (T,) (`ReferenceLogProbs`)."""
    proximal: Mapping[TurnKey, Tensor] = field(default_factory=dict)
    """Log-probs of the completion tokens under the trainer's own weights before the update, of shape (T,) (`ProximalLogProbs`)."""
    greedy: Mapping[int, Episode] = field(default_factory=dict)
    """Mapping from the index of each group to the greedy episode of its task (`GreedyBaseline`)."""
    embedding: Mapping[TurnKey, Embedding] = field(default_factory=dict)
    """Embeddings of the text that the agent read and wrote in each turn (`Embeddings`)."""
    score: Mapping[TurnKey, float] = field(default_factory=dict)
    """Probability, estimated by a verifier, that the answer of the turn is correct (`VerifierScores`)."""
    step: int = 1
    """Number of the step, starting from 1."""
    more: Mapping[str, Mapping[TurnKey, Tensor]] = field(default_factory=dict)
    """Results of custom signals, keyed by the names that these signals chose."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            raise AttributeError(
                f"`Signals` has no field '{name}'. Read the results of your own signal as `signals['{name}']`"
            )

    def __getitem__(self, name: str) -> Mapping[TurnKey, Tensor]:
        """Return the results of a custom signal by name. Raises MissingSignal if no signal in `Algorithm.needs` computed them."""
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
    """Converts text to the tokens of one model and back."""

    @property
    def context(self) -> int:
        """Maximum total number of tokens of the prompt and the completion."""
        ...

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the prompt ids of a new conversation, up to the position where the agent's completion starts."""
        ...

    def extend(
        self, prompt: Sequence[int], completion: Sequence[int], new_messages: Sequence[Message]
    ) -> tuple[int, ...]:
        """Return the prompt ids after a sampled completion and new messages. The ids of prompt and completion are kept."""
        ...

    def completion(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a completion, including the end-of-turn token."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, including special tokens."""
        ...


@runtime_checkable
class TakesArguments(Protocol):
    """A reader whose chat template takes arguments."""

    def with_arguments(self, arguments: Mapping[str, Json]) -> Any:
        """Return a reader that passes these arguments to the chat template."""
        ...


AnyReader = TypeVar("AnyReader")


def agent_renderer(agent: Agent, reader: AnyReader) -> AnyReader:
    """Return the reader of an agent: the reader of the agent's policy with the agent's chat template arguments."""
    if not agent.chat_template_kwargs or not isinstance(reader, TakesArguments):
        return reader
    return cast("AnyReader", reader.with_arguments(agent.chat_template_kwargs))


class Learners(Protocol):
    """The methods of a train engine that signals and hooks use. Every train engine implements them."""

    def renderer(self, learner: str) -> Reader:
        """Return the object that converts text to the tokens of a policy or critic."""
        ...

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return, for each sample, a tensor of shape (T,) with one number per target token.

        The numbers are log-probs if the learner is a policy or a reference, and values if it is a critic.
        """
        ...

    def embed(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return, for each sample, the mean of the last hidden states over the tokens before its targets, as a tensor of shape (D,)."""
        ...

    def exchange(self, one: str, other: str) -> None:
        """Exchange the weights, the optimiser states and the references of two policies, bitwise."""
        ...

    def refresh_references(self) -> None:
        """Make every reference policy a copy of the current weights of its policy."""
        ...


@dataclass(frozen=True)
class Sampled:
    """The data of a step whose episodes have been collected but not yet trained on, which signals take as input."""

    number: int
    """Number of the step, starting from 1."""
    groups: Sequence[Group]
    team: Team
    greedily: Callable[[], Sequence[Group]]
    """Function that rolls out one additional episode for the task of each group, with greedy decoding for all agents."""

    @cached_property
    def turns(self) -> Sequence[tuple[TurnKey, Turn]]:
        """Every turn of every valid episode, with its key (`turns_of`)."""
        return turns_of(self.groups, trained_only=False)

    @cached_property
    def trained(self) -> Sequence[tuple[TurnKey, Turn]]:
        """The turns that are trained on."""
        return [(key, turn) for key, turn in self.turns if turn.trained]


class Signal(Protocol):
    """Computes values for the turns of a step that the credit function or the loss needs. Each file of `signals` defines one signal."""

    def gather(self, step: Sampled, engine: Learners) -> Mapping[str, Mapping[Any, Any]]:
        """Return the computed results, keyed by a field of `Signals` or by the name of a custom result (`Signals.more`)."""
        ...


class Beside:
    """A signal that uses separate weights, which do not act for any agent."""

    def beside(self, team: Team) -> Team:
        """Return the team with the weights of the signal added to `Team.beside`. Raises ConfigError if they do not suit the team."""
        raise NotImplementedError


class ReadsTokens:
    """A signal whose own weights read the token ids of policies, so that both need the same tokeniser."""

    def readers(self, team: Team) -> Mapping[str, str]:
        """Return a mapping from each policy to the policy in `Team.beside` that reads its tokens."""
        raise NotImplementedError


class ReadsText:
    """A signal that only reads text and does not support images."""


class PlaysAlone:
    """A signal that uses individual episodes and does not compare the episodes of a group."""


class Loads:
    """A signal that loads its own model outside of the train engine."""

    def load(self) -> None:
        """Load the model before the first step. Raises ModelError if the model cannot be loaded."""
        raise NotImplementedError


NAMED = {"values", "bootstrap", "after", "reference", "proximal", "greedy", "embedding", "score"}
"""Names of the fields of `Signals` that contain results of signals."""


def turns_of(groups: Sequence[Group], trained_only: bool = True) -> list[tuple[TurnKey, Turn]]:
    """Return every turn of every valid episode with its key, in order.

    Branches of an episode follow the turns of this episode.
    """
    return [
        (TurnKey(g, e, turn.index), turn)
        for g, group in enumerate(groups)
        for e, episode in enumerate(group.episodes)
        if episode.error is None
        for turn in (*episode.turns, *episode.branches)
        if turn.trained or not trained_only
    ]


def in_rounds(groups: Sequence[Group]) -> list[tuple[TurnKey, Turn, int]]:
    """Return every trained turn of every valid episode, without branches, with its index among the turns of its agent."""
    found: list[tuple[TurnKey, Turn, int]] = []
    for g, group in enumerate(groups):
        for e, episode in enumerate(group.episodes):
            rounds = enumerate(episode.rounds(trained=True))
            number = {turn.index: k for k, movers in rounds for turn in movers.values()}
            if episode.error is None:
                found += [(TurnKey(g, e, t.index), t, number[t.index]) for t in episode.turns if t.trained]
    return found


def label_of(episode: Episode, turn: Turn) -> float | None:
    """Return the correctness of a turn's answer in [0, 1], or None if the answer was not graded.

    The correctness is the score of the turn. If the turn has no score and is the last turn of its agent, the correctness is the
    terminal reward of the agent.
    """
    if turn.score is not None:
        return turn.score
    if turn.agent in episode.rewards and turn is episode.by(turn.agent)[-1]:
        return episode.rewards[turn.agent]
    return None
