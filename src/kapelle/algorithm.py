"""Algorithms: an algorithm is one row of choices over shared pure functions.

`credit` turns groups of episodes into an advantage for every trained token. `policy_loss` turns the trainer's log-probs and these
advantages into a sum and a weight. The library does the rest: sampling, weight sharing, packing and gradient reduction.

Shapes: K trained tokens of one batch, S sequences, T tokens of one turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

from kapelle.errors import ConfigError, KapelleError, noting
from kapelle.functional.calibration import Kind
from kapelle.runtime.foreign_code import check_parameters, place_of, reason
from kapelle.runtime.plugins import catalogue, find_class

if TYPE_CHECKING:
    from torch import Tensor

    from kapelle.rows import Learners, Sample, Signal, Signals, TurnKey
    from kapelle.settings.checks import Check, RunToCheck
    from kapelle.team import Team
    from kapelle.types import Episode, Group, Turn


@dataclass(frozen=True, slots=True)
class Credit:
    """The credit of one turn, per token."""

    advantage_T: Tensor
    return_T: Tensor | None = None
    """Targets of the critic's values, `[T]` or `[1]` (`CriticSpec.unit`); None without a critic."""
    weight: float = 1.0
    """Weight of the turn in its policy's loss and in the loss's divisor; 0 excludes it. Losses over pairs use only whether
    it is 0. A custom loss reads weights other than 0 and 1 from `Column.WEIGHT`."""
    pair: int | None = None
    """Number of the turn's pair, for losses over pairs; the advantage is +1 on the chosen side and −1 on the rejected side."""
    after: Tensor | None = None
    """Target (scalar) of the critic's value after the turn, which estimates everything that follows. None if it is unknown or
    nothing follows; used only in steps with such values (`Signals.after`)."""


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
    """1.0 for tokens that count, else 0.0."""
    columns: Mapping[str, Tensor]
    """Per-token columns: see `rows.Column`, whose members are these strings."""
    pair_S: Tensor | None = None
    """Number of each sequence's pair (`Credit.pair`), int64; None without pairs."""
    observed_S: Tensor | None = None
    """1.0 for sequences that the agent observed, 0.0 for sequences that it wrote; None if it wrote all."""

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
"""A pure function of groups and signals that returns credit for every trained turn."""


MIXER_UNDONE = "mixer_undone"
"""Metric of a credit memory: 1.0 if its fit made weights non-finite and was undone, otherwise absent."""


class CreditMemory(Protocol):
    """Credit with state between steps: baselines, mixers, replay.

    `state` contains all of this state, so that a resumed run is bitwise identical. A subclass can omit methods that it does not need.
    """

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return credit for every trained turn, and update the state with the step."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the last call; by default none."""
        return {}

    def state(self) -> dict[str, object]:
        """Return the state as a tree of tensors and plain values; by default empty."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned."""
        return


Choose: TypeAlias = Callable[[Sequence[str], int, int], tuple[str, ...]]
"""(policies, step, seed) → the policies that the step updates, in order; pure."""


def everybody(policies: Sequence[str], step: int, seed: int) -> tuple[str, ...]:
    """Return all policies, in the given order."""
    return tuple(policies)


class Mover(NamedTuple):
    """The two calls that an order makes to a train engine."""

    update: Callable[[Sequence[Sample]], dict[str, float]]
    """Function that takes the optimiser steps of all learners of the samples and returns metrics."""
    score: Callable[[Sequence[Sample]], list[Tensor]]
    """Function that returns log-probs `_T` of each sample's targets under the current weights."""


class UpdateSamples(NamedTuple):
    """The samples of one update."""

    policies: Mapping[TurnKey, Sample]
    """Sample of each turn with credit."""
    critics: Sequence[Sample]
    """Samples of the critics."""
    groups: Sequence[Group]
    """The episodes from which the samples come."""


Move: TypeAlias = Callable[[Mover, Sequence[str], UpdateSamples], dict[str, float]]
"""Function that takes the optimiser steps of the chosen policies and of all critics, and returns metrics."""


def at_once(mover: Mover, chosen: Sequence[str], samples: UpdateSamples) -> dict[str, float]:
    """Update the chosen policies and all critics in one pass."""
    own = [sample for sample in samples.policies.values() if sample.learner in chosen]
    learning = [*own, *samples.critics]
    return mover.update(learning) if learning else {}


@dataclass(frozen=True, slots=True)
class Order:
    """The policies that a step updates, and whether it updates them together or one after another."""

    choose: Choose = everybody
    move: Move = at_once

    @property
    def sequential(self) -> bool:
        """Whether policies are updated one after another, in separate optimiser steps."""
        return self.move is not at_once


@dataclass(frozen=True, slots=True)
class CriticSpec:
    """The critics that an algorithm needs."""

    view: Literal["local", "central", "answer"]
    """Input of the critic: the agent's own observation (`local`), everything that all agents read and wrote (`central`), or the
    question and the turn's text (`answer`). `answer` gives one value at the text's end."""
    loss: CriticLoss
    sharing: Literal["own", "shared"]
    """Default of `team.critic_sharing`."""
    coefficient: float = 1.0
    """Weight of the critic's loss."""
    unit: Literal["token", "turn", "after"] = "token"
    """One value before each completion token, one before the turn, or one after the turn (Q). With `after`, the view `central`
    includes simultaneous completions of other agents."""
    bootstraps: bool = True
    """Whether credit uses the values after turns of truncated episodes, which critics then learn. The view `answer` has no such values."""
    everyone: bool = False
    """Whether one critic evaluates all agents, including frozen ones (a verifier)."""
    ends: Callable[[str, str], Sequence[int]] | None = None
    """For the view `answer`: question and text → ascending positions in characters, each with an additional value after that
    part of the text. None gives only the value at the end."""
    calibration: Kind = "none"
    """Mapping from a verifier's scores to probabilities, fitted on half of the held-out questions (`training.held_out`)."""


JointAction = tuple[int, ...]
"""The number of one candidate for each agent that moves at a moment."""


JudgedBy: TypeAlias = Callable[[Sequence[int], int, int], Sequence[JointAction]]
"""(number of candidates of each agent, mover, candidate) → the joint actions that give the candidate its value; pure."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Tree sampling: the candidates at a moment, their values, and the candidate with which the episode continues."""

    candidates: int
    """Number of candidates per prompt at every turn of a trained agent."""
    continuations: int
    """Number of continuations of the episode per joint action."""
    returns: Callable[[Episode], Mapping[str, float]]
    """Episode → each agent's return over the whole episode. Rewards before the moment are equal for all candidates, so they cancel."""
    judged_by: JudgedBy
    chosen: Callable[[Sequence[float]], int]
    """Values of one agent's candidates → the number of the candidate with which the episode continues."""


@dataclass(frozen=True, slots=True)
class Interventions:
    """Changes of every episode and their continuations; `rollout.interventions` runs them."""

    change: Callable[[Group, int, Team], Sequence[Change]]
    """(group, episode's number, team) → the changes of the episode."""
    continuations: int
    """Number of continuations per change; the n-th continuations of all changes at one moment use the same seeds."""
    returns: Callable[[Episode], Mapping[str, float]]
    """Episode → each agent's return over the whole episode."""
    share: float | None = None
    """Maximum tokens of all continuations, as a share of the tokens of the group's episodes; None for no limit."""
    tokens: int | None = None
    """Maximum tokens of all continuations of a step, divided equally among its groups; None for no limit."""
    says: Callable[[Group], Callable[[Slot], float]] | None = None
    """Group without one of its episodes → the priority of a change of that episode, by its slot. If there is a limit, the changes with
    the highest priority are continued. None keeps the listed order."""


class Slot(NamedTuple):
    """The place of a change, for comparison across the episodes of a group."""

    agents: tuple[str, ...]
    """The changed agents."""
    number: int | None
    """Number of the agent's turn, from 0; None if all its turns change."""


class Change(NamedTuple):
    """One intervention: a change of an episode."""

    what: Literal["resample", "replace", "remove", "swap"]
    agents: tuple[str, ...]
    """The changed agents."""
    turn: int | None = None
    """Index of the turn that is resampled or replaced; for `remove` and `swap`, all turns of the agents change."""
    by: Turn | str | None = None
    """The replacement: a turn with the same prompt, or the name of the policy that is swapped in."""


@dataclass(frozen=True, slots=True)
class Data:
    """The source of a step's episodes, and requirements on them."""

    source: Literal["rollout", "demonstrations"] = "rollout"
    group_size: int = 1
    """Number of episodes per task."""
    tree: Tree | None = None
    """Tree sampling at every turn of a trained agent; None samples whole episodes."""
    widths: tuple[int, ...] = ()
    """Number of samples at each first moment, at each second moment after it, and so on; `group_size` is their product. Episodes
    of one branch share their turns up to the next branch."""
    interventions: Interventions | None = None
    """Changes of every episode that measure the effect of a turn or an agent."""
    redraw: int = 0
    """Maximum number of times that a task whose group has no variance is replaced by another task in the same step."""
    scores: bool = False
    """Whether credit reads `Turn.score`; if so, the workflow must score turns."""
    observations: float = 0.0
    """Weight of the agent's next observations, for algorithms without credit; 0 excludes them."""


@dataclass(frozen=True, slots=True)
class Update:
    """The optimiser's passes over a step's data."""

    epochs: int = 1
    """Number of passes over a step's data."""
    minibatches: int = 1
    """Number of optimiser steps per pass."""
    order: Order = Order()
    entropy: bool = False
    """Whether the loss reads `Outputs.entropy_K`."""


class AfterUpdate(Protocol):
    """A hook on the weights after every step's update, before they are published."""

    @property
    def moves_weights(self) -> bool:
        """Whether the hook changes policies' weights; if so, rollouts cannot run ahead of the update."""
        ...

    def __call__(self, step: int, team: Team, engine: Learners) -> None:
        """Run the hook after step `step` (from 1)."""
        ...


@runtime_checkable
class _NeedsCritics(Protocol):
    critic: CriticSpec


S = TypeVar("S")


class Taught:
    """Settings of an algorithm whose policies learn from a teacher."""

    teacher: str | dict[str, str]
    """One teacher for all policies, or policy → teacher; if a teacher is a run, its policy of the same name is used."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One row: the source of data, the credit, the loss, and the order of updates."""

    name: str
    policy_loss: PolicyLoss
    """Loss of every step; with `annealed`, only of the first step."""
    credit: CreditFunction | None = None
    """Credit function; None for algorithms that learn from demonstrations. With a `memory`, it gives the credit of the first step."""
    data: Data = Data()
    needs: tuple[Signal, ...] = ()
    """Signals that credit and losses need (`kapelle.algorithms.signals`)."""
    update: Update = Update()
    memory: Callable[[Team, int], CreditMemory] | None = None
    """(team, seed) → the credit memory that replaces `credit`."""
    memory_learns: bool = False
    """Whether the memory is fitted to returns, as a critic is, so that it can be trained alone before the policies
    (`training.critic_warmup`)."""
    returns: Callable[[Episode], Mapping[str, float]] | None = None
    """Episode → each agent's undiscounted return in training, after reward sharing; None for no sharing."""
    after_update: tuple[AfterUpdate, ...] = ()
    """Hooks that run in this order after every update."""
    checks: tuple[Callable[[Team], None], ...] = ()
    """Functions that raise ConfigError if the algorithm does not support a team."""
    lacks: str = "no turn has credit"
    """Message for a step from which nothing can be learned."""
    annealed: Callable[[float], PolicyLoss] | None = None
    """Share of the run's steps that are done → the loss of the next step; None if the loss is constant."""

    def need(self, kind: type[S]) -> S | None:
        """Return the signal of this kind that the algorithm needs; None if it needs none."""
        return next((signal for signal in self.needs if isinstance(signal, kind)), None)

    @property
    def critic(self) -> CriticSpec | None:
        """The critics that it needs; None if it needs none."""
        return next((signal.critic for signal in self.needs if isinstance(signal, _NeedsCritics)), None)

    @property
    def judges(self) -> bool:
        """Whether it trains a verifier."""
        return self.critic is not None and self.critic.everyone

    @property
    def collects_episodes(self) -> bool:
        """Whether it learns from the team's own episodes."""
        return self.data.source == "rollout"

    @property
    def attempts(self) -> int:
        """Number of samples that are compared with one another: the episodes of a task, or a tree's candidates."""
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
"""Name of an algorithm in papers or other libraries → the settings that select it in kapelle."""


def algorithm_class(name: str) -> type:
    """Return the settings class of an algorithm by name, `module:Class` or entry point."""
    if name.lower() in ("sac", "td3", "ddpg"):
        raise ConfigError(
            f"The algorithm '{name}' does not exist in kapelle (docs/explanations/which_algorithm.md explains why). Use `a2c`, or `ppo` "
            "with a KL penalty."
        )
    if name.lower() in ELSEWHERE:
        raise ConfigError(
            f"The algorithm '{name}' has a different name in kapelle. Set {ELSEWHERE[name.lower()]}."
        )
    return find_class("algorithm", name, catalogue("kapelle.algorithms"))


# -------- Checks of a row before a model is loaded, because a user's own code may build it


def row_of(name: str, build: Callable[[], Algorithm]) -> Algorithm:
    """Return the row that the settings of an algorithm build.

    Raises ConfigError, with the algorithm's name, if `build` raises an error, or if the row or one of its parts has a wrong type.
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
    _check_types(who, row)
    if row.collects_episodes and row.credit is None and row.memory is None:
        raise ConfigError(
            f"{who} learns from rollouts but has no `credit`. Give a function of groups and signals that returns credit by "
            "`TurnKey`."
        )
    signals: Sequence[object] = row.needs
    for signal in signals:
        if isinstance(signal, type) or not callable(getattr(signal, "gather", None)):
            example = f"{signal.__name__}()" if isinstance(signal, type) else "MySignal()"
            raise ConfigError(
                f"{who}: `needs` contains {signal!r:.60}, which is not a signal. Use an instance with a method `gather`, such as "
                f"{example}."
            )
    for hook in row.after_update:
        if not _is_function(hook) or not hasattr(hook, "moves_weights"):
            raise ConfigError(
                f"{who}: `after_update` contains {hook!r:.60}, which is not a hook. Use an instance whose class has "
                "`__call__(step, team, engine)` and `moves_weights`."
            )
    for check in row.checks:
        if not _is_function(check):
            raise ConfigError(
                f"{who}: `checks` contains {check!r:.60}. Use functions that take a team and raise ConfigError."
            )
    signatures: list[tuple[str, object, tuple[str, ...]]] = [
        ("`policy_loss`", row.policy_loss, ("outputs", "targets")),
        ("`annealed`", row.annealed, ("done",)),
        ("`credit`", row.credit, ("groups", "signals")),
        ("`memory`", row.memory, ("team", "seed")),
        ("`returns`", row.returns, ("episode",)),
        *((f"`gather` of {type(each).__name__}", each.gather, ("step", "engine")) for each in row.needs),
        *((f"the hook {type(each).__name__}", each, ("step", "team", "engine")) for each in row.after_update),
        *((f"the check `{each!r:.60}`", each, ("team",)) for each in row.checks),
    ]
    for what, function, names in signatures:
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


def _check_types(who: str, row: Algorithm) -> None:
    """Raise ConfigError for the first part of a row with a wrong type."""

    def need(is_valid: bool, part: str, fix: str) -> None:
        if not is_valid:
            raise ConfigError(f"{who}: `{part}` is {attrgetter(part)(row)!r:.60}. {fix}")

    need(isinstance(row.name, str), "name", "Give a text.")
    need(isinstance(row.data, Data), "data", "Give a kapelle.algorithm.Data.")
    need(
        row.data.source in ("rollout", "demonstrations"), "data.source", "Give 'rollout' or 'demonstrations'."
    )
    need(isinstance(row.update, Update), "update", "Give a kapelle.algorithm.Update.")
    need(isinstance(row.update.order, Order), "update.order", "Give a kapelle.algorithm.Order.")
    for part in ("data.group_size", "update.epochs", "update.minibatches"):
        number = attrgetter(part)(row)
        need(type(number) is int and number >= 1, part, "Give a whole number of at least 1.")
    loss = "Give a function of `Outputs` and `Targets` that returns a `Loss`."
    need(_is_function(row.policy_loss), "policy_loss", loss)
    for part, arguments in (
        ("annealed", "the share of the run that is done"),
        ("credit", "groups and signals"),
        ("memory", "a team and a seed"),
        ("returns", "an episode"),
    ):
        value = getattr(row, part)
        need(value is None or _is_function(value), part, f"Give a function of {arguments}, or None.")
    for part, entry in (("needs", "MySignal()"), ("after_update", "MyHook()"), ("checks", "my_check")):
        is_tuple = isinstance(getattr(row, part), tuple | list)
        need(is_tuple, part, f"Write a tuple, with a comma after a single entry: ({entry},).")


# -------- Checks of a run with the algorithm


def check_learners(run: RunToCheck) -> Iterator[str]:
    """Yield a message if no weights are trained, or if the algorithm does not train them; raise ConfigError for unsuitable teams."""
    algorithm, team = run.algorithm, run.team
    if algorithm.judges and team.trained:
        yield f"`{algorithm.name}` does not train agents, but policy '{team.trained[0]}' of this team is trained. Set `team.sharing: frozen`."
    elif not algorithm.judges and not team.trained:
        yield "No agent of this team is trained. Set `team.sharing: lora` or `shared`, or an agent's `weights`."
    else:
        for check in algorithm.checks:
            with noting(run.absent):
                check(team)


def check_critic_warmup(run: RunToCheck) -> Iterator[str]:
    """Yield a message if critics cannot be trained alone at first."""
    algorithm = run.algorithm
    learns_beside = algorithm.critic is not None or algorithm.memory_learns
    if run.config.training.critic_warmup and (not learns_beside or algorithm.judges):
        others = "nothing else" if algorithm.judges else "no critic"
        yield f"`training.critic_warmup` trains only critics at first, but `{algorithm.name}` trains {others}. Set it to 0."


def check_one_tokeniser(run: RunToCheck) -> Iterator[str]:
    """Yield a message if a central critic would read token ids of different tokenisers."""
    algorithm, team = run.algorithm, run.team
    if algorithm.critic is None or algorithm.critic.view != "central" or run.config.team.critic_model:
        return
    kinds: dict[str, str] = {}
    for agent in team.names:
        policy = team.policy(agent)
        kinds.setdefault("an endpoint" if policy.endpoint else f"'{team.bases[policy.base]}'", agent)
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.items())[:2]
        yield (
            f"`{algorithm.name}` reads the contexts of all agents as tokens of one model, but '{first}' has {one} and '{second}' has {other}. "
            "Set `team.critic_model`, which reads text, or `algorithm.name: ippo`."
        )


def check_sampling(run: RunToCheck) -> None:
    """Raise ConfigError for a trained agent whose sampling log-probs the trainer cannot compute."""
    for agent in run.team.agents if run.algorithm.collects_episodes else ():
        sampling = agent.sampling
        if not run.team.policy(agent.name).trained:
            continue
        if sampling.temperature <= 0:
            raise ConfigError(
                f"Agent '{agent.name}' is trained, but samples greedily. Set its `sampling.temperature` above 0."
            )
        if sampling.top_p < 1 or sampling.top_k > 0:
            raise ConfigError(
                f"Agent '{agent.name}' is trained, but the trainer cannot compute log-probs for samples drawn with top_p {sampling.top_p} "
                f"and top_k {sampling.top_k}. Set `top_p: 1` and `top_k: 0`."
            )


TRAINING_CHECKS: tuple[Check, ...] = (
    check_learners,
    check_critic_warmup,
    check_one_tokeniser,
    check_sampling,
)
