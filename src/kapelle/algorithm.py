"""What an algorithm is: one row of choices over shared pure functions.

`credit` turns groups of episodes into an advantage for every token that is trained on; `policy_loss`
turns the trainer's log-probs and those advantages into a sum and a weight. Sampling, sharing of weights, packing of
batches and reduction of gradients are the library's.

Shapes: K tokens that are trained on in one batch, S sequences, T tokens of one turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

from kapelle.errors import ConfigError, KapelleError
from kapelle.functional.calibration import Kind
from kapelle.runtime.foreign_code import check_parameters, place_of, reason
from kapelle.runtime.plugins import catalogue, find_class

if TYPE_CHECKING:
    from torch import Tensor

    from kapelle.rows import Learners, Sample, Signal, Signals, TurnKey
    from kapelle.team import Team
    from kapelle.types import Episode, Group, Turn


@dataclass(frozen=True, slots=True)
class Credit:
    """The credit of one turn, token by token."""

    advantage_T: Tensor
    return_T: Tensor | None = None
    """Target of the critic at each of its values, `[T]` or `[1]` (`CriticSpec.unit`); None without a critic."""
    weight: float = 1.0
    """How often the turn counts, in its policy's loss and in what that is divided by; 0 leaves it out. Losses of pairs read only
    whether it is 0; a loss of one's own finds others than 0 and 1 in `Column.WEIGHT`."""
    pair: int | None = None
    """The loss compares turns of one number: advantage +1 on the chosen side, −1 on the rejected."""
    after: Tensor | None = None
    """Target (scalar) of the critic's value after the turn: all that is to come once it is over. None where it is not known,
    and where nothing follows; read only where there is such a value (`Signals.after`)."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """The results of a forward pass for the K target tokens of one policy."""

    logp_K: Tensor
    entropy_K: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Targets:
    """The K target tokens of one policy in one batch, flat, turn after turn."""

    segment_K: Tensor
    """Index (0 … S−1) of the sequence that each token belongs to; int64, ascending."""
    segments: int
    """S."""
    mask_K: Tensor
    """1.0 where a token counts."""
    columns: Mapping[str, Tensor]
    """Per-token columns: see `rows.Column`, whose members are these strings."""
    pair_S: Tensor | None = None
    """Number of the pair that each sequence is a side of (`Credit.pair`), int64; None where nothing is paired."""
    observed_S: Tensor | None = None
    """1.0 for sequences that the agent observed, 0.0 for those that it wrote; None if it wrote them all."""

    def __getitem__(self, column: str) -> Tensor:
        return self.columns[column]


class Loss(NamedTuple):
    """An unnormalised loss: the engine divides by the policy's global weight."""

    total: Tensor
    """Sum over the batch, scalar, with gradient."""
    weight: Tensor
    """Divisor of the sum over the whole update, scalar, without gradient."""
    metrics: Mapping[str, tuple[Tensor, Tensor]] = {}
    """Name → (sum, weight), both detached."""


PolicyLoss: TypeAlias = Callable[[Outputs, Targets], Loss]
"""A pure function of a forward pass and its targets."""


CriticLoss: TypeAlias = "Callable[[Tensor, Targets], Loss]"
"""A pure function of values `_K` and targets."""


CreditFunction: TypeAlias = "Callable[[Sequence[Group], Signals], Mapping[TurnKey, Credit]]"
"""Turns groups into credit for every turn that is trained on; pure."""


MIXER_UNDONE = "mixer_undone"
"""Metric of a credit's memory: 1.0 if its fit broke its weights and was undone; absent otherwise."""


class CreditMemory(Protocol):
    """Credit that remembers or learns from step to step: baselines, mixers, replay.

    Everything that it keeps is in `state`, so that a resumed run continues bit for bit.
    """

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return credit for every turn that is trained on, and remember the step."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the last call."""
        ...

    def state(self) -> dict[str, object]:
        """Return what is remembered, as a tree of tensors and plain values."""
        ...

    def load_state(self, state: Mapping[str, object]) -> None:
        """Restore what `state` returned."""
        ...


Choose: TypeAlias = Callable[[Sequence[str], int, int], tuple[str, ...]]
"""(policies, step, seed) → the policies that the step updates, in order; pure."""


def everybody(policies: Sequence[str], step: int, seed: int) -> tuple[str, ...]:
    """Return all policies: the joint order."""
    return tuple(policies)


class Mover(NamedTuple):
    """The two calls that an order makes to a train engine."""

    update: Callable[[Sequence[Sample]], dict[str, float]]
    """Takes the optimiser steps of all learners of the samples; returns metrics."""
    score: Callable[[Sequence[Sample]], list[Tensor]]
    """Log-probs `_T` of each sample's targets by the current weights."""


class UpdateSamples(NamedTuple):
    """What one update learns from."""

    policies: Mapping[TurnKey, Sample]
    """Each credited turn's sample."""
    critics: Sequence[Sample]
    """What critics learn from."""
    groups: Sequence[Group]
    """The episodes that the samples are of."""


Move: TypeAlias = Callable[[Mover, Sequence[str], UpdateSamples], dict[str, float]]
"""Takes the optimiser steps of the chosen policies and of all critics; returns metrics."""


def at_once(mover: Mover, chosen: Sequence[str], samples: UpdateSamples) -> dict[str, float]:
    """Update the chosen policies and all critics in one pass."""
    own = (sample for sample in samples.policies.values() if sample.learner in chosen)
    everything = [*own, *samples.critics]
    return mover.update(everything) if everything else {}


@dataclass(frozen=True, slots=True)
class Order:
    """Which policies an update changes, and whether at once or one after another."""

    choose: Choose = everybody
    move: Move = at_once

    @property
    def sequential(self) -> bool:
        """Whether policies are updated one after another, in separate optimiser steps."""
        return self.move is not at_once


@dataclass(frozen=True, slots=True)
class CriticSpec:
    """What an algorithm needs from critics."""

    view: Literal["local", "central", "answer"]
    """`local` reads the agent's own observation; `central` everything that all agents read and wrote; `answer` the
    task's question and the turn's text only, and gives one value at the text's end."""
    loss: CriticLoss
    sharing: Literal["own", "shared"]
    """Default of `team.critic_sharing`."""
    coefficient: float = 1.0
    unit: Literal["token", "turn", "after"] = "token"
    """One value before each completion token, one before the whole turn, or one after it: what the turn is worth, Q. The view
    `central` then holds what others answered at the same moment too."""
    bootstraps: bool = True
    """Whether credit reads the values after turns that a limit cut short; critics then learn them. The view `answer` has
    none."""
    everyone: bool = False
    """True if one critic judges all agents, also those that are not trained (a verifier)."""
    ends: Callable[[str, str], Sequence[int]] | None = None
    """For the view `answer`: question and text → ascending numbers of characters; one more value stands after each of these
    parts of the text, before the one at its end. None asks for that one alone."""
    calibration: Kind = "none"
    """How the scores of a verifier become probabilities: fitted on half of the held-out questions (`training.held_out`)."""


JointAction = tuple[int, ...]
"""One candidate (its number) for each agent that moves at a moment."""


JudgedBy: TypeAlias = Callable[[Sequence[int], int, int], Sequence[JointAction]]
"""(number of candidates of each agent, mover, candidate) → the joint actions that give the candidate its worth; pure."""


@dataclass(frozen=True, slots=True)
class Tree:
    """How an episode branches: what is sampled at a moment, its worth, and how the episode continues."""

    candidates: int
    """Sampled from one prompt at every turn of a trained agent."""
    continuations: int
    """Continuations of the episode from each joint action."""
    returns: Callable[[Episode], Mapping[str, float]]
    """Each agent's return over a whole played episode: what was paid before the moment is the same for all candidates and
    cancels."""
    judged_by: JudgedBy
    chosen: Callable[[Sequence[float]], int]
    """Worths of one agent's candidates → the number of the one that the episode continues with."""


@dataclass(frozen=True, slots=True)
class Interventions:
    """What is changed of every played episode, and how often it is played on then; `rollout.interventions` plays them."""

    change: Callable[[Group, int, Team], Sequence[Change]]
    """(group, episode's number, team) → the changes to the episode."""
    continuations: int
    """Of each change; the n-th ones of all changes at one moment use the same seeds."""
    returns: Callable[[Episode], Mapping[str, float]]
    """Each agent's return over a whole played episode."""
    share: float | None = None
    """Most tokens of all continuations, as a share of those that the group's episodes sampled; None for no bound."""
    tokens: int | None = None
    """Most tokens of all continuations of a step, the same for each of its groups; None for no bound."""
    says: Callable[[Group], Callable[[Slot], float]] | None = None
    """A group without one of its episodes → how much a change of that one says, by its slot; where there is a bound, those that say
    most are played. None takes them as they are listed."""


class Slot(NamedTuple):
    """What the changes to several episodes of a group have in common."""

    agents: tuple[str, ...]
    """Who is changed."""
    number: int | None
    """Which turn of the agent it is, from 0; None where all turns change."""


class Change(NamedTuple):
    """One intervention: what is changed of an episode."""

    what: Literal["resample", "replace", "remove", "swap"]
    agents: tuple[str, ...]
    """Who is changed."""
    turn: int | None = None
    """Index of the turn that is sampled anew, or replaced; of agents who are removed or swapped, all turns change."""
    by: Turn | str | None = None
    """The turn that replaces it, read from the same prompt; the name of the policy that is swapped in."""


@dataclass(frozen=True, slots=True)
class Data:
    """Where the episodes of a step come from, and what they must contain."""

    source: Literal["rollout", "demonstrations"] = "rollout"
    group_size: int = 1
    """Episodes per task."""
    tree: Tree | None = None
    """How episodes branch at every turn of a trained agent; None plays whole episodes."""
    widths: tuple[int, ...] = ()
    """How a group's episodes branch: each first moment is sampled so many times, each second moment after it so many times, and
    so on; `group_size` is their product. Episodes of one branch share their turns up to where it parts."""
    interventions: Interventions | None = None
    """What is changed of every played episode to see what it makes of the rest."""
    redraw: int = 0
    """How often a task whose group has no variance may be replaced by another in the same step."""
    scores: bool = False
    """True if credit reads `Turn.score`; the workflow must then have turns scored."""
    observations: float = 0.0
    """Weight of the observations that follow, for algorithms without credit; 0 leaves them out."""


@dataclass(frozen=True, slots=True)
class Update:
    """How the optimiser goes through a step's data."""

    epochs: int = 1
    """Passes over a step's data."""
    minibatches: int = 1
    """Optimiser steps per pass."""
    order: Order = Order()
    entropy: bool = False
    """True when the loss reads `Outputs.entropy_K`."""


class AfterUpdate(Protocol):
    """A hook on the weights after every step's update, before they are published."""

    @property
    def moves_weights(self) -> bool:
        """Whether it gives policies other weights than their update did; then no rollout may run ahead."""
        ...

    def __call__(self, step: int, team: Team, engine: Learners) -> None:
        """Run after step `step` (from 1); do nothing if it is not due."""
        ...


@runtime_checkable
class _AsksCritics(Protocol):
    critic: CriticSpec


S = TypeVar("S")


class Taught:
    """Settings of an algorithm whose policies learn from a teacher, which may be named by an earlier run."""

    teacher: str | dict[str, str]
    """One teacher for all policies, or one for each by the policy's name; a run stands for the policy's own folder in it."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One row: where data come from, how credit is given, what is minimised, in which order."""

    name: str
    policy_loss: PolicyLoss
    """Of every step; with `annealed`, of the first."""
    credit: CreditFunction | None = None
    """None for algorithms that learn from demonstrations. With a `memory` it is the credit of a first step."""
    data: Data = Data()
    needs: tuple[Signal, ...] = ()
    """What credit and losses need to know about the sampled turns (`kapelle.algorithms.signals`)."""
    update: Update = Update()
    memory: Callable[[Team, int], CreditMemory] | None = None
    """Makes, from a team and a seed, what gives credit in place of `credit`."""
    memory_learns: bool = False
    """Whether the memory is fitted to what is earned, as a critic is, and may learn alone at first (`training.critic_warmup`)."""
    returns: Callable[[Episode], Mapping[str, float]] | None = None
    """Each agent's undiscounted return that it is trained on, after sharing of rewards; None for no sharing."""
    after_update: tuple[AfterUpdate, ...] = ()
    """Done in this order after every update."""
    checks: tuple[Callable[[Team], None], ...] = ()
    """Each raises ConfigError if the algorithm cannot train a team."""
    lacks: str = "no turn has credit"
    """What is missing where a step's episodes teach nothing, in words."""
    annealed: Callable[[float], PolicyLoss] | None = None
    """Share of the run's steps that are done → the loss of the next one; None for one loss throughout."""

    def need(self, kind: type[S]) -> S | None:
        """Return the signal of a kind that it needs; None if it needs none."""
        return next((signal for signal in self.needs if isinstance(signal, kind)), None)

    @property
    def critic(self) -> CriticSpec | None:
        """What it needs from critics; None without critics."""
        return next((signal.critic for signal in self.needs if isinstance(signal, _AsksCritics)), None)

    @property
    def judges(self) -> bool:
        """Whether it trains a verifier."""
        return self.critic is not None and self.critic.everyone

    @property
    def plays(self) -> bool:
        """Whether it learns from the team's own episodes."""
        return self.data.source == "rollout"

    @property
    def attempts(self) -> int:
        """How many attempts are compared with one another: the episodes of a task, or a tree's candidates."""
        return self.data.group_size if self.data.tree is None else self.data.tree.candidates


_OF_GRPO = "`algorithm.name: grpo` and {} (docs/algorithms/grpo.md)"
ELSEWHERE = {
    "dapo": _OF_GRPO.format("`algorithm.loss.clip_high: 0.28`, `algorithm.redraw: 3`"),
    "dr_grpo": _OF_GRPO.format("`algorithm.scale: none`, `algorithm.loss.aggregation: sequence_sum`"),
    "gspo": _OF_GRPO.format("`algorithm.loss.level: sequence`"),
    "cispo": _OF_GRPO.format("`algorithm.loss.kind: cispo`"),
    "sapo": _OF_GRPO.format("`algorithm.loss.kind: sapo`"),
    "ipo": "`algorithm.name: dpo` and `algorithm.kind: ipo`",
    "gae": "`algorithm.name: ppo`",
    "gae_marft": "`algorithm.name: marft`",
    "iac": "`algorithm.name: ippo`",
    "maac": "`algorithm.name: mappo`",
    "marloo": "`algorithm.name: rloo`",
    "maremax": "`algorithm.name: remax`",
    "madpo": "`algorithm.name: dpo`",
    "gkd": "`algorithm.name: distill`",
}
"""Names that papers and other libraries have for what settings give here → those settings."""


def algorithm_class(name: str) -> type:
    """Return the settings class of an algorithm by name, `module:Class` or entry point."""
    if name.lower() in ("sac", "td3", "ddpg"):
        raise ConfigError(
            f"There is no algorithm '{name}', for the reason in docs/explanations/which_algorithm.md. Take `a2c`, or `ppo` with a KL penalty."
        )
    if name.lower() in ELSEWHERE:
        raise ConfigError(f"No algorithm is called '{name}' here. Set {ELSEWHERE[name.lower()]}.")
    return find_class("algorithm", name, catalogue("kapelle.algorithms"))


# -------- What an algorithm's settings build, looked at before a model is loaded: its code may be anybody's


def row_of(name: str, build: Callable[[], Algorithm]) -> Algorithm:
    """Return the row that the settings of an algorithm build.

    ConfigError, which names the algorithm, where `build` raises or returns something else, or the row has a part of a wrong type.
    """
    who = f"Algorithm '{name}'"
    try:
        row: object = build()
    except KapelleError:
        raise
    except Exception as error:
        if not place_of(error):
            raise
        raise ConfigError(f"{who}: `build` raises {reason(error)}.") from error
    if not isinstance(row, Algorithm):
        raise ConfigError(f"{who}: `build` returns {row!r:.60}. Return a kapelle.Algorithm.")
    for path, right, mend in _PARTS:
        value = attrgetter(path)(row)
        if not right(value):
            raise ConfigError(f"{who}: `{path}` is {value!r:.60}. {mend}")
    if row.plays and row.credit is None and row.memory is None:
        raise ConfigError(
            f"{who} plays and gives no credit. Give `credit`, a function of groups and signals that returns credit by `TurnKey`."
        )
    signals: Sequence[object] = row.needs
    for signal in signals:
        if isinstance(signal, type) or not callable(getattr(signal, "gather", None)):
            made = f"{signal.__name__}()" if isinstance(signal, type) else "MySignal()"
            raise ConfigError(
                f"{who}: `needs` holds {signal!r:.60}, which is not a signal. Put an instance such as {made} there; a signal has "
                "a method `gather`."
            )
    for hook in row.after_update:
        if not _is_function(hook) or not hasattr(hook, "moves_weights"):
            raise ConfigError(
                f"{who}: `after_update` holds {hook!r:.60}, which is not a hook. Put an instance there whose class has "
                "`__call__(step, team, engine)` and `moves_weights`."
            )
    for check in row.checks:
        if not _is_function(check):
            raise ConfigError(
                f"{who}: `checks` holds {check!r:.60}. Put functions of a team there, which raise ConfigError."
            )
    takes: list[tuple[str, object, tuple[str, ...]]] = [
        ("`policy_loss`", row.policy_loss, ("outputs", "targets")),
        ("`annealed`", row.annealed, ("done",)),
        ("`credit`", row.credit, ("groups", "signals")),
        ("`memory`", row.memory, ("team", "seed")),
        ("`returns`", row.returns, ("episode",)),
        *((f"`gather` of {type(each).__name__}", each.gather, ("step", "engine")) for each in row.needs),
        *((f"the hook {type(each).__name__}", each, ("step", "team", "engine")) for each in row.after_update),
        *((f"the check `{each!r:.60}`", each, ("team",)) for each in row.checks),
    ]
    for what, function, names in takes:
        if callable(function):
            check_parameters(f"{who}: {what}", function, *names)
    critic: object = row.critic
    if critic is not None and not (isinstance(critic, CriticSpec) and _is_function(critic.loss)):
        raise ConfigError(
            f"{who}: the `critic` of a signal is {critic!r:.60}. Give a kapelle.algorithm.CriticSpec whose `loss` is a function."
        )
    return row


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type)


def _one_or_more(value: object) -> bool:
    return type(value) is int and value >= 1


def _is_tuple(value: object) -> bool:
    return isinstance(value, tuple | list)


_COUNT = "Give a whole number from 1 on."
_COMMA = "Write a tuple, with a comma after a single entry: "
_PARTS: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    ("name", lambda value: isinstance(value, str), "Give a text."),
    ("data", lambda value: isinstance(value, Data), "Give a kapelle.algorithm.Data."),
    ("data.source", lambda value: value in ("rollout", "demonstrations"), "Write 'rollout' or 'demonstrations'."),
    ("data.group_size", _one_or_more, _COUNT),
    ("update", lambda value: isinstance(value, Update), "Give a kapelle.algorithm.Update."),
    ("update.order", lambda value: isinstance(value, Order), "Give a kapelle.algorithm.Order."),
    ("update.epochs", _one_or_more, _COUNT),
    ("update.minibatches", _one_or_more, _COUNT),
    ("policy_loss", _is_function, "Give a function of `Outputs` and `Targets` that returns a `Loss`."),
    (
        "annealed",
        lambda value: value is None or _is_function(value),
        "Give a function of the share of the run that is done, which returns a loss such as `policy_loss`, or None.",
    ),
    (
        "credit",
        lambda value: value is None or _is_function(value),
        "Give a function of groups and signals that returns credit by `TurnKey`, such as the method `self.credit`, or None.",
    ),
    (
        "memory",
        lambda value: value is None or callable(value),
        "Give a function of a team and a seed that returns a `CreditMemory`, or None.",
    ),
    (
        "returns",
        lambda value: value is None or callable(value),
        "Give a function of an episode that returns each agent's return, or None.",
    ),
    ("needs", _is_tuple, f"{_COMMA}(MySignal(),)."),
    ("after_update", _is_tuple, f"{_COMMA}(MyHook(),)."),
    ("checks", _is_tuple, f"{_COMMA}(my_check,)."),
)  # fmt: skip
"""Parts of a row in the order in which they are looked at, whether one is right, and what to write where it is not."""
