"""The one loop: rollout → credit → collate → update → publish.

`Loop.step` is the whole of training; everything that is kept or shown stands around it, in `trainer.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from kapelle.algorithm import (
    MIXER_UNDONE,
    Algorithm,
    Credit,
    CreditFunction,
    CreditMemory,
    Embedding,
    Signals,
    TurnKey,
    turns_of,
)
from kapelle.algorithms.shared.rewards import with_scores
from kapelle.engines.rollout.protocol import RolloutEngine
from kapelle.engines.train.batch import Sample
from kapelle.engines.train.protocol import Objective, TrainEngine, reference_name
from kapelle.environment import Environment
from kapelle.environments.bounded_worlds import task_of
from kapelle.errors import NumericsError, TrainingHalted
from kapelle.evaluation.evaluate import verifier_metrics
from kapelle.former_names import release_caches
from kapelle.metrics.definitions import demonstrated, is_dead, own_returns, rollout_metrics
from kapelle.metrics.timeline import Timeline
from kapelle.rollout.play import Play, rollout
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.interrupts import unbroken
from kapelle.runtime.seeds import derive_seed
from kapelle.settings.schema import RunConfig
from kapelle.team import VERIFIER
from kapelle.training.collate import (
    critic_samples,
    demonstrated_samples,
    fresh_samples,
    policy_samples,
    reference_samples,
    value_samples,
    verifier_samples,
)
from kapelle.training.queue import RolloutQueue
from kapelle.training.signals.embeddings import turn_reader
from kapelle.training.step_start import StepStart
from kapelle.training.updates import merge_rows, update_in_order
from kapelle.types import Episode, Group, Task

COMPARED = 16
"""Turns of each policy that are compared with the trainer when a step is played ahead of its update."""

Source = Callable[[int], list[Group]]
"""Number of a step (from 1) → what it learns from; asked once for each step, in order."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of training, finished."""

    number: int
    """From 1; equal to the number of steps behind the weights."""
    groups: tuple[Group, ...]
    metrics: Mapping[str, float]


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
    ) -> None:
        """Take what acts (`play`) and what learns (`engine`); for demonstrations a teacher acts.

        With a `source` nobody acts: it has what each step learns from. `player` plays with what is learned; None: nobody.
        """
        self._source = source
        self._config = config
        self._algorithm = algorithm
        self._play = play
        self._engine = engine
        self._player = player
        self._ahead = RolloutQueue(config.training.max_staleness)
        self.may_go_back = False
        """Whether whoever breaks a step off has a checkpoint to go back to."""
        self._parity: dict[str, float] = {}
        """Of what was played in this step, where the step learns from what older weights said."""
        self._memory = algorithm.memory(play.team, config.seed) if algorithm.memory else None
        named = algorithm.embeddings
        self._read = None if named is None else turn_reader(named, play.team, engine)
        critic = algorithm.critic
        self._objective = Objective(
            algorithm.policy_loss,
            critic.loss if critic else None,
            critic.coefficient if critic else 1.0,
            algorithm.entropy,
            algorithm.epochs,
            algorithm.minibatches,
            parity=algorithm.source == "rollout" and not config.training.max_staleness,
        )

    def step(self, number: int) -> Step:
        """Take step `number` (from 1) and return what happened; its result depends on the weights alone."""
        clock = Timeline()
        self._parity = {}
        self._start = StepStart(self._ahead.mark(), self._engine.versions)
        play = replace(self._play, timeline=clock)
        groups = self._taken(replace(play, tree=self._algorithm.tree), number)
        self._halt_on_failures(groups)
        metrics = rollout_metrics(groups, self._algorithm.returns or own_returns)
        if self._algorithm.source == "demonstrations":
            metrics = demonstrated(metrics)
        if self._config.training.max_staleness:
            metrics |= {"staleness": self._ahead.staleness(groups), **self._parity}
        clock.enter("score")
        signals = self._signals(play, groups, number)
        clock.leave()
        if signals.score:
            metrics |= verifier_metrics(groups, signals.score)
        clock.enter("update")
        release_caches(self._play.engine)
        metrics |= self._update(self._paid(groups, signals), signals, number)
        clock.leave()
        clock.enter("publish")
        self._hand_over(number)
        clock.leave()
        tokens = sum(len(turn.completion_ids) for _, turn in turns_of(groups, trained_only=False))
        tokens += sum(sum(e.continued.values()) for group in groups for e in group.episodes)
        return Step(number, tuple(groups), metrics | _time_metrics(clock, tokens))

    def _paid(self, groups: Sequence[Group], signals: Signals) -> Sequence[Group]:
        """Return the groups as they are learned from: with the reward model's term."""
        model = self._config.reward_model
        return groups if model is None else with_scores(groups, signals.score, model.weight)

    def _taken(self, play: Play, number: int) -> list[Group]:
        """Return what step `number` learns from; ParityError when other weights spoke than may have."""
        if self._source is not None:
            return self._source(number)
        if self._algorithm.source != "rollout":
            return self._played(play, number)
        return self._ahead.take(number, self._engine.versions, lambda k: self._compared(play, k))

    def _compared(self, play: Play, number: int) -> list[Group]:
        """Play a step; where the update will come too late to compare trainer and sampler, compare some turns now."""
        groups = self._played(play, number)
        if self._config.training.max_staleness:
            found = self._engine.check_parity(fresh_samples(groups, play.team, COMPARED))
            self._parity = merge_rows([self._parity, found])
        return groups

    def _played(self, play: Play, number: int) -> list[Group]:
        """Play the step's tasks; with `redraw`, groups without variance make way for further tasks."""
        algorithm = self._algorithm
        seed = derive_seed(self._config.seed, "rollout", number)
        tasks = training_tasks(play.environment, self._config, number)
        groups = run_async(lambda: rollout(play, tasks, algorithm.group_size, seed))
        returns = algorithm.returns or own_returns
        for attempt in range(1, algorithm.redraw + 1):
            dead = [k for k, group in enumerate(groups) if is_dead(group, returns)]
            if not dead:
                break
            others = training_tasks(play.environment, self._config, number, attempt)
            again, other_seed = [others[k] for k in dead], derive_seed(seed, "redraw", attempt)
            fresh = run_async(lambda again=again, s=other_seed: rollout(play, again, algorithm.group_size, s))  # type: ignore[misc]
            for k, group in zip(dead, fresh, strict=True):
                groups[k] = group
        return groups

    def _update(self, groups: Sequence[Group], signals: Signals, number: int) -> dict[str, float]:
        algorithm = self._algorithm
        give = self._memory or algorithm.credit
        often = algorithm.order.sequential or self._objective.epochs * self._objective.minibatches > 1
        self._start.hold(self._engine if often else None, self._memory)
        if self._start.lost and not self.may_go_back:
            with unbroken():
                return self._learn(give, groups, signals, number)
        return self._learn(give, groups, signals, number)

    def take_back(self) -> bool:
        """Undo what a step that did not end has done; False where weights have moved that cannot be put back."""
        return self._start.take_back(self._engine, self._memory)

    def _learn(
        self,
        give: CreditMemory | CreditFunction | None,
        groups: Sequence[Group],
        signals: Signals,
        number: int,
    ) -> dict[str, float]:
        team, algorithm = self._play.team, self._algorithm
        if give is None:
            samples = demonstrated_samples(groups, team, algorithm.observations)
            return self._engine.update(samples, self._objective) if samples else {}
        credit = give(groups, signals)
        metrics = _credit_metrics(groups, credit)
        if self._memory is not None:
            metrics |= self._memory.metrics()
            if MIXER_UNDONE in metrics and self._config.training.non_finite == "stop":
                raise NumericsError(
                    f"At step {number} the fit of utilities and mixer broke what it learns. No checkpoint holds it; lower "
                    "`algorithm.fit.lr` in a new run, or leave such fits out: resume with `training.non_finite=skip`."
                )
        critics: list[Sample] = []
        if algorithm.critic:
            reader = self._engine.renderer
            critics = critic_samples(groups, team, credit, signals, algorithm.critic, reader)
            if algorithm.critic.view != "answer":
                metrics |= _critic_metrics(critics)
        return metrics | update_in_order(
            self._engine,
            self._objective,
            algorithm.order,
            algorithm.order.choose(team.trained, number, self._config.seed),
            policy_samples(groups, team, credit, signals),
            critics,
            groups,
        )

    def _signals(self, play: Play, groups: Sequence[Group], number: int) -> Signals:
        team, algorithm = self._play.team, self._algorithm
        values: dict[TurnKey, Tensor] = {}
        bootstrap: dict[TurnKey, Tensor] = {}
        if algorithm.critic is not None:
            ask, after = value_samples(groups, team, algorithm.critic, self._engine.renderer)
            scored = self._engine.score([*ask.values(), *after.values()])
            values = dict(zip(ask, scored, strict=False))
            bootstrap = {key: value[0] for key, value in zip(after, scored[len(ask) :], strict=True)}
        reference: dict[TurnKey, Tensor] = {}
        if algorithm.reference_every is not None:
            reference = self._scored(groups, {name: reference_name(name) for name in team.trained})
        return Signals(
            values,
            bootstrap,
            reference,
            self._scored(groups, {name: name for name in team.trained}) if algorithm.proximal else {},
            self._greedy(play, groups, number) if algorithm.greedy else {},
            self._embedding(groups),
            self._verified(groups) if algorithm.verifier is not None else {},
            step=number,
        )

    def _scored(self, groups: Sequence[Group], name: Mapping[str, str]) -> dict[TurnKey, Tensor]:
        """Return the log-probs of every trained turn by the learner or reference that `name` gives its policy."""
        questions = reference_samples(groups, self._play.team, name)
        return dict(zip(questions, self._engine.score(list(questions.values())), strict=True))

    def _verified(self, groups: Sequence[Group]) -> dict[TurnKey, float]:
        questions = verifier_samples(groups, self._engine.renderer(VERIFIER))
        scores = self._engine.score(list(questions.values()))
        return {key: float(score.sigmoid()) for key, score in zip(questions, scores, strict=True)}

    def _embedding(self, groups: Sequence[Group]) -> dict[TurnKey, Embedding]:
        return {} if self._read is None else self._read(groups)

    def _greedy(self, play: Play, groups: Sequence[Group], number: int) -> dict[int, Episode]:
        """Play each task once more with every agent at its likeliest; a task where that fails is left out."""
        seed = derive_seed(self._config.seed, "greedy", number)
        tasks = [group.task for group in groups]
        played = run_async(lambda: rollout(greedy_play(play), tasks, 1, seed))
        if self._config.reward_model is not None:  # what is compared with it has the model's term too
            played = list(self._paid(played, Signals(score=self._verified(played))))
        return {g: group.episodes[0] for g, group in enumerate(played) if group.episodes[0].error is None}

    def _hand_over(self, number: int) -> None:
        """Exchange roles where it is time, and let the rollout engine act with the new weights."""
        every = self._algorithm.swap_every
        if every and number % every == 0:
            self._engine.exchange(*self._play.team.trained[:2])
        self.publish()
        every_reference = self._algorithm.reference_every
        if every_reference and number % every_reference == 0:
            self._engine.refresh_references()

    def state(self) -> dict[str, object]:
        """Return what credit remembers and what is played ahead, for a checkpoint."""
        memory = self._memory.state() if self._memory is not None else {}
        return {"memory": memory, "ahead": self._ahead.state()}

    def load_state(self, state: Mapping[str, object]) -> None:
        """Take what `state` returned."""
        self._ahead.load_state(cast("Mapping[str, object]", state["ahead"]))
        if self._memory is not None:
            self._memory.load_state(cast("Mapping[str, object]", state["memory"]))

    def publish(self) -> None:
        """Let the rollout engine play with what has been learned, or loaded, since the last time."""
        if self._player is not None:
            for policy, published in self._engine.publish().items():
                self._player.load(policy, published.weights, published.version)

    def _halt_on_failures(self, groups: Sequence[Group]) -> None:
        errors = [e.error for group in groups for e in group.episodes if e.error is not None]
        total = sum(len(group.episodes) for group in groups)
        bound = self._config.training.max_failed_share
        if len(errors) > bound * total:
            reason, times = Counter(errors).most_common(1)[0]
            raise TrainingHalted(
                f"{len(errors)} of {total} episodes of this step failed, more than `training.max_failed_share` = "
                f"{bound}. Most often ({times} times): {reason}"
            )


def training_tasks(environment: Environment, config: RunConfig, step: int, attempt: int = 0) -> list[Task]:
    """Return the tasks of a step: every task of a finite split once per epoch, in an order drawn anew.

    `attempt` gives a further draw for the same step, of what a later step plays too.
    """
    import random

    count = config.training.tasks_per_step
    size = environment.size("train")
    ahead = attempt * config.training.steps
    cursors = range((step - 1 + ahead) * count, (step + ahead) * count)
    if size is None:
        return [
            task_of(environment, "train", derive_seed(config.seed, "task", cursor) >> 16)
            for cursor in cursors
        ]
    orders: dict[int, list[int]] = {}
    for epoch in {cursor // size for cursor in cursors}:
        orders[epoch] = list(range(size))
        random.Random(derive_seed(config.seed, "epoch", epoch)).shuffle(orders[epoch])
    return [task_of(environment, "train", orders[cursor // size][cursor % size]) for cursor in cursors]


def greedy_play(play: Play) -> Play:
    """Return the same play with every agent choosing its likeliest tokens."""
    from kapelle.evaluation.evaluate import greedy

    return replace(play, sampling={agent.name: greedy(agent.sampling) for agent in play.team.agents})


def _credit_metrics(groups: Sequence[Group], credit: Mapping[TurnKey, Credit]) -> dict[str, float]:
    import torch

    by_agent: dict[str, list[Tensor]] = {}
    row: dict[str, float] = {}
    for key, turn in turns_of(groups):
        by_agent.setdefault(turn.agent, []).append(credit[key].advantage_T)
        row[f"samples/{turn.agent}"] = row.get(f"samples/{turn.agent}", 0.0) + float(credit[key].weight > 0)
    for agent, pieces in by_agent.items():
        all_K = torch.cat(pieces).double()
        row[f"advantage/{agent}"] = float(all_K.mean())
        row[f"advantage_std/{agent}"] = float(all_K.std()) if all_K.numel() > 1 else 0.0
    return row


def _critic_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return how much of the returns' variance each critic foresaw, before it learns from them."""
    import torch

    from kapelle.functional.value_losses import explained_variance

    row: dict[str, float] = {}
    for critic in dict.fromkeys(sample.learner for sample in samples):
        own = [sample for sample in samples if sample.learner == critic]
        value_K, return_K = (torch.cat([s.columns[column] for s in own]) for column in ("value", "return"))
        if len(return_K) > 1:
            row[f"explained_variance/{critic}"] = float(
                explained_variance(value_K, return_K, torch.ones_like(return_K))
            )
    return row


def _time_metrics(clock: Timeline, tokens: int) -> dict[str, float]:
    parts = clock.seconds()
    total = sum(parts.values())
    row = {f"time/{name}": seconds for name, seconds in parts.items()}
    return row | {"time/step": total, "time/tokens_per_second": tokens / max(total, 1e-9)}
