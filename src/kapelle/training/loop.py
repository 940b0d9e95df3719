"""The one loop: rollout → credit → collate → update → publish.

`Loop.step` is all of training; `trainer.py` records, saves and shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from kapelle.algorithm import (
    MIXER_UNDONE,
    Algorithm,
    Credit,
    CreditMemory,
    Mover,
    Order,
    UpdateSamples,
)
from kapelle.algorithms.shared.rewards import with_scores
from kapelle.engines.rollout.protocol import RolloutEngine
from kapelle.engines.train.protocol import Objective, TrainEngine
from kapelle.errors import NumericsError, TrainingHalted
from kapelle.evaluation.evaluate import greedy_play, verifier_metrics
from kapelle.functional.value_losses import explained_variance
from kapelle.metrics.definitions import (
    UNSCORED,
    demonstrated,
    none_scored,
    own_returns,
    paid_by,
    rollout_metrics,
)
from kapelle.metrics.statistics import merge_rows
from kapelle.metrics.timeline import Timeline
from kapelle.rollout.outcomes import halt_on_failures
from kapelle.rollout.partial import PartialGroup, unfinished_turns
from kapelle.rollout.play import Play, shared_rollout
from kapelle.rows import Column, Loads, Sample, Sampled, Signals, TurnKey, turns_of
from kapelle.runs.episode_json import Trace
from kapelle.runtime.interrupts import unbroken
from kapelle.runtime.process_tree import doing
from kapelle.runtime.randomness import capture_random, derive_seed, restore_random
from kapelle.runtime.trees import leaves
from kapelle.settings.schema import RunConfig
from kapelle.signals.verifier import scores
from kapelle.training.boundary import after_update, checked_loss, gather_signals, give_credit
from kapelle.training.collate import critic_samples, demonstrated_samples, fresh_samples, policy_samples
from kapelle.training.rollouts import Pending, PlayedStep, RolloutQueue, play_step, steps_ahead
from kapelle.training.tracing import traces
from kapelle.types import Group, Turn

# -------- Steps that have nothing to learn from: why, and when to tell the user

LONG = 10
"""Steps in a row without anything to learn from, after which the user is told, or nobody being paid ends the run."""
NOT_SCORED = "no episode was scored"
WHERE = "docs/howto/reward_does_not_move.md"


def why_idle(algorithm: Algorithm, metrics: Mapping[str, float], *, updated: bool, judged: bool) -> str:
    """Return why a step had nothing to learn from, in words; empty where it had.

    `metrics` are the step's, `updated` is whether anything had credit, `judged` whether turns are worth something that no
    environment says (a reward model's scores). Equal rewards teach a critic, no rewards teach it nothing.
    """
    advantages = [
        value for name, value in metrics.items() if name.startswith(("advantage/", "advantage_std/"))
    ]
    flat = algorithm.critic is None and bool(advantages) and not any(advantages)
    unscored = none_scored(metrics) and not judged and not algorithm.judges
    if updated and not flat and not unscored:
        return ""
    if metrics.get("failed_episodes") == 1.0:
        return "every episode failed"
    if unscored:
        return NOT_SCORED
    if not updated:
        return algorithm.lacks
    return (
        "every attempt at a task earned the same"
        if metrics.get("dead_groups") == 1.0
        else "every advantage is 0"
    )


class IdleSteps:
    """Counts them, and what functions that pay have returned; `say` gets each line once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._row = 0
        self._unscored = 0
        self._named: set[str] = set()

    def note(self, step: Step) -> None:
        """Take a step; TrainingHalted where `LONG` steps in a row have scored no episode."""
        for name, (paid, asked) in paid_by(step.groups).items():
            if paid < asked and name not in self._named:
                self._named.add(name)
                self._say(
                    f"the reward function `{name}` scored {paid} of {asked} episodes of step {step.number}; for the others it "
                    "returned None, which pays nothing"
                )
        self._row = self._row + 1 if step.idle else 0
        self._unscored = self._unscored + 1 if step.idle == NOT_SCORED else 0
        if self._unscored == LONG:
            said = [str(e.info[UNSCORED]) for group in step.groups for e in group.valid if UNSCORED in e.info]
            reason = max(said, key=said.count)
            raise TrainingHalted(
                f"No episode of the last {LONG} steps was scored, so that nothing is learned: {reason}. Return a number "
                "for every answer that is good or bad, 0.0 where it is worth nothing."
            )
        if self._row == LONG:
            self._say(f"{LONG} steps in a row had nothing to learn from: {step.idle}. What to do: {WHERE}")


# -------- Metrics of a step about credit, critics and time; `metrics` has those about episodes
#
# Shapes: K tokens of one agent or critic in a step.


def credit_metrics(
    turns: Sequence[tuple[TurnKey, Turn]], credit: Mapping[TurnKey, Credit]
) -> dict[str, float]:
    """Return how many turns of each agent were trained on, and the mean and spread of its advantages."""
    by_agent: dict[str, list[Tensor]] = {}
    row: dict[str, float] = {}
    for key, turn in turns:
        by_agent.setdefault(turn.agent, []).append(credit[key].advantage_T)
        row[f"samples/{turn.agent}"] = row.get(f"samples/{turn.agent}", 0.0) + float(credit[key].weight > 0)
    for agent, pieces in by_agent.items():
        all_K = torch.cat(pieces).double()
        row[f"advantage/{agent}"] = float(all_K.mean())
        row[f"advantage_std/{agent}"] = float(all_K.std()) if all_K.numel() > 1 else 0.0
    return row


def critic_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return how much of the returns' variance each critic explained before it learns from them."""
    row: dict[str, float] = {}
    for critic in dict.fromkeys(sample.learner for sample in samples):
        own = [sample for sample in samples if sample.learner == critic]
        value_K, return_K = (
            torch.cat([s.columns[column] for s in own]) for column in (Column.VALUE, Column.RETURN)
        )
        if len(return_K) > 1:
            row[f"explained_variance/{critic}"] = float(
                explained_variance(value_K, return_K, torch.ones_like(return_K))
            )
    return row


def time_metrics(clock: Timeline, tokens: int) -> dict[str, float]:
    """Return the seconds of each part of a step, and tokens per second."""
    parts = clock.seconds()
    total = sum(parts.values())
    row = {f"time/{name}": seconds for name, seconds in parts.items()}
    return row | {"time/step": total, "time/tokens_per_second": tokens / max(total, 1e-9)}


# -------- The state before a step of training, so that an interrupted step leaves no trace
#
# Playing changes the random generators and the queue of played steps. An update of one optimiser step can be interrupted
# only before it; before an update of several, the learners are copied. Copies are kept in the machine's memory, not the
# GPU's.

MOST_HELD = 1 << 30
"""Most bytes of weights and moments that are copied; above it a step that is interrupted late costs the steps since
the last checkpoint."""


class StepStart:
    """The state before a step, as far as the step has changed it."""

    def __init__(self, restore_queue: Callable[[], None], versions: Mapping[str, int] | None = None) -> None:
        """Begin a step; `restore_queue` restores the queue, `versions` are those of the trained policies."""
        self._versions = dict(versions or {})
        self._random = capture_random()
        self._restore_queue = restore_queue
        self._learners: Mapping[str, Any] | None = None
        self._memory: Mapping[str, Any] | None = None
        self.lost = False
        """True if learners are changed without a copy."""

    def hold(self, engine: TrainEngine | None, memory: CreditMemory | None) -> None:
        """Copy what an update changes: learners, if there are several optimiser steps, and the memory."""
        if engine is not None:
            state = engine.state()
            if sum(tensor.nbytes for tensor in tensors(state)) <= MOST_HELD:
                self._learners = copied(state)
            else:
                self.lost = True
        if memory is not None:
            self._memory = deepcopy(dict(memory.state()))

    def take_back(self, engine: TrainEngine, memory: CreditMemory | None) -> bool:
        """Restore everything; False if learners changed that were not copied."""
        # An error may come between the steps of two learners, where a stop does not.
        moved = self._learners is None and dict(engine.versions) != self._versions
        if self.lost or moved:
            return False
        if self._learners is not None:
            engine.load_state(self._learners)
        if self._memory is not None and memory is not None:
            memory.load_state(self._memory)
        self._restore_queue()
        restore_random(self._random)
        return True


def tensors(tree: object) -> Iterator[Tensor]:
    """Yield the tensors of a tree of mappings, lists and tuples."""
    return (leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor))


def copied(tree: Any) -> Any:
    """Return a tree with every tensor copied to the CPU."""
    if isinstance(tree, Tensor):
        return torch.empty_like(tree, device="cpu").copy_(tree.detach())
    if isinstance(tree, Mapping):
        return {key: copied(inner) for key, inner in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(copied(inner) for inner in tree)
    return tree


# -------- One update of a step: all policies at once, some of them, or one after another, by the algorithm's order
#
# Critics learn at every step, whichever policies are updated.


def update_in_order(
    engine: TrainEngine, objective: Objective, order: Order, chosen: Sequence[str], samples: UpdateSamples
) -> dict[str, float]:
    """Take the optimiser steps of the policies in `chosen` and of all critics; return metrics."""
    mover = Mover(lambda some: engine.update(some, objective), engine.score)
    return order.move(mover, chosen, samples)


COMPARED = 16
"""Turns of each policy that are compared with the trainer when a step is played before its turn."""

Source = Callable[[int], list[Group]]
"""Number of a step (from 1) → what it learns from; called once for each step, in order."""


class Sampler(Protocol):
    """Plays the steps of training somewhere else, while this process learns."""

    def begin(self, number: int, left: Sequence[PartialGroup]) -> Pending:
        """Begin to play step `number` with the weights that were published last; return what waits for its episodes.

        `left` is what the step before it has left.
        """
        ...

    def load(self, policy: str, weights: Mapping[str, Tensor], version: int) -> None:
        """Take new weights of a policy; nothing is being played."""
        ...

    @property
    def weights(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The weights that it plays with, by policy and name: those of the last `load`."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """One step of training, finished."""

    number: int
    """From 1; equal to the number of steps behind the weights."""
    groups: tuple[Group, ...]
    metrics: Mapping[str, float]
    traces: tuple[Trace, ...] = ()
    """What the tokens of a few of its episodes were credited with (`record.credit_episodes`)."""
    idle: str = ""
    """Why it had nothing to learn from, in words; empty where it had."""


class Loop:
    """Plays, credits, updates and publishes, one step at a time."""

    def __init__(
        self,
        config: RunConfig,
        algorithm: Algorithm,
        play: Play,
        engine: TrainEngine,
        source: Source | None = None,
        player: RolloutEngine | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        """Take what plays (`play`) and what learns (`engine`); for demonstrations a teacher plays.

        A `source` gives what each step learns from, and nothing is played. `player` is the rollout engine that gets new
        weights; None for none. A `sampler` plays the steps in `play`'s place, and gets new weights too.
        """
        self._sampler = sampler
        self._source = source
        self._config = config
        self._algorithm = algorithm
        self._play = play
        self._engine = engine
        self._player = player
        self._queue = RolloutQueue(steps_ahead(config.training), config.training.max_staleness)
        self.may_go_back = False
        """Whether there is a checkpoint to return to if a step is interrupted."""
        self._traces: tuple[Trace, ...] = ()
        self._pieces: dict[str, dict[int, str]] = {}
        """Texts of tokens, by policy and id."""
        self._updated = True
        """Whether this step had anything to learn from."""
        self._parity: dict[str, float] = {}
        """Gaps of the turns played in this step, if the step itself learns from turns of older weights."""
        self._memory = algorithm.memory(play.team, config.seed) if algorithm.memory else None
        for signal in algorithm.needs:
            if isinstance(signal, Loads):
                signal.load()
        critic, update = algorithm.critic, algorithm.update
        self._objective = Objective(
            checked_loss(algorithm.name, "policy_loss", algorithm.policy_loss),
            checked_loss(algorithm.name, "critic_loss", critic.loss) if critic else None,
            critic.coefficient if critic else 1.0,
            update.entropy,
            update.epochs,
            update.minibatches,
            parity=algorithm.plays and not config.training.max_staleness,
        )

    def step(self, number: int) -> Step:
        """Take step `number` (from 1) and return what happened; its result depends on the weights alone."""
        clock = Timeline()
        self._parity, self._traces = {}, ()
        self._start = StepStart(self._queue.mark(), self._engine.versions)
        play = replace(self._play, timeline=clock)
        doing(f"step {number}, rollout")
        groups = self._groups(replace(play, tree=self._algorithm.data.tree), number)
        halt_on_failures(groups, self._config.training.max_failed_share)
        metrics = rollout_metrics(groups, self._algorithm.returns or own_returns)
        if not self._algorithm.plays:
            metrics = demonstrated(metrics)
        if self._config.training.max_staleness:
            metrics |= {"staleness": self._queue.staleness(groups), **self._parity}
        doing(f"step {number}, scores")
        clock.enter("score")
        sampled = Sampled(number, groups, play.team, lambda: self._greedily(play, groups, number))
        signals = gather_signals(self._algorithm, sampled, self._engine)
        clock.leave()
        if signals.score:
            metrics |= verifier_metrics(groups, signals.score)
        doing(f"step {number}, update")
        clock.enter("update")
        self._play.engine.release_caches()
        metrics |= self._update(sampled, signals)
        clock.leave()
        clock.enter("generate")
        # Wait for the episodes that were played while this step learned; compare them with the weights that played.
        settled = self._queue.settle()
        if settled is not None:
            assert self._sampler is not None, "only a sampler plays meanwhile"
            self._compare(*settled, self._sampler.weights)
        metrics |= self._parity
        clock.leave()
        doing(f"step {number}, publishing its weights")
        clock.enter("publish")
        # Run the algorithm's hooks after an update, and publish the new weights.
        after_update(self._algorithm, sampled, self._engine)
        self.publish()
        clock.leave()
        tokens = sum(len(turn.completion_ids) for _, turn in sampled.turns)
        tokens += sum(sum(e.continued.values()) for group in groups for e in group.episodes)
        judged = self._config.reward_model is not None or self._algorithm.data.scores
        idle = why_idle(self._algorithm, metrics, updated=self._updated, judged=judged)
        return Step(number, tuple(groups), metrics | time_metrics(clock, tokens), self._traces, idle)

    def _paid(self, groups: Sequence[Group], signals: Signals) -> Sequence[Group]:
        """Return the groups with the reward model's term added."""
        model = self._config.reward_model
        return groups if model is None else with_scores(groups, signals.score, model.weight)

    def _groups(self, play: Play, number: int) -> list[Group]:
        """Return what step `number` learns from; ParityError if weights other than the allowed ones sampled it."""
        if self._source is not None:
            return self._source(number)
        if not self._algorithm.plays:
            return play_step(play, self._config, self._algorithm, number).groups
        sampler = self._sampler
        versions = dict(self._engine.versions)

        def played(k: int, left: Sequence[PartialGroup]) -> PlayedStep:
            step = (
                play_step(play, self._config, self._algorithm, k, left)
                if sampler is None
                else sampler.begin(k, left)()
            )
            # Where steps are played ahead, the update comes too late to compare trainer and sampler.
            if self._config.training.max_staleness:
                self._compare(step, versions)
            return step

        return self._queue.take(number, versions, played, None if sampler is None else sampler.begin)

    def _compare(
        self,
        played: PlayedStep,
        versions: Mapping[str, int],
        weights: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Compare some of the tokens that weights of these versions sampled with the trainer's log-probs of them."""
        partial = self._config.training.partial_rollouts
        turns = [turn for _, turn in turns_of(played.groups)] + unfinished_turns(played.left)
        fresh = fresh_samples(turns, self._play.team, COMPARED, versions if partial else None)
        self._parity = merge_rows([self._parity, self._engine.check_parity(fresh, weights)])

    def _update(self, sampled: Sampled, signals: Signals) -> dict[str, float]:
        """Learn from a step and return metrics, in such a way that an interrupted step leaves no trace."""
        several = self._algorithm.update.order.sequential or (
            self._objective.epochs * self._objective.minibatches > 1
        )
        self._start.hold(self._engine if several else None, self._memory)
        # Where nothing could restore the weights, a stop waits for the update's end.
        with unbroken() if self._start.lost and not self.may_go_back else nullcontext():
            return self._learn(sampled, signals)

    def take_back(self) -> bool:
        """Undo an unfinished step; False if weights have changed that cannot be restored."""
        return self._start.take_back(self._engine, self._memory)

    def _learn(self, sampled: Sampled, signals: Signals) -> dict[str, float]:
        """Give credit to a step's turns, and update policies and critics."""
        team, algorithm, number = self._play.team, self._algorithm, sampled.number
        groups = self._paid(sampled.groups, signals)
        give = self._memory or algorithm.credit
        if give is None:
            samples = demonstrated_samples(groups, team, algorithm.data.observations)
            self._updated = bool(samples)
            return self._engine.update(samples, self._objective) if samples else {}
        stop = self._config.training.non_finite == "stop"
        credit = give_credit(algorithm, give, sampled, groups, signals, stop)
        metrics = credit_metrics(sampled.trained, credit)
        if self._memory is not None:
            metrics |= self._memory.metrics()
            if MIXER_UNDONE in metrics and stop:
                raise NumericsError(
                    f"At step {number} the fit of utilities and mixer broke its weights. No checkpoint holds them; lower "
                    "`algorithm.fit.lr` in a new run, or leave such fits out: resume with `training.non_finite=skip`."
                )
        critics: list[Sample] = []
        if algorithm.critic:
            reader = self._engine.renderer
            critics = critic_samples(groups, team, credit, signals, algorithm.critic, reader)
            if algorithm.critic.view != "answer":
                metrics |= critic_metrics(critics)
        learned = policy_samples(sampled.trained, team, credit, signals)
        self._updated = bool(learned or critics)
        metrics |= update_in_order(
            self._engine,
            self._objective,
            algorithm.update.order,
            algorithm.update.order.choose(team.trained, number, self._config.seed),
            UpdateSamples(learned, critics, groups),
        )
        if most := self._config.record.credit_episodes:
            with unbroken():  # weights have changed: a stop waits for the step's end
                self._traces = traces(
                    groups, sampled.trained, credit, learned, self._engine, most, self._pieces
                )
        return metrics

    def _greedily(self, play: Play, groups: Sequence[Group], number: int) -> Sequence[Group]:
        """Play each task once more, all agents greedy."""
        seed = derive_seed(self._config.seed, "greedy", number)
        tasks = [group.task for group in groups]
        played = shared_rollout(greedy_play(play), tasks, 1, seed)
        if self._config.reward_model is None:
            return played
        # The returns that it is compared with have the model's term too.
        return self._paid(played, Signals(score=scores(played, self._engine)))

    def state(self) -> dict[str, object]:
        """Return the memory of credit and the queue of played steps, for a checkpoint."""
        memory = self._memory.state() if self._memory is not None else {}
        return {"memory": memory, "ahead": self._queue.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._queue.load_state(state["ahead"])
        if self._memory is not None:
            self._memory.load_state(state["memory"])

    def publish(self) -> None:
        """Load weights that changed since the last call into the rollout engine."""
        if self._player is None:
            return
        for policy, published in self._engine.publish().items():
            self._player.load(policy, published.weights, published.version)
            if self._sampler is not None:
                self._sampler.load(policy, published.weights, published.version)
