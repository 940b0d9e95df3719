"""The interface of algorithms: an algorithm combines a credit function, a loss and a few settings in one object (`Algorithm`).

The function `credit` computes an advantage for every trained token from groups of episodes. The function `policy_loss` computes an
unnormalised loss and its divisor from the trainer's log-probs and these advantages. The library handles sampling, weight sharing,
packing and gradient reduction.

Shapes: K is the number of trained tokens of one batch, S the number of sequences, and T the number of tokens of one turn.
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
    """The advantage of each token of one turn, and other training targets of this turn."""

    advantage_T: Tensor
    return_T: Tensor | None = None
    """Targets of the critic's values, of shape (T,) or (1,) depending on `CriticSpec.unit`, or None if there is no critic."""
    weight: float = 1.0
    """Weight of the turn in the loss of its policy and in the divisor of this loss; a turn with weight 0 is excluded. Losses over pairs
    only check whether the weight is 0. A custom loss reads weights other than 0 and 1 from `Column.WEIGHT`."""
    pair: int | None = None
    """Index of the pair to which the turn belongs, for losses over pairs. The advantage is +1 for the chosen turn of a pair and −1 for
    the rejected turn."""
    after: Tensor | None = None
    """Target (scalar) of the critic's value after the turn, which estimates the return of everything that follows the turn. None if the
    target is unknown or if nothing follows the turn. The target is used only in steps that compute such values (`Signals.after`)."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """The results of a forward pass for the K target tokens of one policy."""

    logp_K: Tensor
    entropy_K: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Targets:
    """The K target tokens of one policy in one batch, as flat tensors in the order of the turns."""

    segment_K: Tensor
    """Index (0 to S−1) of the sequence that each token belongs to, as an ascending int64 tensor."""
    segments: int
    """The number of sequences, S."""
    mask_K: Tensor
    """Mask with 1.0 for tokens that count in the loss and 0.0 for other tokens."""
    columns: Mapping[str, Tensor]
    """Additional values of each token by column name; `rows.Column` lists the column names."""
    pair_S: Tensor | None = None
    """Index of each sequence's pair (`Credit.pair`) as an int64 tensor, or None if there are no pairs."""
    observed_S: Tensor | None = None
    """Mask with 1.0 for sequences that the agent observed and 0.0 for sequences that the agent generated; None if the agent generated all
    of them."""

    def __getitem__(self, column: str) -> Tensor:
        return self.columns[column]


class Loss(NamedTuple):
    """An unnormalised loss. The engine divides the loss by the total weight of the policy."""

    total: Tensor
    """Sum of the loss over the batch, as a scalar tensor with gradient."""
    weight: Tensor
    """Contribution of the batch to the divisor, which is summed over the whole update; a scalar tensor without gradient."""
    metrics: Mapping[str, tuple[Tensor, Tensor]] = {}
    """Mapping from the name of each metric to its sum and its weight, both detached."""


PolicyLoss: TypeAlias = Callable[[Outputs, Targets], Loss]
"""A pure function that computes a loss from the outputs of a forward pass and the target tokens."""


CriticLoss: TypeAlias = "Callable[[Tensor, Targets], Loss]"
"""A pure function that computes a loss from the values of a critic and the target tokens."""


CreditFunction: TypeAlias = "Callable[[Sequence[Group], Signals], Mapping[TurnKey, Credit]]"
"""A pure function that computes the credit of every trained turn from groups of episodes and signals."""


MIXER_UNDONE = "mixer_undone"
"""Name of the metric that a credit memory reports with value 1.0 if its fit made weights non-finite and was therefore undone."""


class CreditMemory(Protocol):
    """A credit function that keeps state between steps, such as baselines, mixers or a replay buffer.

    The method `state` must return all of this state, so that a resumed run is bitwise identical. A subclass can omit methods that it
    does not need.
    """

    def __call__(self, groups: Sequence[Group], signals: Signals) -> Mapping[TurnKey, Credit]:
        """Return the credit of every trained turn, and update the state from the groups of the step."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the last call; the default is an empty mapping."""
        return {}

    def state(self) -> dict[str, object]:
        """Return the state as a tree of tensors and plain values; the default is an empty dict."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state that was returned by `state`."""
        return


Choose: TypeAlias = Callable[[Sequence[str], int, int], tuple[str, ...]]
"""A pure function of the policies, the step and the seed that returns the policies to update in this step, in order."""


def everybody(policies: Sequence[str], step: int, seed: int) -> tuple[str, ...]:
    """Return all policies in the given order."""
    return tuple(policies)


class Mover(NamedTuple):
    """The two methods of a train engine that an update order can call."""

    update: Callable[[Sequence[Sample]], dict[str, float]]
    """Function that takes the optimiser steps of all learners of the given samples and returns metrics."""
    score: Callable[[Sequence[Sample]], list[Tensor]]
    """Function that returns, for each sample, a tensor of shape (T,) with the log-probs of its target tokens under the current weights."""


class UpdateSamples(NamedTuple):
    """The samples of one update."""

    policies: Mapping[TurnKey, Sample]
    """Mapping from each turn with credit to its sample."""
    critics: Sequence[Sample]
    """Samples on which the critics are trained."""
    groups: Sequence[Group]
    """The episodes from which the samples come."""
    observed: Sequence[Sample] = ()
    """Samples of the policies' observations (`Data.observations`), which are part of the update of their policy."""


Move: TypeAlias = Callable[[Mover, Sequence[str], UpdateSamples], dict[str, float]]
"""Function that takes the optimiser steps of the chosen policies and of all critics, and returns metrics."""


def at_once(mover: Mover, chosen: Sequence[str], samples: UpdateSamples) -> dict[str, float]:
    """Update the chosen policies and all critics together."""
    samples_of_policies = (*samples.policies.values(), *samples.observed)
    own = [sample for sample in samples_of_policies if sample.learner in chosen]
    learning = [*own, *samples.critics]
    return mover.update(learning) if learning else {}


@dataclass(frozen=True, slots=True)
class Order:
    """The choice of the policies that a step updates, and whether the step updates them together or one after another."""

    choose: Choose = everybody
    move: Move = at_once

    @property
    def sequential(self) -> bool:
        """Whether policies are updated one after another, in separate optimiser steps."""
        return self.move is not at_once


@dataclass(frozen=True, slots=True)
class CriticSpec:
    """The type of critic that an algorithm needs."""

    view: Literal["local", "central", "answer"]
    """Input of the critic: the agent's own observation (`local`), all text that any agent read or wrote (`central`), or the question and
    the text of the turn (`answer`). With `answer`, the critic computes one value at the end of the text."""
    loss: CriticLoss
    sharing: Literal["own", "shared"]
    """Default of the setting `team.critic_sharing`."""
    coefficient: float = 1.0
    """Coefficient of the critic's loss."""
    unit: Literal["token", "turn", "after"] = "token"
    """Positions at which the critic computes values: before each completion token, before each turn, or after each turn (Q-value). With
    `after`, a critic with the view `central` also reads the simultaneous completions of other agents."""
    bootstraps: bool = True
    """Whether the credit function uses the values after turns of truncated episodes; if so, critics are also trained at these positions.
    The view `answer` has no such values."""
    everyone: bool = False
    """Whether one critic evaluates all agents, including frozen agents (a verifier)."""
    ends: Callable[[str, str], Sequence[int]] | None = None
    """For the view `answer`: a function that takes the question and the text and returns ascending character positions in the text. The
    critic computes an additional value at each of these positions. If None, the critic computes only the value at the end."""
    calibration: Kind = "none"
    """Type of calibration that maps the scores of a verifier to probabilities. The calibration is fitted on half of the held-out
    questions (`training.held_out`)."""


JointAction = tuple[int, ...]
"""Indices of the candidates that the agents choose, with one index for each agent that moves at the same moment."""


JudgedBy: TypeAlias = Callable[[Sequence[int], int, int], Sequence[JointAction]]
"""A pure function that returns the joint actions over which the value of a candidate is computed. The arguments are the number of
candidates of each agent, the index of the moving agent and the index of the candidate."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Settings of tree sampling: the candidates of each turn, their values, and the candidate with which the episode continues."""

    candidates: int
    """Number of candidate completions that are sampled per prompt at every turn of a trained agent."""
    continuations: int
    """Number of continuations of the episode that are sampled per joint action."""
    returns: Callable[[Episode], Mapping[str, float]]
    """Function that returns each agent's return over a whole episode. Rewards before the turn are equal for all candidates, so they
    cancel out."""
    judged_by: JudgedBy
    chosen: Callable[[Sequence[float]], int]
    """Function that takes the values of one agent's candidates and returns the index of the candidate with which the episode continues."""


@dataclass(frozen=True, slots=True)
class Interventions:
    """Settings of interventions: changes of every episode, each followed by continuations of the episode (`rollout.interventions`)."""

    change: Callable[[Group, int, Team], Sequence[Change]]
    """Function of a group, the index of an episode in this group and the team that returns the changes of this episode."""
    continuations: int
    """Number of continuations per change. The n-th continuations of all changes at one moment use the same seed."""
    returns: Callable[[Episode], Mapping[str, float]]
    """Function that returns each agent's return over a whole episode."""
    share: float | None = None
    """Maximum number of tokens of all continuations of a group, as a share of the tokens of the group's episodes; None for no limit."""
    tokens: int | None = None
    """Maximum number of tokens of all continuations of a step, divided equally among its groups; None for no limit."""
    says: Callable[[Group], Callable[[Slot], float]] | None = None
    """Function that takes a group without one of its episodes and returns the priority of each change of this episode, by slot. If the
    number of tokens is limited, the changes with the highest priority are continued first. If None, the changes keep their order."""


class Slot(NamedTuple):
    """The position of a change in an episode, used to compare changes of different episodes of a group."""

    agents: tuple[str, ...]
    """Names of the changed agents."""
    number: int | None
    """Index of the changed turn among the turns of the agent, or None if all turns of the agent change."""


class Change(NamedTuple):
    """An intervention that changes one episode."""

    what: Literal["resample", "replace", "remove", "swap"]
    agents: tuple[str, ...]
    """Names of the changed agents."""
    turn: int | None = None
    """Index of the turn that is resampled or replaced. For `remove` and `swap`, all turns of the agents change."""
    by: Turn | str | None = None
    """The replacement: a turn with the same prompt, or the name of the policy that replaces the policy of the agents."""


@dataclass(frozen=True, slots=True)
class Data:
    """Settings of the data of a training step: its source, and how episodes are sampled."""

    source: Literal["rollout", "demonstrations"] = "rollout"
    group_size: int = 1
    """Number of episodes per task."""
    tree: Tree | None = None
    """Settings of tree sampling, which applies at every turn of a trained agent. If None, whole episodes are sampled."""
    widths: tuple[int, ...] = ()
    """Number of samples at the first moment of an episode, at the second moment, and so on; their product is `group_size`. Episodes of
    the same branch share their turns up to the next branch."""
    interventions: Interventions | None = None
    """Changes of every episode that measure the effect of a turn or of an agent."""
    redraw: int = 0
    """Maximum number of times that a task is replaced by another task in the same step because the returns of its group have no
    variance."""
    scores: bool = False
    """Whether the credit function reads `Turn.score`, in which case the workflow must score turns."""
    observations: float = 0.0
    """Weight of the loss on the agent's next observations; with 0, observations are excluded. For algorithms with credit, the mask of
    these targets is 0, and the loss reads `Targets.observed_S`."""


@dataclass(frozen=True, slots=True)
class Update:
    """Settings of the optimiser's passes over the data of a step."""

    epochs: int = 1
    """Number of passes over the data of a step."""
    minibatches: int = 1
    """Number of optimiser steps per pass."""
    order: Order = Order()
    entropy: bool = False
    """Whether the loss reads `Outputs.entropy_K`."""


class AfterUpdate(Protocol):
    """A hook that can change the weights after the update of every step, before the weights are published."""

    @property
    def moves_weights(self) -> bool:
        """Whether the hook changes the weights of policies, in which case rollouts cannot run ahead of the update."""
        ...

    def __call__(self, step: int, team: Team, engine: Learners) -> None:
        """Run the hook after the given step (from 1)."""
        ...


@runtime_checkable
class _NeedsCritics(Protocol):
    critic: CriticSpec


S = TypeVar("S")


class Taught:
    """Settings of an algorithm whose policies learn from a teacher."""

    teacher: str | dict[str, str]
    """Name of the teacher of all policies, or a mapping from each policy to its teacher. If a teacher is a run, the policy with the same
    name in that run is used."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The definition of an algorithm: the data, the credit function, the loss and the order of updates."""

    name: str
    policy_loss: PolicyLoss
    """Loss function of every step. If `annealed` is given, this loss is used only in the first step."""
    credit: CreditFunction | None = None
    """Credit function, or None for algorithms that learn from demonstrations. If `memory` is given, this function computes the credit of
    the first step."""
    data: Data = Data()
    needs: tuple[Signal, ...] = ()
    """Signals that the credit function and the loss need (`kapelle.algorithms.signals`)."""
    update: Update = Update()
    memory: Callable[[Team, int], CreditMemory] | None = None
    """Function of the team and the seed that returns the credit memory, which replaces `credit`."""
    memory_learns: bool = False
    """Whether the memory is fitted to returns like a critic, so that it can be trained alone before the policies
    (`training.critic_warmup`)."""
    returns: Callable[[Episode], Mapping[str, float]] | None = None
    """Function that computes each agent's undiscounted return of an episode after reward sharing. If None, rewards are not shared."""
    after_update: tuple[AfterUpdate, ...] = ()
    """Hooks that run after every update, in this order."""
    checks: tuple[Callable[[Team], None], ...] = ()
    """Functions that raise ConfigError if the algorithm does not support a team."""
    lacks: str = "no turn has credit"
    """Message for a step in which no turn can be trained on."""
    annealed: Callable[[float], PolicyLoss] | None = None
    """Function that takes the completed share of the run's steps and returns the loss of the next step. None if the loss is the same in
    all steps."""

    def need(self, kind: type[S]) -> S | None:
        """Return the signal of this type that the algorithm needs, or None if the algorithm needs no signal of this type."""
        return next((signal for signal in self.needs if isinstance(signal, kind)), None)

    @property
    def critic(self) -> CriticSpec | None:
        """The critics that the algorithm needs, or None if the algorithm needs no critic."""
        return next((signal.critic for signal in self.needs if isinstance(signal, _NeedsCritics)), None)

    @property
    def judges(self) -> bool:
        """Whether the algorithm trains a verifier."""
        return self.critic is not None and self.critic.everyone

    @property
    def collects_episodes(self) -> bool:
        """Whether the algorithm learns from episodes of the team itself."""
        return self.data.source == "rollout"

    @property
    def attempts(self) -> int:
        """Number of samples that are compared with each other: the episodes of a task, or the candidates of a tree."""
        return self.data.group_size if self.data.tree is None else self.data.tree.candidates


_OF_GRPO = "`algorithm.name: grpo` and {} (docs/algorithms/grpo.md)"
ELSEWHERE = {
    "dapo": _OF_GRPO.format("`algorithm.loss.clip_high: 0.28`, `algorithm.redraw: 3`"),
    "dr_grpo": _OF_GRPO.format("`algorithm.scale: none`, `algorithm.loss.aggregation: sequence_sum`"),
    "max_rl": _OF_GRPO.format("`algorithm.scale: mean`"),
    "maxrl": _OF_GRPO.format("`algorithm.scale: mean`"),
    "dppo": _OF_GRPO.format("`algorithm.loss.kind: dppo`"),
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
    "echo": "`algorithm.loss.world_model` above 0 (docs/algorithms/grpo.md)",
    "agon": "`algorithm.name: cory` and `algorithm.reward: win`",
    "sdpo": "`algorithm.name: self_distill`",
    "sdft": "`algorithm.name: self_distill`, `algorithm.context: [solution]`",
    "opsd": "`algorithm.name: self_distill`, `algorithm.context: [solution]`",
}
"""Mapping from the name of an algorithm in papers or other libraries to the settings that select this algorithm in kapelle."""


def algorithm_class(name: str) -> type:
    """Return the settings class of an algorithm, given its name, `module:Class` or the name of an entry point."""
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
    """Return the `Algorithm` that is built from the settings of an algorithm.

    Raises ConfigError with the name of the algorithm if `build` raises an error, or if the result or one of its fields has the wrong
    type.
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
    """Raise ConfigError if a field of an `Algorithm` has the wrong type; the message names the first such field."""

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
    """Yield a message if no weights are trained or if the algorithm does not train them.

    Raises ConfigError if the team is not supported.
    """
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
    """Yield a message if a critic warmup is set but the critics cannot be trained before the policies."""
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
    """Raise ConfigError if the trainer cannot compute the sampling log-probs of a trained agent."""
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
